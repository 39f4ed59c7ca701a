"""The sum of sparse tensors as one request of the core, for torch.distributed: the entries of all ranks are gathered,
then entries at the same place are added up, as gloo does it."""
from typing import List, Sequence

import torch

from lightcc.core import lib
from lightcc.torch.sparse import SUMS, divided


def entries(tensor: torch.Tensor, op: int, verb: str) -> List[torch.Tensor]:
    """What is to be gathered of a torch.sparse_coo tensor, coalesced or not: its indices, its values, and no
    rows of its whole shape, by which ranks that disagree on the shape are found. verb: who asks, for errors.
    ValueError for another layout, an op other than Sum and Average, and bool."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"{verb}: the tensor has layout {tensor.layout}; send tensor.to_sparse_coo() or to_dense().")
    if op not in SUMS:
        raise ValueError(f"{verb} of a sparse tensor: the op can be a sum or an average; another one needs the zeros "
                         "too. Send tensor.to_dense().")
    if tensor.dtype is torch.bool:
        raise ValueError(f"{verb} of a sparse tensor: torch.bool has no sum.")
    tensor = tensor.detach()
    values = tensor._values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.contiguous()
    return [tensor._indices().t().contiguous(), values, values.new_empty((0, *tensor.shape))]


def summed(gathered: Sequence[torch.Tensor], like: torch.Tensor, op: int, size: int) -> torch.Tensor:
    """The sum or the average over `size` ranks, coalesced; gathered: what came of `entries(like)` of all ranks."""
    indices, values, _ = gathered
    if like.is_complex():
        values = torch.view_as_complex(values)
    total = torch.sparse_coo_tensor(indices.t(), values, like.shape, check_invariants=False).coalesce()
    if op != lib.AVERAGE:
        return total
    return divided(total, size).coalesce()

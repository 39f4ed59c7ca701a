"""Sparse tensors (torch.sparse_coo): the sum over ranks is what all of them have, one after the other.

Rows that several ranks have stay apart until someone coalesces: the sum is uncoalesced, and nothing is added up on the
way. So two all-gathers are all it takes, of the indices and of the values.
"""
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from lightcc.core import lib, ops
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import global_process_set


def sparse_allreduce_async(tensor, name, op, process_set=global_process_set):
    """Starts the reduction of a sparse tensor; returns a function that waits and returns the sum or the average.

    tensor: torch.sparse_coo on the CPU or a CUDA GPU, coalesced or not, also hybrid (with dense dimensions) and without
    entries; the ranks' tensors need the same shape, dtype and number of sparse dimensions, not the same number of
    entries. Its values: any dtype that travels but bool; it must not change until the function has returned.
    name: travels as "<name>.indices" and "<name>.values"; None: numbered. op: Sum, or Average, which divides by the
    size of the set (integers are coalesced for it and truncate towards zero). A rank that has joined adds nothing.
    The function returns an uncoalesced sparse tensor, the ranks' entries in rank order; called again, the same one.

    Errors: ValueError for another op, a tensor that is not sparse_coo, a dtype that cannot travel, a name in flight, an
    unknown set or one without this rank. HorovodInternalError as for allgather; from the function, on every rank, if
    the ranks disagree. Source: horovod.torch.mpi_ops.

    >>> rows = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 4), (3, 4))
    >>> wait = hvd.sparse_allreduce_async(rows, "rows", hvd.Average); wait().to_dense()[:, 0]
    tensor([1., 0., 1.])
    """
    op = ops.reduce_op(op)
    if op not in SUMS:
        raise ValueError(f"sparse_allreduce of {name or 'a tensor'}: op must be Sum or Average; another one needs the "
                         "zeros too. Send tensor.to_dense() with allreduce.")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"sparse_allreduce of {name or 'a tensor'}: it must be a torch.sparse_coo tensor, not {what}; "
                         "make it one with tensor.to_sparse().")
    if tensor.dtype is torch.bool:
        raise ValueError(f"sparse_allreduce of {name or 'a tensor'}: tensor type torch.bool is not supported; it has "
                         "no sum.")
    wait = gather_async(tensor.detach(), name, process_set)
    done: List[torch.Tensor] = []

    def result() -> torch.Tensor:
        if not done:
            done.append(divided(wait(), process_set.size()) if op == ops.Average else wait())
        return done[0]
    return result


SUMS = (ops.ReduceOps.Average, ops.ReduceOps.Sum)  # what a list of entries can stand for


def gather_async(tensor: torch.Tensor, name: Optional[str], process_set) -> Callable[[], torch.Tensor]:
    """Starts it; the function that is returned waits and makes one sparse tensor of the entries of all ranks."""
    indices, values = tensor._indices().t().contiguous(), tensor._values().contiguous()
    # All-gather compares all but dimension 0: no rows of the tensor's whole shape make it compare that too.
    whole = values.new_empty((0, *tensor.shape))
    shape, epoch = tensor.shape, lib.epoch
    handles = [ops.allgather_async(indices, name and f"{name}.indices", process_set),
               ops.grouped_allgather_async([values, whole], name and f"{name}.values", process_set)]

    def wait() -> torch.Tensor:
        if epoch != lib.epoch or not lib.initialized():
            raise HorovodInternalError(f"sparse_allreduce of tensor '{name}': lightcc was shut down while it was in "
                                       "flight.")
        indices, values = _finished(handles, name)
        return valid(indices.t(), values[0], shape)
    return _once(wait)


def _once(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A function that calls this one once, and then returns or raises the same again."""
    done: List[Any] = []

    def once() -> torch.Tensor:
        if not done:
            try:
                done.append(function())
            except (HorovodInternalError, ValueError) as error:
                done.append(error)
        if isinstance(done[0], Exception):
            raise done[0]
        return done[0]
    return once


def _finished(handles: Sequence[int], name: Optional[str]) -> List[Any]:
    """The results of all; once all are done, what the first of them failed with."""
    results, failure = [], None
    for handle in handles:
        try:
            results.append(ops.synchronize(handle))
        except (HorovodInternalError, ValueError) as error:
            failure = failure or error
    if failure is not None:
        raise type(failure)(f"sparse_allreduce of tensor '{name}' (indices [entries, sparse dimensions]; values "
                                   f"1of2, the shape of the whole tensor 2of2): {failure}") from failure
    return results


def divided(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The tensor by count, as Average has it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return with_values(tensor, tensor._values() / count)
    tensor = tensor.coalesce()  # the sum is truncated, not each part of it
    return with_values(tensor, torch.div(tensor._values(), count, rounding_mode="trunc"))


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with other values at the same places."""
    return valid(tensor._indices(), values, tensor.shape)


def valid(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], **options: bool) -> torch.Tensor:
    """A sparse tensor of indices that are known to be within its shape, so that nothing is checked. PyTorch 2.11 and
    2.12 warn that nothing is checked, also where check_invariants=False says that this is meant.

    >>> valid(torch.tensor([[1]]), torch.ones(1), (2,)).to_dense()
    tensor([0., 1.])
    """
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, shape, **options)


# The form of gradients

def agree(forms: Sequence[Tuple[bool, int]], name: str, process_set) -> List[Tuple[bool, int]]:
    """For each gradient: whether any rank has it dense, and the most sparse dimensions that any rank has it with."""
    mine = torch.tensor([number for form in forms for number in form], dtype=torch.int32,
                        device="cpu")
    try:
        all_ranks = ops.allreduce(mine, name=name, op=ops.ReduceOps.Max, process_set=process_set).tolist()
    except HorovodInternalError as error:
        if error.status != lib.MISMATCH:  # for example, a rank is lost: that error is clearer
            raise
        raise HorovodInternalError("The ranks could not agree on which gradients are sparse; if they disagree on the "
                                   "shape, two numbers for each parameter, their optimizers have different parameters: "
                                   f"{error}") from error
    return [(bool(dense), dimensions) for dense, dimensions in zip(all_ranks[::2], all_ranks[1::2])]


def form_of(grad: Optional[torch.Tensor]) -> Tuple[bool, int]:
    """(whether a gradient is dense, its sparse dimensions); (False, 0) for none."""
    if grad is None:
        return False, 0
    return (False, grad.sparse_dim()) if grad.layout is torch.sparse_coo else (True, 0)


def in_form(grad: Optional[torch.Tensor], dimensions: int, like: torch.Tensor,
            dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """A gradient of any form with so many sparse dimensions; no entries, of this dtype or that of like, if there is
    none."""
    if grad is None:
        return valid(torch.empty(dimensions, 0, dtype=torch.int64, device=like.device),
                     like.new_empty(0, *like.shape[dimensions:], dtype=dtype), like.shape)
    grad = grad.detach()
    if form_of(grad) == (False, dimensions):
        return grad
    return dense(grad).to_sparse(dimensions)


# Sparse gradients that travel as dense ones

def dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient of any form as a dense one. to_dense of PyTorch (seen with 2.13) makes zeros of a single value that an
    expand() has made, as of sum() over one row of an embedding with one column.

    >>> value = torch.ones(1).expand(1, 1); grad = torch.sparse_coo_tensor([[1]], value, (2, 1))
    >>> dense(grad).flatten()
    tensor([0., 1.])
    """
    if grad.layout is torch.sparse_coo and grad._values().numel() == 1:
        grad = with_values(grad, grad._values().clone(memory_format=torch.contiguous_format))
    return grad.to_dense()


def places(grad: Optional[torch.Tensor], dimensions: int, like: torch.Tensor) -> torch.Tensor:
    """uint8 over the sparse dimensions: 1 where a gradient of any form has an entry, also one of zeros."""
    mine = torch.zeros(like.shape[:dimensions], dtype=torch.uint8, device=like.device)
    mine[tuple(in_form(grad, dimensions, like)._indices())] = 1
    return mine


def at_places(whole: torch.Tensor, where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a dense tensor has at these places, as a coalesced sparse one of the dtype; shares no memory with it."""
    indices = where.nonzero().t()
    return valid(indices, whole[tuple(indices)].to(dtype), whole.shape, is_coalesced=True)

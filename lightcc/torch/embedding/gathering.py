"""From the rows of a lookup to a module's output and back: one row an id, or pooled rows, as autograd functions.

`inverse` says for each id which row of the lookup is its own. The gradients of a row's ids are added up here, so that a
row travels once.
"""
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.function import once_differentiable

from lightcc.embedding import kernels
from lightcc.torch.embedding.parameter import Pending

_leaf = torch.zeros((), requires_grad=True)  # what makes autograd call backward; it never gets a gradient


def gathered(pending: Pending, inverse: torch.Tensor, training: bool) -> torch.Tensor:
    """(ids, dim): one row an id."""
    return _Gathered.apply(_leaf if training else None, pending, inverse)


class Bags(NamedTuple):
    """offsets: int64, where each bag begins in the ids, and their number at the end; mode: sum, mean or max."""

    offsets: torch.Tensor
    mode: str


def pooled(pending: Pending, inverse: torch.Tensor, bags: Bags, weights: Optional[torch.Tensor],
           training: bool) -> torch.Tensor:
    """(bags, dim): the rows of a bag's ids, summed, averaged, or the largest of each element; an empty bag is zero.

    weights: one an id, of the rows' dtype, or None: 1 each.
    """
    return _Pooled.apply(_leaf if training else None, pending, inverse, bags, weights)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Optional[torch.Tensor], pending: Pending, inverse: torch.Tensor) -> torch.Tensor:
        ctx.pending, ctx.inverse = pending, inverse
        if pending.found.plain and len(inverse) == len(pending.rows):
            return pending.rows.detach()  # another tensor: as the output it refers to the graph
        output = pending.rows.new_empty((len(inverse), pending.rows.shape[1]))
        kernels.gather(pending.rows.numpy(), inverse.numpy(), output.numpy())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        add = kernels.sum_by_row if ctx.pending.grad is None else kernels.add_by_row
        add(gradient.contiguous().numpy(), ctx.inverse.numpy(), ctx.pending.writable_grad(cleared=False).numpy())
        return None, None, None


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Optional[torch.Tensor], pending: Pending, inverse: torch.Tensor, bags: Bags,
                weights: Optional[torch.Tensor]) -> torch.Tensor:
        rows = pending.rows
        output = rows.new_empty((len(bags.offsets) - 1, rows.shape[1]))
        largest = torch.empty(output.shape, dtype=torch.int64) if bags.mode == "max" else None
        kernels.pool(rows.numpy(), inverse.numpy(), bags.offsets.numpy(), _numpy(weights), bags.mode, output.numpy(),
                     _numpy(largest))
        ctx.pending, ctx.inverse, ctx.bags, ctx.weights, ctx.largest = pending, inverse, bags, weights, largest
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        of_weights = torch.empty_like(ctx.weights) if ctx.needs_input_grad[4] else None
        kernels.add_pooled(ctx.pending.rows.numpy(), ctx.inverse.numpy(), ctx.bags.offsets.numpy(),
                           _numpy(ctx.weights), ctx.bags.mode, _numpy(ctx.largest), gradient.contiguous().numpy(),
                           ctx.pending.writable_grad().numpy(), _numpy(of_weights))
        return None, None, None, None, of_weights


def _numpy(tensor: Optional[torch.Tensor]) -> Optional[Any]:
    return None if tensor is None else tensor.detach().numpy()

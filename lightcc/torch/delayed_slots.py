"""The gradients of one step while they are under way, for DelayedGradients; and what becomes of them then."""
import itertools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from lightcc.core import lib
from lightcc.torch import changed_gradients, sparse
from lightcc.torch.gradient import Gradient, is_part
from lightcc.torch.gradient_reducer import GradientReducer


class DelayedReducer(GradientReducer):
    """Reduces gradients while p.grad is another step's."""

    def leave(self, grad_scaler: bool) -> None:
        """Everything is sent; p.grad is the program's again. RuntimeError, as of finish, if it has changed one."""
        sent = [gradient for gradient in self.gradients if gradient.sent]
        suspects = changed_gradients.undelivered(sent)[1]
        if suspects and self._epoch == lib.epoch and lib.initialized():
            changed_gradients.expect_unchanged(suspects, grad_scaler)
        changed_gradients.forget(sent)

    def _undelivered(self, sent: Sequence[Gradient]) -> Tuple[Sequence[Gradient], Sequence[Gradient]]:
        return sent, []


class Slot:
    """The gradients of one step."""

    def __init__(self, reducer: Optional[DelayedReducer], gradients: Dict[torch.Tensor, Gradient]):
        self.reducer, self.gradients = reducer, gradients  # without reducer the rank has nobody to exchange with
        self.under_way = False
        self.arrived: Optional[List[Optional[torch.Tensor]]] = None  # of each parameter, if no request is in flight
        self.loaded = False                                # they are from a checkpoint or rank, and no step was since
        self.scale = 1.0                                   # of the loss
        self.weights: List[torch.Tensor] = []              # for which they were computed, for the compensation

    def drop(self) -> None:
        if self.reducer is not None:
            self.reducer.drain()
        self.under_way, self.arrived = False, None

    def arrive(self, parameters: List[torch.Tensor]) -> None:
        """Waits for them; p.grad stays what it is."""
        if self.arrived is None and self.reducer is not None:
            grads = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            try:
                self.reducer.finish()
                self.arrived = [None if p.grad is None else p.grad.clone() for p in parameters]
            finally:
                for p, grad in zip(parameters, grads):
                    p.grad = grad

    def deliver(self, parameters: List[torch.Tensor], grad_scaler: bool) -> None:
        """Makes each p.grad what has arrived; None for a parameter that had no part in that step."""
        self.under_way = False
        if self.arrived is None:
            sent = {id(gradient.parameter) for gradient in self.reducer.gradients if gradient.sent}
            for p in parameters:
                if id(p) not in sent and p.requires_grad:  # it was unfrozen or added since
                    p.grad = None
            self.reducer.finish(grad_scaler)
            return
        for p, grad in itertools.zip_longest(parameters, self.arrived):
            if p.requires_grad and is_part(p.grad) and grad is not None and grad.layout is torch.strided:
                p.grad.copy_(grad)
            elif p.requires_grad:
                p.grad = grad
        self.arrived = None


def kept(grad: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A gradient, for later; what the program does with its own memory changes nothing."""
    return None if grad is None else grad.clone() if is_part(grad) else grad.detach()


def values_of(grad: torch.Tensor) -> torch.Tensor:
    return grad._values() if grad.layout is torch.sparse_coo else grad


def compensated(grad: torch.Tensor, moved: torch.Tensor, factor: float) -> torch.Tensor:
    """grad + factor grad grad moved, element by element; of a sparse gradient, whose zeros stay, in its places.

    >>> compensated(torch.tensor([2.0]), torch.tensor([0.5]), 0.1)
    tensor([2.2000])
    """
    if grad.layout is not torch.sparse_coo:
        return grad.addcmul_(grad * grad, moved, value=factor)
    grad = grad.coalesce()
    values = grad.values()
    moved = moved[tuple(grad.indices())]
    return sparse.valid(grad.indices(), values.addcmul(values * values, moved, value=factor), grad.shape,
                        is_coalesced=True)


def packed(grad: Optional[torch.Tensor]) -> Any:
    """A gradient in plain values and dense tensors.

    >>> packed(torch.ones(1)), packed(None), len(packed(torch.ones(1).to_sparse()))
    (tensor([1.]), None, 3)
    """
    if grad is None or grad.layout is torch.strided:
        return grad
    return [grad._indices(), grad._values(), list(grad.shape)]


def unpacked(saved: Any, parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """What was packed, on the device of its parameter.

    >>> unpacked(packed(torch.ones(1).to_sparse()), torch.ones(1)).to_dense()
    tensor([1.])
    """
    if saved is None:
        return None
    if isinstance(saved, torch.Tensor):
        return saved.to(parameter.device, copy=True)
    indices, values, shape = saved
    return sparse.valid(indices.to(parameter.device), values.to(parameter.device), shape)

"""Gradients that a program has changed while they were on their way: clipped, scaled, zeroed or replaced.

Their counts say it (lightcc.core.changes), kept when the reduction of a gradient starts and compared when it is done.
Several gradients may share one count, as views of one tensor do: those of weights that forward has joined by torch.cat.
Then backward counts for all when it adds to one, so that only what comes after the last of them is a change.
"""
import weakref
from typing import Any, Iterable, List, Optional, Sequence, Set, Tuple

import torch

from lightcc.core import changes, lib
from lightcc.torch.gradient import Gradient

_WITHOUT_GRAD = -1  # no tensor's count
_LINES = """
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # or what else changes gradients
    with optimizer.skip_synchronize(): optimizer.step()
"""
_LINES_WITH_GRAD_SCALER = """
    optimizer.synchronize(); scaler.unscale_(optimizer)  # a torch.amp.GradScaler
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # or what else changes gradients
    with optimizer.skip_synchronize(): scaler.step(optimizer)
"""
reducers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # their `gradients` may share counts with those of another one


def watch(gradient: Gradient) -> None:
    """From now on p.grad of this gradient must not change. gradient.outside is what it is, or None for the slot."""
    grad: Any = gradient.parameter.grad
    try:
        gradient.count = grad._version
    except (AttributeError, RuntimeError):
        gradient.count = _count_of(gradient)


def undelivered(gradients: Iterable[Gradient]) -> Tuple[List[Gradient], List[Gradient]]:
    """Those of gradients, which are reduced now, whose p.grad is not the slot: first those that have not changed since
    watch, then those that may have, for expect_unchanged."""
    outside, suspects = [], []
    for gradient in gradients:
        grad: Any = gradient.parameter.grad
        try:  # every gradient of every step comes by here
            if grad._version == gradient.count:
                if grad.data_ptr() == gradient.address:
                    continue
                if grad is gradient.outside:
                    gradient.outside = None
                    outside.append(gradient)
                    continue
        except (AttributeError, RuntimeError):  # None; sparse, or without a count
            pass
        suspects.append(gradient)
    return outside, suspects


def forget(gradients: Iterable[Gradient]) -> None:
    """The program knows that these are reduced, and may change them."""
    for gradient in gradients:
        gradient.count = gradient.outside = None


def expect_unchanged(gradients: Sequence[Gradient], grad_scaler: bool = False) -> None:
    """RuntimeError, and the end of the epoch on all ranks, if one of them, which are reduced now, has changed since.

    grad_scaler: whether the program uses one.
    """
    watched = [one for one in gradients if one.count is not None and one.parameter.requires_grad]
    changed = [one for one in watched if _is_replaced(one, one.parameter.grad)]
    changed += _counted_alone([one for one in watched if one not in changed and one.count != _count_of(one)])
    forget(gradients)
    if not changed:
        return
    names = ", ".join(one.given_name for one in changed[:5]) + (", ..." if len(changed) > 5 else "")
    lines = _LINES_WITH_GRAD_SCALER if grad_scaler else _LINES
    raise changes.ended_by_change(
        f"p.grad of {names}",
        f"p.grad of {names} was changed on rank {lib.rank()} while it was on its way to the other ranks, as it is "
        "from backward() until synchronize() or step() is done. They may have received it before or after the change, "
        f"so the job is ended on all ranks. Wait for the gradients before you change them:{lines}A hook on a parameter "
        "that changes its gradient must be registered before DistributedOptimizer is made.")


def _is_slot(gradient: Gradient, grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and (grad.data_ptr() == gradient.address or grad.numel() == 0)


def _is_replaced(gradient: Gradient, grad: Optional[torch.Tensor]) -> bool:
    if gradient.outside is not None or gradient.count == _WITHOUT_GRAD:
        return grad is not gradient.outside
    return grad is None or not _is_slot(gradient, grad)


def _count_of(gradient: Gradient) -> Any:
    grad = gradient.parameter.grad
    return _WITHOUT_GRAD if grad is None else changes.counts_of(grad)


def _counted_alone(recounted: List[Gradient]) -> List[Gradient]:
    """The gradients whose count has changed and that share it with none whose count has not."""
    changed: List[Gradient] = []
    while recounted:
        every = [one for reducer in list(reducers) for one in reducer.gradients if one.parameter.grad is not None]
        before = [_count_of(one) for one in every]
        torch.autograd.graph.increment_version(recounted[0].parameter.grad)
        sharing = [(one, count) for one, count in zip(every, before) if _count_of(one) != count]
        if not any(one.count == count for one, count in sharing):
            changed += [one for one in recounted if any(one is other for other, _ in sharing)]
        seen: Set[int] = {id(recounted[0])}
        for one, _ in sharing:
            seen.add(id(one))
            one.count = None if one.count is None else one.count + 1
        recounted = [one for one in recounted if id(one) not in seen]
    return changed

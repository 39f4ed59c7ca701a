"""torch's GradScaler divides gradients by its scale, and leaves out a step if one is not finite, before it calls
optimizer.step(). So gradients on their way are waited for as soon as it is given an optimizer: what it sees is equal on
all ranks. It asks an optimizer nothing before, and PyTorch does not count what it changes (changed_gradients)."""
import functools
import weakref
from typing import Any, Callable, Iterable

import torch

from lightcc.core import ops
from lightcc.core.process_sets import ProcessSet

_reduced_first: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers


def reduce_first(optimizer) -> None:
    """From now on a GradScaler that is given this optimizer, or another one over its parameters, first calls its method
    _before_grad_scaler with that one; before that _note_scaler with itself and that one, if there is such a method.
    After a step that it has left out it calls _left_out of the optimizer, if there is such a method."""
    _reduced_first.add(optimizer)
    scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler  # before 2.3
    for name in ("unscale_", "step"):
        method = getattr(scaler, name)
        if not hasattr(method, "reduces_first"):
            setattr(scaler, name, _after_reduction(method))


def finite_everywhere(gradients: Iterable[torch.Tensor], process_sets: Iterable[ProcessSet], name: str) -> bool:
    """Whether all these gradients, which are each rank's own, are finite on all ranks of these sets. Four bytes a set.

    >>> from lightcc.core.process_sets import global_process_set
    >>> finite_everywhere([torch.ones(2)], [global_process_set], "example")
    True
    """
    wrong = torch.tensor([not all(bool(gradient.isfinite().all()) for gradient in gradients)], dtype=torch.int32)
    for process_set in {id(one): one for one in process_sets}.values():
        wrong = ops.allreduce(wrong, op=ops.ReduceOps.Max, name=name, process_set=process_set)
    return not wrong.item()


def _after_reduction(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self, optimizer, *args, **kwargs):
        if not self.is_enabled():
            return method(self, optimizer, *args, **kwargs)
        for distributed in list(_reduced_first):
            if hasattr(distributed, "_note_scaler"):
                distributed._note_scaler(self, optimizer)
            distributed._before_grad_scaler(optimizer)
        made = getattr(optimizer, "_made_steps", None)
        result = method(self, optimizer, *args, **kwargs)
        if method.__name__ == "step" and made is not None and optimizer._made_steps == made:
            optimizer._left_out()
        return result

    wrapped.reduces_first = True  # type: ignore[attr-defined]
    return wrapped

"""DistributedOptimizer(op=Adasum): the ranks combine the steps that their optimizers make, not their gradients.

Adasum asks how far two steps point the same way, and what an optimizer with momentum or a rate for each parameter makes
of a gradient is not its direction. So each rank makes its own optimizer's step with its own gradients; then, for each
parameter, on all ranks
    start + Adasum over the ranks of (parameter - start),   start: the parameter before the step,
becomes the parameter. Source: Maleki et al., MLSys 2021, and horovod.torch.optimizer.
"""
import contextlib
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from lightcc.torch import grad_scaler, slots
from lightcc.torch.delayed_slots import values_of
from lightcc.torch.gradient import Gradient
from lightcc.torch.optimizer import _DistributedOptimizer
from lightcc.torch.parameter_reducer import ParameterReducer


class DeltaReducer(ParameterReducer):
    """Sends what a step has changed, and makes each parameter what it was plus what comes back."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._starts: Dict[torch.Tensor, torch.Tensor] = {}

    def begin(self) -> None:
        """Keeps the parameters as they are before the step."""
        for gradient in self.gradients:
            parameter = gradient.parameter
            start = self._starts.get(parameter)
            if start is None or _form_of(start) != _form_of(parameter):
                self._starts[parameter] = parameter.detach().clone()
            else:
                start.copy_(parameter)

    def restore(self) -> None:
        """Undoes the step."""
        for gradient in self.gradients:
            gradient.parameter.copy_(self._starts[gradient.parameter])

    def _put_into_slot(self, gradient: Gradient) -> None:
        self._wire.fill_difference(gradient, gradient.parameter, self._starts[gradient.parameter])

    def _deliver_one(self, gradient: Gradient) -> None:
        torch.add(self._starts[gradient.parameter], self._wire.reduced(gradient), out=gradient.parameter)


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """What the class of what DistributedOptimizer(op=Adasum) returns has.

    backward sends nothing: p.grad stays this rank's own and may be changed, for example clipped, until step(). A
    parameter without gradient on this rank adds nothing to what the others make of it. Parameters must be equal on
    all ranks before the first step (broadcast_parameters); the optimizer's state is each rank's own. Sparse gradients
    need no option. If the exchange fails, the parameters are those before the step; the optimizer's state is not.
    """

    _reducer_class = DeltaReducer

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """The optimizer's own step, then the exchange of what it has changed."""
        if closure is not None:
            plain_closure = closure

            def closure():
                loss = plain_closure()
                self.synchronize()
                return loss
        own_step = self._as_plain.step
        if self._reducer is None:
            result = own_step(closure)
            self._stepped()
            return result
        self._track_new_parameters()
        with torch.no_grad():
            self._reducer.begin()
        result = own_step(closure)
        try:
            with torch.no_grad():
                self._send_the_rest()
                self._reducer.finish()
        except Exception:
            with torch.no_grad():
                self._reducer.restore()
            raise
        finally:
            self.synchronize()
        self._exchanged()
        self._stepped()
        return result

    step.hooked = True  # as in _DistributedOptimizer

    def synchronize(self) -> None:
        """Nothing is on its way before step(): only ends the count of backward passes."""
        self._began_epoch = 0
        self._reset_passes()

    @contextlib.contextmanager
    def skip_synchronize(self):
        """AssertionError: with Adasum the exchange is a part of the step."""
        raise AssertionError("skip_synchronize() is not supported with op=Adasum: step() itself exchanges what it has "
                             "changed. Call step() alone; gradients may be changed before it.")
        yield

    def register_local_var(self, parameter: torch.Tensor) -> None:
        """ValueError: with Adasum it is steps that are exchanged, not gradients."""
        raise ValueError("register_local_var is not supported with op=Adasum: step() exchanges what it has changed. "
                         "Give the parameter to an optimizer of its own.")

    def _allreduce_grad_async(self, p: torch.Tensor):
        """ValueError: with Adasum it is steps that are exchanged, not gradients."""
        raise ValueError("_allreduce_grad_async is not supported with op=Adasum: step() exchanges what it has changed.")

    def _ready(self, gradient: Gradient) -> None:
        pass

    def _before_grad_scaler(self, optimizer) -> None:
        """Gradients are this rank's own, so the ranks agree first: if some rank's are not finite, all ranks leave the
        step out and have the same scale afterwards."""
        if self._reducer is None or (self._synchronized and not self._waiting()) or not any(
                id(p) in self._tracked for group in optimizer.param_groups for p in group["params"]):
            return
        mine = [p.grad for p in self._gradients if p.grad is not None]
        with torch.no_grad():
            if not grad_scaler.finite_everywhere(map(values_of, mine), [self._process_set], "lightcc.adasum.scaler"):
                for grad in mine:
                    values_of(grad).mul_(float("inf"))
        self.synchronize()
        self._synchronized = True  # step() after unscale_() need not ask again


def _form_of(parameter: torch.Tensor) -> Tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, slots.device_of(parameter)

"""The hooks on parameters by which backward tells a DistributedOptimizer of gradients. An optimizer that is dropped is
gone at once: its hooks then only say so."""
import functools
import warnings
import weakref
from typing import Callable, Dict

import torch

from lightcc.core import lib
from lightcc.torch.gradient import Gradient


class Dropped:
    """Says once of an optimizer that it is gone and its parameters train on."""

    def __init__(self, kind: str):
        self._kind, self._said = kind, False

    def say(self, parameter: torch.Tensor) -> None:
        if self._said or not lib.initialized() or any(map(_is_alive, _hooks_of(parameter).values())):
            return
        self._said = True
        warnings.warn(f"A DistributedOptimizer of class {self._kind} was dropped, and backward() goes on with its "
                      "parameters: their gradients are no longer exchanged, and the weights of the ranks part. Keep "
                      "what hvd.DistributedOptimizer returns, and call its step().", UserWarning, stacklevel=3)


def register(gradient: Gradient, dropped: Dropped) -> None:
    """From now on each backward pass calls _accumulated(gradient) of the gradient's optimizer."""
    hooks = gradient.parameter._post_accumulate_grad_hooks
    for key, hook in _hooks_of(gradient.parameter).items():
        if not _is_alive(hook):  # a program may make a new optimizer in each epoch
            del hooks[key]
    gradient.parameter.register_post_accumulate_grad_hook(
        functools.partial(_accumulated, weakref.ref(gradient), dropped))


def _accumulated(gradient: "weakref.ref[Gradient]", dropped: Dropped, parameter: torch.Tensor) -> None:
    """The garbage collector does not see what a torch hook refers to, so it must keep neither parameter nor optimizer
    alive; without its optimizer a parameter has plain gradients."""
    alive = gradient()
    optimizer = alive and alive.optimizer()
    if optimizer is not None:
        optimizer._accumulated(alive)
    else:
        dropped.say(parameter)


def _hooks_of(parameter: torch.Tensor) -> Dict[int, Callable[[torch.Tensor], None]]:
    hooks = parameter._post_accumulate_grad_hooks or {}
    return {key: hook for key, hook in hooks.items() if getattr(hook, "func", None) is _accumulated}


def _is_alive(hook) -> bool:
    return hook.args[0]() is not None

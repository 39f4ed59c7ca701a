"""Reduces what a subclass makes of parameters, and not their gradients."""
from typing import Sequence, Tuple

import torch

from lightcc.torch.gradient import Gradient
from lightcc.torch.gradient_reducer import GradientReducer


class ParameterReducer(GradientReducer):
    """Each of its gradients stands for a dense tensor of the parameter's shape and dtype. Abstract."""

    def settle(self, sparse_dims_of_none: int) -> None:
        """All are dense."""

    def send(self, gradient: Gradient) -> None:
        """Starts the exchange of one parameter."""
        self._fit(gradient)
        self._put_into_slot(gradient)
        self._start(gradient)

    def _put_into_slot(self, gradient: Gradient) -> None:
        raise NotImplementedError

    def _deliver_one(self, gradient: Gradient) -> None:
        """Takes in what the slot has, which has been reduced."""
        raise NotImplementedError

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype

    def _may_stay_without(self, gradient: Gradient, form: torch.Tensor) -> bool:
        return False

    def _undelivered(self, sent: Sequence[Gradient]) -> Tuple[Sequence[Gradient], Sequence[Gradient]]:
        """All of them: what travels is not p.grad, which the program may change."""
        return sent, []

    def _deliver_all(self, late: Sequence[Gradient]) -> None:
        for gradient in late:
            self._deliver_one(gradient)

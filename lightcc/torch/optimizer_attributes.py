"""What programs read of Horovod's optimizer beside its methods: arguments it was made with, and what is on its way.

Horovod makes no promise of the names with an underscore; programs and tests look at them all the same.
"""
from collections.abc import Iterator, MutableMapping
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch

from lightcc.core.process_sets import ProcessSet
from lightcc.torch.gradient import Gradient
from lightcc.torch.gradient_reducer import GradientReducer
from lightcc.torch.mpi_ops import allreduce_async_


class OptimizerAttributes:
    """A base of _DistributedOptimizer, which sets what these attributes read."""

    param_groups: List[Dict[str, Any]]  # torch's own
    _options: Dict[str, Any]
    _backward_passes_per_step: int
    _parameter_names: Dict[torch.Tensor, str]
    _gradients: Dict[torch.Tensor, Gradient]
    _process_set: ProcessSet
    _reducer: Optional[GradientReducer]
    _waiting: Callable[[], bool]
    _begin: Callable[[], None]
    _track_new_parameters: Callable[[], None]
    set_backward_passes_per_step: Callable[[int], None]

    @property
    def backward_passes_per_step(self) -> int:
        """Setting it is set_backward_passes_per_step."""
        return self._backward_passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def op(self) -> int:
        return self._options["op"]

    @property
    def gradient_predivide_factor(self) -> float:
        return self._options["gradient_predivide_factor"]

    @property
    def sparse_as_dense(self) -> bool:
        return self._options["sparse_as_dense"]

    @property
    def process_set(self):
        return self._process_set

    @property
    def _compression(self):
        return self._options["compression"]

    @property
    def _requires_update(self) -> Set[torch.Tensor]:
        """The parameters whose gradients are exchanged: none on a rank that takes no part or is alone."""
        return {parameter for parameter, gradient in self._gradients.items() if not gradient.local}

    @property
    def _allreduce_delay(self) -> "MutableMapping[torch.Tensor, int]":
        """By parameter: after how many more backward passes its gradient is sent. May be changed."""
        return _Delays(self)

    @property
    def _handles(self) -> Dict[torch.Tensor, Tuple[Any, Any]]:
        """By parameter, of those that backward has reached since the last synchronize: (handle, ctx).

        handle: for hvd.poll and hvd.synchronize, which returns what the compressor made of the gradient, reduced (with
        groups: the group's list), for compression.decompress(..., ctx); for a sparse gradient a function that waits.
        Synchronize and step are needed all the same. (None, None): it is not sent yet, because of more backward passes
        to come or of others of its group.
        """
        if not self._waiting():
            return {}
        on_their_way = self._reducer.handles()
        return {parameter: on_their_way.get(parameter, (None, None)) for parameter, gradient in self._gradients.items()
                if not gradient.local and (gradient.sent or gradient.passes_left < self._backward_passes_per_step)}

    def _allreduce_grad_async(self, p: torch.Tensor) -> Tuple[Any, Any]:
        """Sends the gradient of one parameter now, whatever backward passes are to come; returns its _handles entry.

        ValueError if it is on its way, or not exchanged by this optimizer. On a rank that is alone it is an allreduce.
        """
        name = self._parameter_names.get(p, "a tensor that is not the optimizer's")
        if self._reducer is None:
            mine, ctx = self._compression.compress(p.grad)
            factor = self.gradient_predivide_factor
            return allreduce_async_(mine, name=name, op=self.op, prescale_factor=1.0 / factor,
                                    postscale_factor=factor, process_set=self._process_set), ctx
        self._track_new_parameters()
        gradient = self._gradients.get(p)
        if gradient is None or gradient.local:
            raise ValueError(f"_allreduce_grad_async: the gradient of {name} is not exchanged by this optimizer.")
        if gradient.sent and self._waiting():
            raise ValueError(f"_allreduce_grad_async: the gradient of {name} is on its way; synchronize() first.")
        if not self._waiting():
            self._begin()
        gradient.passes_left = 0
        with torch.no_grad():
            self._reducer.send(gradient)
        return self._handles[p]


class _Delays(MutableMapping):
    """_allreduce_delay: a view of the optimizer's own numbers."""

    def __init__(self, optimizer: OptimizerAttributes):
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> int:
        gradient = self._optimizer._gradients.get(parameter)
        if gradient is not None:
            return gradient.passes_left
        if not any(parameter is p for p in self):
            raise KeyError(parameter)
        return self._optimizer._backward_passes_per_step  # nothing is sent of it, so nothing counts down

    def __setitem__(self, parameter: torch.Tensor, passes: int) -> None:
        gradient = self._optimizer._gradients.get(parameter)
        if gradient is not None:
            gradient.passes_left = passes
        elif not any(parameter is p for p in self):
            raise KeyError(parameter)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise TypeError("a parameter cannot be taken out of _allreduce_delay; see register_local_var.")

    def __iter__(self) -> "Iterator[torch.Tensor]":
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def __len__(self) -> int:
        return sum(1 for _ in self)

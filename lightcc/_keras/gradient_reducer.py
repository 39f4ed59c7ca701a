"""Reduces the gradients of Keras optimizers over the ranks: what the frameworks have in common."""
from typing import Any, Callable, List

from lightcc.compress.variable_compression import WantedCompression
from lightcc.core.wrapper_arguments import variables_of


class GradientReducer:
    """Reduces the gradients of one optimizer. Subclasses say how, for one framework."""

    framework = ""
    helper: Any = None  # what adds up gradients for backward_passes_per_step > 1
    reduced = False     # whether the optimizer has computed and reduced the gradients that arrive next

    def __init__(self, options, class_name: str):
        self.options = options
        self.name = options.name or f"Distributed{class_name}"
        self.wanted = WantedCompression(options.compression, options.op, class_name, options.process_set)
        self._layers: List[Any] = []

    @staticmethod
    def check(members: type) -> None:
        """ValueError if Keras would put another optimizer in place of one with these members."""

    def arrived(self, grads: List[Any], variables: List[Any]) -> List[Any]:
        """The reduced gradients; None where a variable has none."""
        if self.reduced:
            self.reduced = False
            return grads
        return self.reduce(grads, variables)

    def reduce(self, grads: List[Any], variables: List[Any]) -> List[Any]:
        for variable in variables_of(self._layers):  # each time: a layer may be built late
            self.keep_local(variable)
        return self._reduce(grads, variables)

    def keep_local(self, variable: Any) -> None:
        """Makes a variable local: its gradient stays here."""
        raise NotImplementedError

    def keep_layers_local(self, layers: Any) -> None:
        """Makes all variables of Keras layers local: one or several. ValueError for anything else."""
        variables_of(layers)
        self._layers = [] if layers is None else list(layers) if isinstance(layers, (list, tuple, set)) else [layers]

    def apply(self, closure: Callable[[], Any], optimizer: Any, pairs: Any = ()) -> Any:
        """Calls the closure, which applies gradients, unless this pass only added to sums: that counts as an
        iteration and no more."""
        return closure()

    def drop_sums(self, backend: Any) -> None:
        """Forgets the gradients that were added up for backward_passes_per_step and have not travelled yet. backend:
        the module keras.backend."""
        raise NotImplementedError

    def _reduce(self, grads: List[Any], variables: List[Any]) -> List[Any]:
        raise NotImplementedError

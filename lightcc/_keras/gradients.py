"""Gradients on their way from a model to a Keras optimizer, over the ranks: what the frameworks have in common."""
from typing import Any, Callable, List, Type

from lightcc.wrapper import variables_of


class Gradients:
    """Reduces the gradients of one optimizer. Subclasses say how, for one framework."""

    framework = ""
    helper: Any = None  # what adds up gradients for backward_passes_per_step > 1
    reduced = False     # whether the optimizer has computed and reduced the gradients that arrive next

    def __init__(self, options, class_name: str):
        self.options = options
        self.name = options.name or f"Distributed{class_name}"
        self._layers: List[Any] = []

    @staticmethod
    def check(front: type) -> None:
        """ValueError if Keras would not keep to optimizers with this in front of them."""

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

    def _reduce(self, grads: List[Any], variables: List[Any]) -> List[Any]:
        raise NotImplementedError


def gradients_by(framework: str) -> Type[Gradients]:
    """The class for a framework's gradients; ValueError for one that lightcc cannot serve here."""
    if framework == "tensorflow":
        from lightcc._keras.gradients_tensorflow import TensorFlowGradients
        return TensorFlowGradients
    if framework == "torch":
        from lightcc._keras.gradients_torch import TorchGradients
        return TorchGradients
    raise ValueError(no_framework(framework))


def no_framework(backend: str) -> str:
    """Says that, and why, lightcc does not work with what Keras runs on."""
    return (f"lightcc.keras works with Keras on TensorFlow and on torch. With KERAS_BACKEND={backend} there is no "
            "place where gradients could be exchanged: the training step is compiled as a whole.")

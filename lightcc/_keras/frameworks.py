"""The frameworks that Keras may run on. Each is imported when it is first needed."""
from typing import Type

from lightcc._keras.gradient_reducer import GradientReducer


def reducer_for(framework: str) -> Type[GradientReducer]:
    """The class for a framework's gradients; ValueError for one that lightcc cannot serve here."""
    if framework == "tensorflow":
        from lightcc._keras.gradient_reducer_tensorflow import TensorFlowGradientReducer
        return TensorFlowGradientReducer
    if framework == "torch":
        from lightcc._keras.gradient_reducer_torch import TorchGradientReducer
        return TorchGradientReducer
    raise ValueError(no_framework(framework))


def no_framework(backend: str) -> str:
    """Says that, and why, lightcc does not work with what Keras runs on."""
    return (f"lightcc.keras works with Keras on TensorFlow and on torch. With KERAS_BACKEND={backend} there is no "
            "place where gradients could be exchanged: the training step is compiled as a whole. On JAX, import "
            "lightcc.jax first and call keras.distribution.set_distribution(keras.distribution.DataParallel()): "
            "docs/jax.md.")

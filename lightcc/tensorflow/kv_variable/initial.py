"""TensorFlow's and Keras's initializers as those of tables."""
from typing import Any, Tuple, cast

import tensorflow as tf

from lightcc.embedding.initializers import Constant, Initializer, Normal, Uniform, Zeros

_DEFAULT = Normal(0, 0.01)


def first_values(initializer: Any, name: str) -> Tuple[Initializer, int]:
    """What a row is before it is trained, and the seed.

    initializer: zeros, ones, a constant number, normal or uniform of tf, tf.compat.v1 or Keras, an object or its class;
    one of lightcc.embedding; None: that of tf.compat.v1.variable_scope, else Normal(0, 0.01). Values are those of
    lightcc's generator. The seed is that of TensorFlow's initializer; of Keras's, which may be random, 0.
    Errors: ValueError for any other.

    >>> first_values(tf.compat.v1.random_uniform_initializer(-1.0, 1.0, seed=3), "user")
    (Uniform(low=-1.0, high=1.0), 3)
    """
    initializer = tf.compat.v1.get_variable_scope().initializer if initializer is None else initializer
    if initializer is None:
        return _DEFAULT, 0
    if isinstance(initializer, (Normal, Uniform, Constant, Zeros)):
        return cast(Initializer, initializer), 0
    if isinstance(initializer, type):
        initializer = initializer()
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    try:
        return _of(type(initializer).__name__, config), _seed(initializer, config)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"kv variable {name!r}: initializer={initializer!r} is none that a table has; give zeros, "
                         "ones, a constant number, or a normal or uniform distribution with numbers.") from None


def _of(kind: str, config: Any) -> Initializer:
    if kind == "Zeros":
        return Zeros()
    if kind == "Ones":
        return Constant(1.0)
    if kind == "Constant":
        return Constant(float(config["value"]))
    if kind == "RandomNormal":
        return Normal(float(config["mean"]), float(config["stddev"]))
    if kind == "RandomUniform":
        high = config["maxval"]
        return Uniform(float(config["minval"]), 1.0 if high is None else float(high))
    raise KeyError(kind)


def _seed(initializer: Any, config: Any) -> int:
    seed = config.get("seed")
    is_tensorflow = type(initializer).__module__.startswith("tensorflow.")
    return seed % (1 << 64) if is_tensorflow and isinstance(seed, int) else 0

"""Mixed precision that switches while training goes on, for own loops of TensorFlow: `hvd.amp` of
`import lightcc.tensorflow as hvd`. Keras's fit has lightcc.keras.callbacks.MixedPrecisionCallback.
"""
from typing import Any, Callable, Dict, List

import tensorflow as tf

from lightcc.amp import (
    Always,
    AnyOf,
    History,
    HoldAfterLearningRateChange,
    OnPlateau,
    OnSpike,
    Policy,
    State,
    Switch,
    Warmup,
)
from lightcc.amp.controller import Controller
from lightcc.core.process_sets import ProcessSet, global_process_set

__all__ = ["Always", "AnyOf", "History", "HoldAfterLearningRateChange", "MixedPrecision", "OnPlateau", "OnSpike",
           "Policy", "State", "Switch", "Warmup"]


class MixedPrecision:
    """Runs each step of an own loop in the precision that a policy chooses, the same one on all ranks.

    learning_rate: what policies see: a number, a variable, an optimizer, or a function without arguments. policy: of
    lightcc.amp, or a subclass of Policy. dtype: tf.bfloat16 (default) or tf.float16, what policies call "low".
    process_set: the ranks that train together.

    Each call is a step: precision(function, *arguments) calls function(level, *arguments), which returns the loss, or a
    tuple or list that begins with it. The level is a str, so that a tf.function is traced once for each; what it
    computes in that level is the function's business, and precision.dtype(level) is the dtype of its matrices. For
    float16 the function scales its loss, as by a Keras LossScaleOptimizer around a distributed one. state_dict()
    belongs into a checkpoint; TensorFlowState(..., precision=precision) takes it from world to world.

    Errors: ValueError for levels that the device lacks, in graphs with sessions of TensorFlow 1 or inside a
    tf.function, for a loss that is no scalar, or is NaN in the first step (on all ranks). RuntimeError for a policy
    that raises.

    >>> weight, precision = tf.Variable([[1.0]]), MixedPrecision(0.1, Warmup(1))
    >>> @tf.function
    ... def step(level, x):
    ...     with tf.GradientTape() as tape:
    ...         dtype = precision.dtype(level)
    ...         loss = tf.reduce_sum(tf.cast(tf.matmul(tf.cast(x, dtype), tf.cast(weight, dtype)), tf.float32))
    ...     gradient, = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
    ...     weight.assign_sub(0.1 * gradient)
    ...     return loss
    >>> for _ in range(3): print(float(precision(step, tf.ones((1, 1)))), precision.level)
    1.0 float32
    0.8984375 bfloat16
    0.80078125 bfloat16
    """

    def __init__(self, learning_rate: Any, policy: Policy, dtype: tf.DType = tf.bfloat16,
                 process_set: ProcessSet = global_process_set):
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError("MixedPrecision: graphs with sessions of TensorFlow 1 have one precision, as they are "
                             "built before they run. Use eager mode, where a tf.function is traced once for each "
                             "level.")
        if dtype not in (tf.bfloat16, tf.float16):
            raise ValueError(f"MixedPrecision: dtype={dtype!r} must be tf.bfloat16 or tf.float16.")
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        available = {"float32": "", "bfloat16": "", "float16": "", "fp8": "TensorFlow does not compute in it",
                     "tf32": "" if has_gpu else "it is for NVIDIA GPUs"}
        self._learning_rate = learning_rate
        self._controller = Controller(policy, dtype.name, available, "MixedPrecision", process_set)

    @property
    def level(self) -> str:
        """The level of the step that is running, or of the last one; "" before the first."""
        return self._controller.level

    @staticmethod
    def dtype(level: str) -> tf.DType:
        """The dtype to compute in.

        >>> MixedPrecision.dtype("tf32"), MixedPrecision.dtype("bfloat16")
        (tf.float32, tf.bfloat16)
        """
        return {"bfloat16": tf.bfloat16, "float16": tf.float16}.get(level, tf.float32)

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Runs a step, and returns what the function does."""
        if not tf.executing_eagerly():
            raise ValueError("MixedPrecision: a step is called from Python, and not inside a tf.function, whose level "
                             "would be that of its tracing for ever.")
        level = self._controller.begin()
        if level in ("float32", "tf32") and "tf32" in self._controller.levels:
            tf.config.experimental.enable_tensor_float_32_execution(level == "tf32")
        result = function(level, *arguments, **options)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        shape = tuple(getattr(loss, "shape", ()))
        if shape not in ((), (1,)) or loss is None:
            raise ValueError(f"MixedPrecision: the loss is of shape {shape}; the function must return a scalar first, "
                             "say tf.reduce_mean(loss).")
        self._controller.loss_known(float(loss), self._rates())
        self._controller.end()
        self._controller.settle()
        return result

    def set_epoch(self, epoch: int) -> None:
        """Tells policies which epoch it is."""
        self._controller.epoch = epoch

    def history(self) -> History:
        """How many steps were in each level, and where the level changed and why.

        >>> precision = MixedPrecision(0.1, Always("float32")); loss = precision(lambda level: tf.constant(1.0))
        >>> precision.history().steps
        {'float32': 1}
        """
        return self._controller.history()

    def state_dict(self) -> Dict[str, Any]:
        """The state of the policy, between two steps; plain values."""
        return self._controller.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from there. ValueError if it is of another policy."""
        self._controller.load_state_dict(state)

    def _rates(self) -> List[float]:
        rate = getattr(self._learning_rate, "learning_rate", self._learning_rate)
        return [float(rate() if callable(rate) else rate)]

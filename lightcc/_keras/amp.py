"""Mixed precision that switches while a Keras model is trained: a callback for Keras 3 and 2.

A level is a dtype policy of Keras. Layers have it only while Keras traces or runs the training step, so what is saved
and evaluated is the plain model. Each level has a training function of its own, which is traced once.
"""
import contextlib
import math
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Tuple

from lightcc._keras import values
from lightcc._keras.optimizer import distributed_in, keras_of
from lightcc.amp import History, Policy
from lightcc.amp.controller import Controller
from lightcc.core.process_sets import global_process_set

_POLICIES = {"float32": "float32", "tf32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


class MixedPrecisionCallbackImpl:
    """Trains each batch in the precision that a policy chooses, the same one on all ranks.

    policy: of lightcc.amp, or a subclass of lightcc.amp.Policy; the levels that it may choose are equal on all ranks.
    dtype: "bfloat16" (default) or "float16", what policies call "low". keep: layers, or their names, that stay as they
    are; so do those whose dtype policy is not the model's. compression: a dict, by level, what gradients are on the
    wire, say {"bfloat16": hvd.Compression.bf16}, not topk or int8; levels that are not in it have that of the
    DistributedOptimizer. For fit; around train_on_batch call it by
    keras.callbacks.CallbackList([callback], model=model).

    Weights stay in float32, and validation, prediction and saved models are in the model's own policy. The first batch
    of each level is traced, later ones cost nothing more. float16 needs a LossScaleOptimizer, which scales in all
    levels. Where steps_per_execution is more than 1 a step of the policy is such an execution. Keras 2 can cast only
    the weights of a model that was built under a mixed policy, which float32 steps then leave. The loss of each batch,
    regularizers included, travels to all ranks before the next one begins.
    KerasState(model, precision=callback) takes the policy's state from world to world; state_dict() belongs beside a
    checkpoint.

    Errors: ValueError when training begins for levels that the device or Keras lacks, for float16 without
    LossScaleOptimizer, for a model of Keras 2 without a mixed policy, for graphs of TensorFlow 1; after the first batch
    for a train_step that does not call compute_loss; and on all ranks for a loss that is NaN in that batch.
    RuntimeError for a policy that raises.

    >>> import keras, lightcc.keras as hvd
    >>> from lightcc.amp import Warmup
    >>> keras.mixed_precision.set_global_policy("mixed_bfloat16")  # Keras 3 does without
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    >>> callback = hvd.callbacks.MixedPrecisionCallback(Warmup(2))
    >>> fitted = model.fit(np.ones((4, 2)), np.ones(4), 1, verbose=0, callbacks=[callback])
    >>> callback.history().steps
    {'float32': 2, 'bfloat16': 2}
    >>> keras.mixed_precision.set_global_policy("float32")
    """

    model: Any  # Keras's Callback has it

    def __init__(self, policy: Policy, dtype: str = "bfloat16", keep: Iterable[Any] = (),
                 compression: Optional[Mapping[str, Any]] = None):
        super().__init__()
        if dtype not in ("bfloat16", "float16"):
            raise ValueError(f"MixedPrecisionCallback: dtype={dtype!r} must be 'bfloat16' or 'float16'.")
        self._policy, self._dtype, self._keep = policy, dtype, list(keep)
        self._compression = dict(compression or {})
        self._own_compression: Any = None               # that of the optimizer
        self._controller: Optional[Controller] = None
        self._loaded: Optional[Dict[str, Any]] = None   # a state that came before the controller was made
        self._first = policy.state_dict() if isinstance(policy, Policy) else {}  # else the controller says so
        self._functions: Dict[str, Any] = {}            # by dtype policy, or level: Keras's training function
        self._of: Tuple[Any, ...] = ()                  # what they were made for
        self._loss: Any = None                          # a variable, which the step assigns
        self._has_loss = False                          # whether a step has called compute_loss
        self._scale = math.nan

    # What users call

    @property
    def level(self) -> str:
        """The level of the batch that is running, or of the last one; "" before the first."""
        return "" if self._controller is None else self._controller.level

    def history(self) -> History:
        """How many batches were in each level, and where the level changed and why. ValueError before training."""
        if self._controller is None:
            raise ValueError("MixedPrecisionCallback: there is no history before training has begun.")
        return self._controller.history()

    def state_dict(self) -> Dict[str, Any]:
        """The state of the policy, between two batches; plain values."""
        return (self._loaded or {}) if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from there. ValueError if it is of another policy; before training, when that begins."""
        if self._controller is None:
            self._loaded = state
        elif state:
            self._controller.load_state_dict(state)
        else:  # it had not begun
            self._controller = None
            self._policy.load_state_dict(self._first)

    # What Keras calls

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if values.in_graph():
            raise ValueError("MixedPrecisionCallback: graphs with sessions of TensorFlow 1 have one precision, as they "
                             "are built before they run. Use eager mode, where Keras traces a function for each level.")
        if self._controller is None:
            self._make_controller()
        compiled = (self.model, self.model.optimizer, getattr(self.model, "_compile_config", None))
        if [id(one) for one in compiled] != [id(one) for one in self._of]:
            self._functions, self._of, self._has_loss = {}, compiled, False
        if self._loss is None:
            self._loss = _variable(keras_of(type(self.model)))
        if "float16" in self._controller.levels:  # type: ignore[union-attr]
            self._scale = _scale_of(self.model.optimizer)
        self._put_in("train_step", self._with_policy)
        self._put_in("compute_loss", self._with_loss_kept)

    def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        assert self._controller is not None
        level = self._controller.begin()
        if level in ("float32", "tf32") and "tf32" in self._controller.levels:
            import tensorflow as tf
            tf.config.experimental.enable_tensor_float_32_execution(level == "tf32")
        key = level if self._compression else _POLICIES[level]
        if key not in self._functions:
            self.model.train_function = None
            self.model.make_train_function()
            self._functions[key] = self.model.train_function
        self.model.train_function = self._functions[key]

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        assert self._controller is not None
        if not self._has_loss:
            raise ValueError(f"MixedPrecisionCallback: {type(self.model).__name__}.train_step does not call "
                             "self.compute_loss, so policies would see no loss. Compute it by that.")
        backend, optimizer = keras_of(type(self.model)).backend, self.model.optimizer
        rate = optimizer.learning_rate
        if callable(rate):  # a schedule, of a legacy optimizer of Keras 2
            rate = rate(optimizer.iterations)
        read = [self._loss, rate] if hasattr(rate, "assign") else [self._loss]  # a variable; a number or tensor
        loss, *rates = (float(value) for value in values.read(backend, read))
        self._controller.loss_known(loss, rates or [float(rate)])
        overflow = None
        if "float16" in self._controller.levels:
            before, self._scale = self._scale, _scale_of(optimizer)
            overflow = self._scale < before if self._controller.level == "float16" else None
        self._controller.end(overflow=overflow)

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        assert self._controller is not None
        self._controller.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        assert self._controller is not None
        self._controller.settle()  # so that nothing is in flight when other callbacks leave

    def on_train_end(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        assert self._controller is not None
        self._controller.settle()
        for name in ("train_step", "compute_loss"):
            vars(self.model).pop(name, None)
        self._use(self._own_compression)
        self.model.train_function = None

    # The rest

    def _make_controller(self) -> None:
        keras, optimizer = keras_of(type(self.model)), self.model.optimizer
        distributed = distributed_in(optimizer)
        process_set = distributed._distribution.process_set if distributed else global_process_set
        if self._compression and distributed is None:
            raise ValueError("MixedPrecisionCallback: compression= is for a model with a DistributedOptimizer.")
        if self._compression:
            self._own_compression = distributed._distribution.compression  # type: ignore[union-attr]
        controller = Controller(self._policy, self._dtype, _available(keras), "MixedPrecisionCallback", process_set)
        for level in self._compression.keys() - {*controller.levels}:
            raise ValueError(f"MixedPrecisionCallback: compression has {level!r}, and the policy's levels are "
                             f"{', '.join(controller.levels)}.")
        if not hasattr(keras, "ops"):
            _expect_castable(self.model)
        if self._loaded:
            controller.load_state_dict(self._loaded)
        self._controller = controller

    def _put_in(self, name: str, around: Callable[[Callable], Callable]) -> None:
        """Replaces a method of this model, and what a callback has left there whose fit an exception has ended."""
        if hasattr(vars(self.model).get(name), "callback"):
            del vars(self.model)[name]
        wrapped = around(getattr(self.model, name))
        wrapped.callback = self  # type: ignore[attr-defined]
        object.__setattr__(self.model, name, wrapped)  # past Keras's own, which tracks values

    def _use(self, compression: Any) -> None:
        """What is traced from now on sends gradients by it."""
        if self._compression:
            distributed_in(self.model.optimizer)._reducer.wanted.use(compression)  # type: ignore[union-attr]

    def _with_policy(self, plain: Callable) -> Callable:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._use(self._compression.get(self.level, self._own_compression))
            with self._policies():
                return plain(*args, **kwargs)
        return train_step

    def _with_loss_kept(self, plain: Callable) -> Callable:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = plain(*args, **kwargs)
            self._has_loss = True
            self._loss.assign(_as_float32(keras_of(type(self.model)), loss))
            return loss
        return compute_loss

    @contextlib.contextmanager
    def _policies(self) -> Iterator[None]:
        """The layers have the dtype policy of the level that is now."""
        keras, own = keras_of(type(self.model)), self.model.dtype_policy
        make = keras.dtype_policies.DTypePolicy if hasattr(keras, "ops") else keras.mixed_precision.Policy
        policy, changed = make(_POLICIES[self.level]), []
        try:
            for layer in self.model._flatten_layers() if policy.name != own.name else ():
                keeps = layer.name in self._keep or any(layer is one for one in self._keep)
                if layer.dtype_policy.name == own.name and not keeps:
                    changed.append((layer, layer.dtype_policy))
                    _set_policy(layer, policy)
            yield
        finally:
            for layer, its in changed:
                _set_policy(layer, its)


def bound_callback(keras: Any, module: str) -> type:
    """The callback of one Keras package, as if it were defined in `module`."""
    class MixedPrecisionCallback(MixedPrecisionCallbackImpl, keras.callbacks.Callback):
        __doc__ = MixedPrecisionCallbackImpl.__doc__

    MixedPrecisionCallback.__module__, MixedPrecisionCallback.__qualname__ = module, "MixedPrecisionCallback"
    return MixedPrecisionCallback


def _set_policy(layer: Any, policy: Any) -> None:
    if hasattr(layer, "_set_dtype_policy"):  # Keras 2, where the property cannot be set
        layer._set_dtype_policy(policy)
    else:
        layer.dtype_policy = policy


def _variable(keras: Any) -> Any:
    if hasattr(keras, "ops"):
        return keras.Variable(0.0, trainable=False, dtype="float32", name="mixed_precision_loss")
    import tensorflow as tf
    return tf.Variable(0.0, trainable=False, name="mixed_precision_loss")


def _as_float32(keras: Any, loss: Any) -> Any:
    return keras.ops.cast(loss, "float32") if hasattr(keras, "ops") else keras.backend.cast(loss, "float32")


def _scale_of(optimizer: Any) -> float:
    """The loss scale of a LossScaleOptimizer of Keras 3 or 2. ValueError for another optimizer."""
    names = "dynamic_scale", "loss_scale", "initial_scale"  # Keras 3's, Keras 2's, Keras 3's before the first step
    scale = next((getattr(optimizer, name) for name in names if getattr(optimizer, name, None) is not None), None)
    if scale is None:
        raise ValueError("MixedPrecisionCallback: the policy may choose float16, whose gradients need a loss scale. "
                         "Compile with LossScaleOptimizer(hvd.DistributedOptimizer(...)) of keras.optimizers, in Keras "
                         "2 of keras.mixed_precision.")
    return float(scale.numpy() if hasattr(scale, "numpy") else scale)


def _available(keras: Any) -> Dict[str, str]:
    """The levels, each with "" or why it is not there."""
    has_gpu, on_tensorflow = False, not hasattr(keras, "ops") or keras.backend.backend() == "tensorflow"
    if on_tensorflow:
        import tensorflow as tf
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
    return {"float32": "", "bfloat16": "", "float16": "", "fp8": "Keras has no policy for it that a built model takes",
            "tf32": "" if has_gpu else "it is for NVIDIA GPUs and Keras on TensorFlow"}


def _expect_castable(model: Any) -> None:
    if model.dtype_policy.compute_dtype == model.dtype_policy.variable_dtype:
        raise ValueError("MixedPrecisionCallback: the model was built under the policy "
                         f"{model.dtype_policy.name}, and Keras 2 can cast only weights that were made under a mixed "
                         "one. Call tf.keras.mixed_precision.set_global_policy('mixed_bfloat16') before the model is "
                         "built; steps in float32 are as without.")

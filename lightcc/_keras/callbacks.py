"""What lightcc's callbacks do, for every Keras: mix-ins, which lightcc.keras.callbacks and
lightcc.tensorflow.keras.callbacks join with the Callback of their Keras.

They run between the steps, in Python: values travel as numpy arrays, whatever the backend computes with. All ranks must
have the same callbacks in the same order. backend: the module keras.backend. device: Horovod's, not used: this version
works in the memory of the host.
"""
import math
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np

from lightcc._keras import values
from lightcc._keras.optimizer import build, variables_of
from lightcc.core import lib, objects
from lightcc.core.metrics import METRICS, metrics


class BroadcastGlobalVariablesCallbackImpl:
    """Makes the variables of the model and of its optimizer equal to those of root_rank when training begins.

    The weights are sent before the first batch, so that the first step starts from the same ones on all ranks, and with
    them the optimizer's variables. So one rank alone may have loaded a checkpoint: where others have no model or no
    slots of the optimizer yet, these are made. After the first batch everything is sent again, with what the first step
    has made; that is all where no rank's model is built before. Not sent: metrics, the seeds of dropout and the like,
    gradients that are being accumulated, and local_variables (tf.Variable or keras.Variable), to which
    register_local_var adds; the optimizer's state for these is the root's.
    A Keras 3 model that is to be compiled by XLA will not be, with a warning, as XLA has no collectives.

    Errors: ValueError if a local variable is none; after the first batch, ValueError on all ranks if their variables
    differ in number, shape or dtype; those of broadcast.
    Source: horovod.keras.callbacks (which sends only after the first batch).

    >>> import lightcc.keras
    >>> callbacks = [lightcc.keras.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)]  # for model.fit
    """

    model: Any  # Keras's Callback has it

    def __init__(self, backend: Any, root_rank: int, device: str = "", *args):
        super().__init__(*args)
        self.backend, self.root_rank, self.device = backend, root_rank, device
        self.broadcast_done = False
        self._local_variables: List[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable out of the broadcast. ValueError for anything else.

        >>> import keras, lightcc.keras
        >>> callback = lightcc.keras.callbacks.BroadcastGlobalVariablesCallback(0)
        >>> callback.register_local_var(keras.layers.Embedding(4, 2).add_weight(shape=(1,)))
        """
        if not hasattr(var, "assign"):
            raise ValueError(f"{type(self).__name__}: a local variable must be a tf.Variable or a keras.Variable, not "
                             f"a {type(var).__name__}.")
        self._local_variables.append(var)

    def set_model(self, model: Any) -> None:
        """Keras hook: comes before the model's step is compiled."""
        super().set_model(model)
        if hasattr(model, "_resolve_auto_jit_compile") and self.backend.backend() == "tensorflow" and model.jit_compile:
            warnings.warn("lightcc: jit_compile is turned off, as XLA cannot compile collectives. Call "
                          "model.compile(..., jit_compile=False) to say so yourself.", stacklevel=2)
            model.jit_compile = False

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.broadcast_done = False
        self._build_model_like_others()
        weights, optimizer = self.model.weights if self.model.built else [], getattr(self.model, "optimizer", None)
        if not (self._send_if_alike(weights, "weights") and weights):
            return  # what the first step makes, or an error, follows after it
        if not self._send_if_alike(variables_of(optimizer), "state"):  # only some have loaded slots, or trained before
            build(optimizer, self.model.trainable_variables)
            self._send_if_alike(variables_of(optimizer), "state")

    def on_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if self.broadcast_done:
            return
        variables = self._shared([*self.model.weights, *variables_of(getattr(self.model, "optimizer", None))])
        of_ranks = values.outlines(variables, "broadcast_callback")
        if len(of_ranks) > 1:
            raise ValueError(f"{type(self).__name__}: the variables of model and optimizer differ between the ranks: "
                             f"{values.difference(of_ranks)}. Build the same model and optimizer on all ranks.")
        values.broadcast(self.backend, variables, self.root_rank, "broadcast_callback.after")
        self.broadcast_done = True

    def _build_model_like_others(self) -> None:
        """Makes the weights of a model that has none yet where another rank's has, for inputs of the same shape."""
        mine = (self.model.get_build_config() or {}) if self.model.built else None
        known = [one for one in objects.allgather_object(mine, "broadcast_callback.built") if one is not None]
        if self.model.built or not known:
            return
        why = ""
        try:
            self.model.build_from_config(known[0])
        except Exception as error:  # Keras raises many kinds
            why = f" ({type(error).__name__}: {error})"
        if not self.model.built:
            warnings.warn("lightcc: the model has weights on another rank, as from a file, but Keras cannot make them "
                          f"on rank {lib.rank()}{why}, so the first step starts from different weights. Call the "
                          "model on a batch before fit.", stacklevel=2)

    def _send_if_alike(self, variables: List[Any], name: str) -> bool:
        """Gives variables the values of the root if all ranks have the like of them. Returns whether they have."""
        variables, name = self._shared(variables), f"broadcast_callback.{name}"
        alike = len(values.outlines(variables, name)) == 1
        if alike:
            values.broadcast(self.backend, variables, self.root_rank, name)
        return alike

    def _shared(self, variables: List[Any]) -> List[Any]:
        """Those of a model's and optimizer's variables that are sent."""
        left_out = {id(v) for v in self._local_variables}
        left_out.update(id(v) for v in getattr(getattr(self.model, "optimizer", None), "_accumulated_gradients", ()))
        return [v for v in variables if id(v) not in left_out and id(getattr(v, "_value", None)) not in left_out]


class MetricAverageCallbackImpl:
    """Replaces the numbers in an epoch's logs by their averages over the ranks.

    Put it before callbacks that read them (ModelCheckpoint, ReduceLROnPlateau, EarlyStopping, TensorBoard): then all
    ranks decide alike. Every rank counts the same, whatever the size of its data. What is not a number or an array of
    numbers stays.
    Errors: ValueError on all ranks if they have different metrics; those of allgather.
    Source: horovod.keras.callbacks.

    >>> import lightcc.keras
    >>> logs = {"loss": lightcc.keras.rank()}
    >>> lightcc.keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    >>> logs["loss"] == (lightcc.keras.size() - 1) / 2
    True
    """

    def __init__(self, backend: Any, device: str = "", *args):
        super().__init__(*args)
        self.backend, self.device = backend, device

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        logs = {} if logs is None else logs
        numbers = {name: np.asarray(value) for name, value in logs.items()}
        mine = {name: x.astype(np.float64) for name, x in sorted(numbers.items()) if x.dtype.kind in "biuf"}
        of_ranks = objects.allgather_object(mine, "metric_average")
        for rank, theirs in enumerate(of_ranks):
            if [(name, x.shape) for name, x in theirs.items()] != [(name, x.shape) for name, x in of_ranks[0].items()]:
                raise ValueError(f"MetricAverageCallback: the ranks' metrics differ: rank 0 has {list(of_ranks[0])}, "
                                 f"rank {rank} has {list(theirs)}. Give fit the same metrics and validation data on "
                                 "all ranks.")
        for name in mine:
            mean = np.mean([theirs[name] for theirs in of_ranks], axis=0)
            logs[name] = mean if mean.ndim else float(mean)


class LearningRateScheduleCallbackImpl:
    """Sets the learning rate to initial_lr * multiplier in the epochs from start_epoch to end_epoch (None: for ever).

    multiplier: a number, or a function of the epoch. staircase: once an epoch; else for every batch, with epochs that
    are fractions (a constant multiplier needs no more than once). steps_per_epoch: None asks Keras.
    momentum_correction: when the rate changes, SGD's and RMSprop's velocities, which hold past rates times gradients,
    change with it, so that a step is the one that the new rate alone would have led to (Goyal et al. 2017, 2.2). The
    logs get the rate as "lr".
    Of an E.Optimizer (lightcc.keras.embedding), initial_lr is the dense part's; the rows' rate is what their optimizer
    was made with, times the multiplier, unless it is a schedule.

    Errors: ValueError if initial_lr is None; as training begins, ValueError if Keras does not know the steps of an
    epoch and they are needed; Keras' own for an optimizer with a LearningRateSchedule.
    Source: horovod.keras.callbacks (which changes the factor of the momentum for a batch: a compiled step of Keras 3
    would not see that).

    >>> import lightcc.keras
    >>> tenth = lightcc.keras.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.1, start_epoch=30, end_epoch=60)
    """

    model: Any  # Keras's Callback has these
    params: Optional[Dict[str, Any]]

    def __init__(self, backend: Any, initial_lr: float, multiplier: Union[float, Callable[[float], float]],
                 start_epoch: int = 0, end_epoch: Optional[int] = None, staircase: bool = True,
                 momentum_correction: bool = True, steps_per_epoch: Optional[int] = None, *args):
        super().__init__(*args)
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__}: initial_lr is required: the learning rate that the multiplier is "
                             "for.")
        self.backend, self.initial_lr = backend, initial_lr
        self.start_epoch, self.end_epoch, self.steps_per_epoch = start_epoch, end_epoch, steps_per_epoch
        self.momentum_correction, self.current_epoch = momentum_correction, 0
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if not self.staircase and not self.steps_per_epoch:
            asked = self.params or {}
            self.steps_per_epoch = asked.get("steps")
            if not self.steps_per_epoch and asked.get("samples") and asked.get("batch_size"):  # in a session
                self.steps_per_epoch = math.ceil(asked["samples"] / asked["batch_size"])
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: Keras does not know how many steps an epoch has. Give "
                                 "steps_per_epoch to the callback or to fit.")

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.multiplier(epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        rate = self.model.optimizer.learning_rate
        return float(rate if isinstance(rate, (int, float)) else values.read(self.backend, [rate])[0])

    def _set(self, factor: float) -> None:
        old = self._rate()
        self.model.optimizer.learning_rate = self.initial_lr * factor
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # of a LossScaleOptimizer
        if hasattr(inner, "scale_rate_of_rows"):
            inner.scale_rate_of_rows(factor)
        new = self._rate()  # as the optimizer holds it, in float32
        if self.momentum_correction and old not in (0, new):
            values.multiply(self.backend, self._velocities(), new / old)

    def _velocities(self) -> List[Any]:
        """The variables v of v = momentum * v - rate * gradient. Other optimizers' momentum holds no rates."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # in a LossScaleOptimizer
        if not {"SGD", "RMSprop"} & {base.__name__ for base in type(optimizer).__mro__}:
            return []
        if hasattr(optimizer, "get_slot_names"):  # Keras 2's legacy family
            if "momentum" not in optimizer.get_slot_names():
                return []
            return [optimizer.get_slot(weight, "momentum") for weight in self.model.trainable_weights]
        return getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])


class LearningRateWarmupCallbackImpl(LearningRateScheduleCallbackImpl):
    """Raises the learning rate from initial_lr / size to initial_lr, in equal steps, one a batch, in warmup_epochs.

    initial_lr: the rate for all ranks together, which is what one rank would have times the number of ranks: a net that
    is new bears it only after a while (Goyal et al. 2017, 2.2). The last batch of the warm-up has it.
    verbose: 1 prints a line when the warm-up is over. The rest, errors too, as for LearningRateScheduleCallback.
    Source: horovod.keras.callbacks.

    >>> import lightcc.keras
    >>> warmup = lightcc.keras.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * lightcc.keras.size(), verbose=1)
    """

    def __init__(self, backend: Any, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
                 steps_per_epoch: Optional[int] = None, verbose: int = 0, *args):
        def multiplier(epoch: float) -> float:
            done = min((epoch + 1 / self.steps_per_epoch) / warmup_epochs, 1.0)  # at the end of this batch
            return (1 + (lib.size() - 1) * done) / lib.size()

        super().__init__(backend, initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction,
                         steps_per_epoch, *args)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch + 1 == self.end_epoch:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class LightccMetricsCallbackImpl:
    """Adds metrics of lightcc to the logs of each epoch, for the callbacks behind it: History, TensorBoard, CSVLogger.

    names: which of lightcc.core.metrics.METRICS, as they are at the end of the epoch; counters as what the epoch has
    added. In the logs they are called "lightcc_<name>". Each rank adds its own, so put it behind MetricAverageCallback.
    Errors: ValueError for a name that is no metric, and as training begins before init.

    >>> import lightcc.keras
    >>> callback = lightcc.keras.callbacks.LightccMetricsCallback(names=["exposed_seconds", "payload_bytes"])
    """

    def __init__(self, names: Sequence[str] = ("steps", "exposed_share", "payload_bytes", "sent_bytes"), *args):
        super().__init__(*args)
        unknown = [name for name in names if name not in {metric.name for metric in METRICS}]
        if unknown:
            raise ValueError(f"LightccMetricsCallback: no metric is called {', '.join(unknown)}; there are "
                             f"{', '.join(metric.name for metric in METRICS)}.")
        self._names = list(names)
        self._before: Dict[str, Any] = {}

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self._before = metrics()

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        before, now = self._before, metrics()
        self._before = now
        spent = max(now["uptime_seconds"] - before["uptime_seconds"], 1e-9)
        added = {metric.name: now[metric.name] - before[metric.name] if metric.kind == "counter" else now[metric.name]
                 for metric in METRICS}
        added["exposed_share"] = min(added["exposed_seconds"] / spent, 1.0)
        if logs is not None:
            logs.update({f"lightcc_{name}": float(added[name]) for name in self._names})


class BestModelCheckpointImpl:
    """Keras' ModelCheckpoint that keeps only the best model. Its filepath is set before training, as an attribute.

    monitor, verbose, save_weights_only, mode, save_freq: as for ModelCheckpoint. Use it on one rank, behind
    MetricAverageCallback. Errors: ValueError as training begins without a filepath; those of ModelCheckpoint.
    Source: horovod.keras.callbacks.

    >>> import lightcc.keras
    >>> checkpoint = lightcc.keras.callbacks.BestModelCheckpoint(monitor="loss")
    >>> checkpoint.filepath = "best.keras"
    """

    def __init__(self, save_weights_only: bool = False, **options):
        placeholder = "unset.weights.h5" if save_weights_only else "unset.keras"  # of a kind that Keras 3 takes
        super().__init__(placeholder, save_best_only=True, save_weights_only=save_weights_only, **options)
        self.filepath = None

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if not self.filepath:
            raise ValueError("BestModelCheckpoint: no file to write to. Set its attribute filepath before fit.")
        super().on_train_begin(logs)

"""LocalSGD and DiLoCo as callbacks of fit, for every Keras: mix-ins, which bound_callbacks joins with its Callback.

The model is compiled with a plain optimizer. Values travel as numpy arrays between the steps.
"""
from typing import Any, Dict, List, Optional

from lightcc._keras import values
from lightcc.compress.compressors import NoneCompressor
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.periodic import arrays


class PeriodicCallbackImpl:
    """Tells an exchange of the steps of fit. backend: the module keras.backend."""

    model: Any  # Keras's Callback has it

    def __init__(self, backend: Any, what: str, exchange: arrays.ArrayExchange, *args):
        super().__init__(*args)
        self.backend, self._what, self._exchange = backend, what, exchange
        self._variables: List[Any] = []    # that are exchanged, once they are
        self._train_function: Any = None   # that trains them

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook. ValueError for several steps an execution."""
        several = getattr(self.model, "steps_per_execution", None) or getattr(self.model, "_steps_per_execution", 1)
        if int(several.numpy() if hasattr(several, "numpy") else several) > 1:
            raise ValueError(f"{self._what}: the model is compiled with steps_per_execution > 1, and steps are counted "
                             "between executions; compile it with 1.")
        if self._exchange.started and self._are_others():
            self._exchange.forget()
        self._start()

    def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self._start()

    def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if not self._exchange.started:  # the first step has made the weights
            self._start()
            return
        self._exchange.before_step()
        self._exchange.after_step()

    def on_train_end(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook: all ranks end with the same trainable weights."""
        if self._exchange.started:
            self._exchange.end()

    def _are_others(self) -> bool:
        """Whether fit trains other variables than are exchanged. What a function of the model trains is settled when
        it is compiled, whatever becomes of `trainable` later."""
        train_function = getattr(self.model, "train_function", None)
        if train_function is not None and train_function is self._train_function:
            return False
        self._train_function = train_function
        return list(map(id, self._variables)) != list(map(id, self._trainable()))

    def _trainable(self) -> List[Any]:
        return list(self.model.trainable_variables) if self.model.built else []

    def _start(self) -> None:
        if not self._exchange.started:
            variables = self._trainable()
            if not variables:
                return
            self._exchange.start(
                lambda indices: values.read(self.backend, [variables[index] for index in indices]),
                lambda indices, new: values.write(self.backend, [variables[index] for index in indices], new),
                [str(getattr(variable, "path", None) or variable.name) for variable in variables])
            self._variables, self._train_function = variables, getattr(self.model, "train_function", None)
        self._exchange.before_step()  # with new ranks perhaps, which begin here


class LocalSGDImpl(PeriodicCallbackImpl):
    """Averages the model's trainable variables over the ranks after every `sync_every` batches of fit, and at its end
    (docs/fewer_exchanges.md).

    The model is compiled with a plain optimizer, whose variables are each rank's own, as are statistics of batch
    normalisation. Put it behind BroadcastGlobalVariablesCallback, which sends once more after the first batch; all
    ranks need equally many batches. delay: the exchange runs behind so many further batches.
    Errors: ValueError for arguments out of their ranges, for steps_per_execution > 1, and on all ranks if they differ
    in settings; those of allreduce. join() is refused until fit has ended, as a rank that has joined would add zeros.

    >>> import lightcc.keras
    >>> callbacks = [lightcc.keras.LocalSGD(sync_every=10)]  # for model.fit
    """

    def __init__(self, backend: Any, sync_every: int, delay: int = 0, process_set: ProcessSet = global_process_set):
        super().__init__(backend, "hvd.LocalSGD", arrays.local_sgd("hvd.LocalSGD", sync_every, delay, process_set))


class DiLoCoImpl(PeriodicCallbackImpl):
    """Exchanges outer gradients of the model's trainable variables after every `sync_every` batches of fit, and at its
    end (docs/fewer_exchanges.md).

    The outer optimizer is SGD with outer_learning_rate, outer_momentum and nesterov. fragments, delay, alpha: those of
    lightcc.torch's DiLoCo. compression: hvd.Compression.topk(...) or int8(). In each new world of an elastic job the
    outer optimizer begins anew from the weights. The rest, and errors, as of LocalSGD.

    >>> import lightcc.keras
    >>> callbacks = [lightcc.keras.DiLoCo(sync_every=100, fragments=4)]  # for model.fit
    """

    def __init__(self, backend: Any, sync_every: int = 100, fragments: int = 1, delay: int = 0,
                 alpha: Optional[float] = None, outer_learning_rate: float = 0.7, outer_momentum: float = 0.9,
                 nesterov: bool = True, compression: Any = NoneCompressor,
                 process_set: ProcessSet = global_process_set):
        super().__init__(backend, "hvd.DiLoCo", arrays.diloco(
            "hvd.DiLoCo", sync_every, fragments, delay, alpha, outer_learning_rate, outer_momentum, nesterov,
            compression, process_set))

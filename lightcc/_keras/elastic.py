"""Elastic training with Keras: what a job takes from world to world of a model, and the callbacks that keep it.

Values travel between the steps, as numpy arrays, whatever Keras runs on; TensorFlow is not imported here.
"""
import copy
from itertools import zip_longest
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from lightcc._keras import patches, values
from lightcc._keras.optimizer import build, distributed_in, hidden_variables_of, keras_of, variables_of
from lightcc.compress.variable_compression import compression_state, load_compression_state, share_residuals
from lightcc.core import lib, objects
from lightcc.core.elastic_shared import SharingState

# Where a model of Keras 3 or 2 keeps the validation data of a fit that an exception has ended: for the next fit.
_VALIDATION_DATA = "_eval_epoch_iterator", "_eval_data_handler"


class VariablesState(SharingState):
    """A state that keeps variables, beside values and the tables among the variables. Abstract: a subclass says which.
    Of values that have state_dict and load_state_dict, it keeps what the former returns.

    backend: what reads and writes them where they live in a session, as lightcc._keras.values uses it.
    """

    def __init__(self, backend: Any, **kwargs: Any):
        self.backend = backend
        self.take_parts(kwargs)
        of_parts = {name for part in self._shared for name in part.names}
        self._stateful = {name: value for name, value in kwargs.items() if name not in of_parts
                          and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")}
        self._kept_states: Dict[str, Any] = {}
        super().__init__(objects.broadcast_object, lib.rank,
                         **{name: value for name, value in kwargs.items() if name not in self._stateful})
        vars(self).update(self._stateful)
        self._keep_own()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_stateful", {}):
            self._stateful[name], self._kept_states[name] = value, copy.deepcopy(value.state_dict())
        super().__setattr__(name, value)

    def own_variables(self) -> List[Any]:
        """What is kept."""
        raise NotImplementedError

    def own_saved(self) -> Dict[str, Any]:
        """The variables' values, and what has a state_dict."""
        return {"variables": self._kept[1], **self._kept_states}

    def take_own(self, name: str, saved: Any) -> None:
        """Gives the variables saved values, or an object its state. ValueError if they are others."""
        if name in self._stateful:
            self._kept_states[name] = saved
            self._stateful[name].load_state_dict(copy.deepcopy(saved))
            return
        variables, mine = self._kept
        for there, here in zip_longest(values.outline(saved), values.outline(mine)):
            if there != here:
                raise ValueError(f"a variable, by shape and dtype, is {there} there and {here} here")
        self._kept = variables, saved
        self._give_own_back()

    def _keep_own(self) -> None:
        variables = self.own_variables()
        self._kept: Tuple[List[Any], List[np.ndarray]] = variables, values.read(self.backend, variables)
        self._kept_states = {name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()}

    def _give_own_back(self) -> None:
        values.write(self.backend, *self._kept)
        for name, value in self._stateful.items():
            value.load_state_dict(copy.deepcopy(self._kept_states[name]))

    def _make_own_equal(self) -> None:
        """ValueError on all ranks if their variables differ."""
        variables = self.own_variables()
        of_ranks = values.outlines(variables, "elastic.state")
        if len(of_ranks) > 1:
            raise ValueError(f"{type(self).__name__}: the ranks' variables differ: {values.difference(of_ranks)}. "
                             "Build the same model and optimizer on all ranks.")
        values.broadcast(self.backend, variables, 0, "elastic.state")
        for name, value in self._stateful.items():
            value.load_state_dict(objects.broadcast_object(value.state_dict(), 0, f"elastic.state_dict.{name}"))


class TensorFlowKerasState(VariablesState):
    """The state of a Keras model: weights, optimizer, and plain values as in ObjectState.

    model: built, of Keras 3 (on TensorFlow or on torch) or Keras 2. optimizer: default that with which the model is
    compiled, if it is. Its variables are made now, if it has none yet, so that all ranks have the same ones. backend:
    default the module keras.backend. kwargs: plain values; the callbacks use batch and epoch. What has state_dict and
    load_state_dict, such as a MixedPrecisionCallback, is kept by these.
    A commit keeps copies of the model's weights, the optimizer's variables and what compression has left behind on this
    rank; and of tables of embeddings a log of what changes. recovery=lightcc.embedding.Recovery(path) brings back what
    a lost rank had of these. Not kept: metrics, the seeds of dropout and the like. Gradients that
    backward_passes_per_step has added up are dropped by restore() and in each new world: commit after the pass that
    applies them.
    Errors: ValueError if the model is not built; from sync() if the ranks' variables differ.
    Source: horovod.tensorflow.elastic.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> model.compile(keras.optimizers.SGD(0.1), "mse")
    >>> state = TensorFlowKerasState(model, batch=0)
    >>> model.set_weights([weight + 1 for weight in model.get_weights()]); state.batch = 1; state.restore()
    >>> state.batch, [float(weight.sum()) for weight in model.get_weights()]
    (0, [0.0, 0.0])
    """

    def __init__(self, model, optimizer=None, backend=None, **kwargs: Any):
        if not model.built:
            raise ValueError(f"{type(self).__name__}: the model is not built, so it has no variables yet. Call "
                             "model.build() with the shape of its input, or the model with a batch, before.")
        self.model, self._optimizer = model, optimizer
        super().__init__(backend or keras_of(type(model)).backend, **kwargs)

    @property
    def optimizer(self) -> Any:
        """That which was given, or that with which the model is compiled now."""
        return getattr(self.model, "optimizer", None) if self._optimizer is None else self._optimizer

    def reset(self) -> None:
        """Drops what belongs to the world before: gradients that are being added up, and validation data."""
        self._drop_sums()
        for name in _VALIDATION_DATA:
            vars(self.model).pop(name, None)

    @property
    def _distributed(self) -> Any:
        return distributed_in(self.optimizer)

    def own_variables(self) -> List[Any]:
        if self.optimizer is None:
            return self.model.weights
        build(self.optimizer, self.model.trainable_variables)
        return [*self.model.weights, *variables_of(self.optimizer), *hidden_variables_of(self.optimizer)]

    def own_saved(self) -> Dict[str, Any]:
        """Also what compression has left behind."""
        return {**super().own_saved(), "residuals": self._residuals}

    def take_own(self, name: str, saved: Any) -> None:
        if name == "residuals":
            self._residuals = saved
            self._give_residuals_back()
        else:
            super().take_own(name, saved)

    def _keep_own(self) -> None:
        super()._keep_own()
        self._residuals = None if self._distributed is None else compression_state(self._distributed)

    def _give_own_back(self) -> None:
        super()._give_own_back()
        self._give_residuals_back()
        self._drop_sums()

    def _make_own_equal(self) -> None:
        if self._distributed is not None:
            share_residuals(self._distributed)
        super()._make_own_equal()

    def _give_residuals_back(self) -> None:
        if self._distributed is not None:
            load_compression_state(self._distributed, self._residuals)

    def _drop_sums(self) -> None:
        if self._distributed is not None:
            self._distributed._reducer.drop_sums(self.backend)


class CommitStateCallbackImpl:
    """Commits a state after every batches_per_commit batches, and at the end of each epoch.

    All ranks commit together, and hosts that have come or gone end the fit there, by an exception that elastic.run
    takes. Put it behind the callbacks that update the state, as what they set later is not in the commit.
    state: a KerasState. batches_per_commit: more of them cost less, and a lost worker costs up to so many batches.
    Errors: ValueError for batches_per_commit < 1; those of state.commit(). Source: horovod.keras.elastic.

    >>> import keras, lightcc.keras as hvd
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]); model.compile("sgd", "mse")
    >>> state = hvd.elastic.KerasState(model, batch=0)
    >>> callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=2); callback.on_train_begin()
    >>> state.batch = 1; callback.on_batch_end(0); state.batch = 2; callback.on_batch_end(1)
    >>> state.batch = 3; state.restore(); state.batch
    2
    """

    def __init__(self, backend: Any, state: Any, batches_per_commit: int, *args):
        super().__init__(*args)
        if batches_per_commit < 1:
            raise ValueError(f"{type(self).__name__}: batches_per_commit must be 1 or more, not {batches_per_commit}.")
        self.backend, self.state, self.batches_per_commit = backend, state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.commit()

    def commit(self) -> None:
        """Commits the state now."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class _EndOfEpoch:
    """What model.stop_training is set to so that Keras ends the batches of this epoch, but not the training."""


_END_OF_EPOCH = _EndOfEpoch()


class UpdateBatchStateCallbackImpl:
    """Keeps in state.batch how many batches of the epoch are done, and shortens an epoch that was begun before.

    The first epoch of a fit has as many batches as are left, and at least one: the steps that Keras knows of (of
    steps_per_epoch, or of data whose length is known) less state.batch, rounded up to whole executions. Where Keras
    does not know them, the epoch is as long as its data. In a session of TensorFlow 1 a shorter epoch has no
    validation.
    state: a KerasState with batch. Errors: ValueError without one. Source: horovod.keras.elastic, where an epoch of
    Keras 3 has all its batches, and state.batch is one less.

    >>> import keras, lightcc.keras as hvd
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]); model.compile("sgd", "mse")
    >>> state = hvd.elastic.KerasState(model, batch=3)
    >>> callback = hvd.elastic.UpdateBatchStateCallback(state)
    >>> class Count(keras.callbacks.Callback):
    ...     def on_batch_end(self, batch, logs=None): print(batch, state.batch)
    >>> x = np.ones((5, 2)); history = model.fit(x, x[:, 0], 1, verbose=0, callbacks=[callback, Count()])
    0 4
    1 5
    >>> state.batch
    0
    """

    model: Any  # Keras's Callback has these
    params: Any

    def __init__(self, backend: Any, state: Any, *args):
        super().__init__(*args)
        _require(self, state, "batch")
        patches.install_epochs()
        self.backend, self.state = backend, state
        self.steps_per_epoch: Optional[int] = None
        self._before = 0  # batches of this epoch that were done before this fit

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.steps_per_epoch = (self.params or {}).get("steps")
        patches.epoch_was_cut = False

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self._before = self.state.batch
        if self.steps_per_epoch:
            self.params["steps"] = max(1, self.steps_per_epoch - self._before)  # for other callbacks

    def on_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.state.batch = self._before + batch + 1
        if self._before and self.steps_per_epoch and self.state.batch >= self.steps_per_epoch:
            self.model.stop_training = self.model.stop_training or _END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.state.batch = 0
        if self.model.stop_training is _END_OF_EPOCH:  # else another callback wants the training to end
            self.model.stop_training, patches.epoch_was_cut = False, True


class UpdateEpochStateCallbackImpl:
    """Keeps in state.epoch how many epochs are done, in all fits together.

    A fit may number its epochs from 0 (epochs=total - state.epoch) or go on (initial_epoch=state.epoch).
    state: a KerasState with epoch. Errors: ValueError without one. Source: horovod.keras.elastic.

    >>> import keras, lightcc.keras as hvd
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]); model.compile("sgd", "mse")
    >>> state = hvd.elastic.KerasState(model, epoch=3)
    >>> callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
    >>> history = model.fit(np.ones((2, 2)), np.ones(2), epochs=2, verbose=0, callbacks=callbacks); state.epoch
    5
    >>> history = model.fit(np.ones((2, 2)), np.ones(2), initial_epoch=5, epochs=6, verbose=0, callbacks=callbacks)
    >>> state.epoch
    6
    """

    def __init__(self, backend: Any, state: Any, *args):
        super().__init__(*args)
        _require(self, state, "epoch")
        self.backend, self.state = backend, state
        self._before: Optional[int] = None  # epochs that were done before Keras' epoch 0; None until one begins

    def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Keras hook."""
        self.state.epoch = self._before + epoch + 1


def _require(callback: Any, state: Any, name: str) -> None:
    if not hasattr(state, name):
        raise ValueError(f"{type(callback).__name__}: the state has no {name}: make it by KerasState(model, {name}=0).")

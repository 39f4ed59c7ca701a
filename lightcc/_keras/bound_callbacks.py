"""The callbacks of one Keras package: the mix-ins of callbacks.py and elastic.py, joined with its own Callback."""
from typing import Any, Iterable, Optional, Tuple

from lightcc._keras import callbacks as impl
from lightcc._keras import elastic


def bound_callbacks(keras: Any, module: str) -> Tuple[type, ...]:
    """The classes, as if they were defined in `module`. keras: the package keras or tf.keras."""

    class BroadcastGlobalVariablesCallback(impl.BroadcastGlobalVariablesCallbackImpl, keras.callbacks.Callback):
        def __init__(self, root_rank: int, device: str = "", local_variables: Optional[Iterable[Any]] = None):
            super().__init__(keras.backend, root_rank, device)
            for variable in local_variables or ():
                self.register_local_var(variable)

    class MetricAverageCallback(impl.MetricAverageCallbackImpl, keras.callbacks.Callback):
        def __init__(self, device: str = ""):
            super().__init__(keras.backend, device)

    class LearningRateScheduleCallback(impl.LearningRateScheduleCallbackImpl, keras.callbacks.Callback):
        def __init__(self, initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True,
                     momentum_correction=True, steps_per_epoch=None):
            super().__init__(keras.backend, initial_lr, multiplier, start_epoch, end_epoch, staircase,
                             momentum_correction, steps_per_epoch)

    class LearningRateWarmupCallback(impl.LearningRateWarmupCallbackImpl, keras.callbacks.Callback):
        def __init__(self, initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
            super().__init__(keras.backend, initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)

    class LightccMetricsCallback(impl.LightccMetricsCallbackImpl, keras.callbacks.Callback):
        pass

    classes = (BroadcastGlobalVariablesCallback, MetricAverageCallback, LearningRateScheduleCallback,
               LearningRateWarmupCallback, LightccMetricsCallback)
    return _defined_in(module, classes)


def bound_elastic(keras: Any, module: str) -> Tuple[type, ...]:
    """As bound_callbacks, for elastic training: the state and its callbacks."""

    class KerasState(elastic.TensorFlowKerasState):
        def __init__(self, model, optimizer=None, **kwargs):
            super().__init__(model, optimizer, keras.backend, **kwargs)

    class CommitStateCallback(elastic.CommitStateCallbackImpl, keras.callbacks.Callback):
        def __init__(self, state, batches_per_commit=1):
            super().__init__(keras.backend, state, batches_per_commit)

    class UpdateBatchStateCallback(elastic.UpdateBatchStateCallbackImpl, keras.callbacks.Callback):
        def __init__(self, state):
            super().__init__(keras.backend, state)

    class UpdateEpochStateCallback(elastic.UpdateEpochStateCallbackImpl, keras.callbacks.Callback):
        def __init__(self, state):
            super().__init__(keras.backend, state)

    return _defined_in(module, (KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback))


def _defined_in(module: str, classes: Tuple[type, ...]) -> Tuple[type, ...]:
    for cls in classes:
        cls.__module__, cls.__qualname__ = module, cls.__name__
    return classes

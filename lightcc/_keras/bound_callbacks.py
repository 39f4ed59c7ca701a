"""The callbacks of one Keras package: the mix-ins of callbacks.py and elastic.py, joined with its own Callback."""
from typing import Any, Iterable, Optional, Tuple

from lightcc._keras import callbacks as impl
from lightcc._keras import elastic, periodic
from lightcc.compress.compressors import NoneCompressor
from lightcc.core.process_sets import global_process_set


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


def bound_periodic(keras: Any, module: str) -> Tuple[type, ...]:
    """As bound_callbacks, for training with fewer exchanges."""

    class LocalSGD(periodic.LocalSGDImpl, keras.callbacks.Callback):
        def __init__(self, sync_every, delay=0, process_set=global_process_set):
            super().__init__(keras.backend, sync_every, delay, process_set)

    class DiLoCo(periodic.DiLoCoImpl, keras.callbacks.Callback):
        def __init__(self, sync_every=100, fragments=1, delay=0, alpha=None, outer_learning_rate=0.7,
                     outer_momentum=0.9, nesterov=True, compression=NoneCompressor, process_set=global_process_set):
            super().__init__(keras.backend, sync_every, fragments, delay, alpha, outer_learning_rate, outer_momentum,
                             nesterov, compression, process_set)

    return _defined_in(module, (LocalSGD, DiLoCo))


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

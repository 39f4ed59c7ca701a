"""Callbacks for tf.keras. What they do: lightcc._keras.callbacks."""
from typing import Any, Iterable, Optional

from tensorflow import keras

from lightcc._keras import callbacks as _impl
from lightcc.common.util import is_version_greater_equal_than  # noqa: F401  as Horovod's module has it


class BroadcastGlobalVariablesCallback(_impl.BroadcastGlobalVariablesCallbackImpl, keras.callbacks.Callback):
    def __init__(self, root_rank: int, device: str = "", local_variables: Optional[Iterable[Any]] = None):
        super().__init__(keras.backend, root_rank, device)
        for variable in local_variables or ():
            self.register_local_var(variable)


class MetricAverageCallback(_impl.MetricAverageCallbackImpl, keras.callbacks.Callback):
    def __init__(self, device: str = ""):
        super().__init__(keras.backend, device)


class LearningRateScheduleCallback(_impl.LearningRateScheduleCallbackImpl, keras.callbacks.Callback):
    def __init__(self, initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True,
                 steps_per_epoch=None):
        super().__init__(keras.backend, initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction,
                         steps_per_epoch)


class LearningRateWarmupCallback(_impl.LearningRateWarmupCallbackImpl, keras.callbacks.Callback):
    def __init__(self, initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
        super().__init__(keras.backend, initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)


class BestModelCheckpoint(_impl.BestModelCheckpointImpl, keras.callbacks.ModelCheckpoint):
    def __init__(self, monitor="val_loss", verbose=0, save_weights_only=False, mode="auto", save_freq="epoch"):
        super().__init__(monitor=monitor, verbose=verbose, save_weights_only=save_weights_only, mode=mode,
                         save_freq=save_freq)

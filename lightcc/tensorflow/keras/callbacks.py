"""Callbacks for tf.keras. What they do: lightcc._keras.callbacks."""
from tensorflow import keras

from lightcc._keras import callbacks as _impl
from lightcc._keras.bound_callbacks import bound_callbacks
from lightcc.core.util import is_version_greater_equal_than  # noqa: F401  as Horovod's module has it

(BroadcastGlobalVariablesCallback, MetricAverageCallback, LearningRateScheduleCallback,
 LearningRateWarmupCallback, LightccMetricsCallback) = bound_callbacks(keras, __name__)


class BestModelCheckpoint(_impl.BestModelCheckpointImpl, keras.callbacks.ModelCheckpoint):
    def __init__(self, monitor="val_loss", verbose=0, save_weights_only=False, mode="auto", save_freq="epoch"):
        super().__init__(monitor=monitor, verbose=verbose, save_weights_only=save_weights_only, mode=mode,
                         save_freq=save_freq)


def __getattr__(name: str):
    if name == "MixedPrecisionCallback":  # loaded only where it is used
        from lightcc._keras.amp import bound_callback
        globals()[name] = bound_callback(keras, __name__)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Callbacks for stand-alone Keras. What they do: lightcc._keras.callbacks."""
import keras

from lightcc._keras import callbacks as _impl
from lightcc._keras.bound_callbacks import bound_callbacks

(BroadcastGlobalVariablesCallback, MetricAverageCallback, LearningRateScheduleCallback,
 LearningRateWarmupCallback, LightccMetricsCallback) = bound_callbacks(keras, __name__)


class BestModelCheckpoint(_impl.BestModelCheckpointImpl, keras.callbacks.ModelCheckpoint):
    def __init__(self, monitor="val_loss", verbose=0, mode="auto", save_freq="epoch"):
        super().__init__(monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)


def __getattr__(name: str):
    if name == "MixedPrecisionCallback":  # loaded only where it is used
        from lightcc._keras.amp import bound_callback
        globals()[name] = bound_callback(keras, __name__)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

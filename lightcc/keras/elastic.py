"""Elastic training for Keras: a model's state, and callbacks that keep it. What they do: lightcc._keras.elastic."""
import keras

from lightcc._keras.bound_callbacks import bound_elastic
from lightcc._keras.elastic import TensorFlowKerasState

if keras.backend.backend() == "torch":
    from lightcc.torch.elastic import run
else:
    from lightcc.tensorflow.elastic import run

__all__ = ["CommitStateCallback", "KerasState", "TensorFlowKerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]

KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = bound_elastic(keras, __name__)

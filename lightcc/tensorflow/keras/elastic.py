"""Elastic training for tf.keras: a model's state, and callbacks that keep it. What they do: lightcc._keras.elastic."""
from tensorflow import keras

from lightcc._keras.bound_callbacks import bound_elastic
from lightcc.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "TensorFlowKerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]

KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = bound_elastic(keras, __name__)

"""Batch normalisation with the mean and variance of the batches of all ranks, for Keras 3, tf_keras and Keras 2.

Each rank makes the moments of its own batch as Keras does. From them follow how many values there are, their sum and
the sum of their squares, which one allreduce adds up over the ranks: right also for ranks with fewer values, none, or
that have joined (they add zeros). The sums travel as float64, which is wide enough to take the square of the mean from
the mean of the squares of float32 inputs. The gradient of the allreduce is one allreduce of as many numbers.
"""
import tensorflow as tf

from lightcc.core.process_sets import global_process_set
from lightcc.core.wrapper_arguments import stays_here
from lightcc.tensorflow.mpi_ops import Sum, _allreduce, rank, size  # noqa: F401  as Horovod's module has them

_KERAS_3 = hasattr(tf.keras, "ops")


@tf.keras.utils.register_keras_serializable(package="lightcc")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """tf.keras.layers.BatchNormalization, with statistics over the batches of all ranks in training.

    In inference, and with one rank, it is the local one. All ranks must call it, each as often and in the same order.
    Arguments, weights and masks: those of BatchNormalization; any shape, any floating dtype; the number of rows may
    differ between ranks, and be none (in a tf.function that is traced for any number). fused: False only, as the fused
    kernel makes its own statistics. The gradients of gamma and beta are this rank's, to be averaged by
    DistributedOptimizer or DistributedGradientTape. A model that has it is not compiled by XLA. Saved models find it
    when lightcc.tensorflow is imported.

    Errors: ValueError for fused=True or None, for virtual_batch_size, for renorm's and other arguments as in Keras,
    before hvd.init(), and over another Keras backend than TensorFlow; those of allreduce.
    Source: horovod.tensorflow.sync_batch_norm (which needs Keras 2).

    >>> layer = hvd.SyncBatchNormalization(); y = layer(tf.random.normal((4, 3)) + hvd.rank(), training=True)
    >>> bool(tf.reduce_max(abs(hvd.allreduce(tf.reduce_mean(y, 0)))) < 1e-5)
    True
    """

    def __init__(self, fused=False, **kwargs):
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True, and so not None: the fused kernel "
                             "makes statistics of this rank only.")
        if kwargs.pop("virtual_batch_size", None) is not None:
            raise ValueError("SyncBatchNormalization does not support virtual_batch_size: it normalises over all "
                             "ranks' batches, not over parts of one.")
        if _KERAS_3 and tf.keras.backend.backend() != "tensorflow":
            raise ValueError("SyncBatchNormalization needs Keras over TensorFlow, and KERAS_BACKEND is "
                             f"{tf.keras.backend.backend()}; for torch there is lightcc.torch.SyncBatchNorm.")
        if not hasattr(tf.keras.layers.BatchNormalization, "_moments"):  # else it would be the local one, unnoticed
            raise NotImplementedError(f"SyncBatchNormalization does not know this Keras ({tf.keras.__name__} of "
                                      f"TensorFlow {tf.__version__}).")
        super().__init__(**kwargs, **({} if _KERAS_3 else {"fused": False}))
        self.supports_jit = False

    def call(self, inputs, training=None, mask=None):
        """Normalises; waits for the other ranks in training. In a graph of TensorFlow 1 the updates of the moving
        statistics are filed in the collection UPDATE_OPS.

        >>> layer = hvd.SyncBatchNormalization(momentum=0.0); layer(tf.ones((2, 3)), training=True).shape.as_list()
        [2, 3]
        """
        if tf.compat.v1.executing_eagerly_outside_functions():
            return super().call(inputs, training=training, mask=mask)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        outputs = super().call(inputs, training=training, mask=mask)
        # Keras 3 keeps no list of updates; in a graph they are what the call has assigned to the moving statistics.
        updates = self.updates if not _KERAS_3 else [node for node in graph.get_operations()[before:]
                                                     if node.type in ("AssignVariableOp", "Assign")]
        filed = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.UPDATE_OPS)  # which the training step runs
        filed.extend(update for update in updates if not any(update is other for other in filed))
        return outputs

    def _moments(self, inputs, *args, **kwargs):
        """Keras' own step, which this class replaces: (mask) in Keras 3, (axes, keep_dims, mask) in Keras 2."""
        if stays_here(global_process_set):
            return super()._moments(inputs, *args, **kwargs)
        if _KERAS_3:
            return _moments(inputs, self._reduction_axes, False, *args, **kwargs)
        return _moments(inputs, *args, **kwargs)


def _moments(inputs, axes, keep_dims, mask=None):
    """Mean and variance over the axes and over all ranks. mask: of inputs without the last dimension; None: all count.
    """
    if mask is None:
        counts = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs, tf.int64), axes)), tf.float64)
        mean, variance = _local_moments(inputs, axes, counts)
    else:
        present = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        counts = tf.math.count_nonzero(present, axes, keepdims=True, dtype=tf.float64)
        mean, variance = _local_moments(inputs, axes, counts, present)
    shape = tf.shape(mean)
    mean, variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    parts = [tf.reshape(part, [-1]) for part in (counts, mean * counts, (variance + mean * mean) * counts)]
    sums = _allreduce(tf.concat(parts, 0), op=Sum)
    counts, total, squares = tf.split(sums, [tf.size(part) for part in parts])
    counts = tf.maximum(counts, 1)
    mean = total / counts
    variance = tf.maximum(squares / counts - mean * mean, 0)
    results = [tf.cast(tf.reshape(value, shape), inputs.dtype) for value in (mean, variance)]
    return results if keep_dims else [tf.squeeze(value, axes) for value in results]


def _local_moments(inputs, axes, counts, present=None):
    """The moments of this rank's values, with all dimensions; zero where there are none."""
    def average(values):
        if present is not None:
            values = tf.where(present, values, tf.zeros_like(values))
        return tf.reduce_sum(values, axes, keepdims=True) / tf.cast(tf.maximum(counts, 1), inputs.dtype)

    mean = average(inputs)
    return mean, average(tf.math.squared_difference(inputs, tf.stop_gradient(mean)))  # as tf.nn.moments

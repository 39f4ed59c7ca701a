"""backward_passes_per_step for Keras optimizers, eagerly and in a tf.function."""
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from lightcc.tensorflow.gradient_reducer import AllreduceGradients
from lightcc.tensorflow.mpi_ops import size_op  # noqa: F401


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """LocalGradientAggregationHelper for a Keras optimizer: iterations are counted by its `iterations`.

    Arguments, methods and errors are the same. `counter` and the sums are made at the first use, once for eager calls
    and all tf.functions. Source: horovod.tensorflow.gradient_aggregation_eager.

    >>> helper = LocalGradientAggregationHelperEager(2, lambda grads, vars: grads, False, True)
    >>> x = tf.Variable(0.0); float(helper.compute_gradients([tf.constant(2.0)], [x])[0]), int(helper.counter)
    (2.0, 1)
    >>> float(helper.compute_gradients([tf.constant(4.0)], [x])[0]), int(helper.counter)
    (3.0, 0)
    """

    def __init__(self, backward_passes_per_step: int, allreduce_func: AllreduceGradients, sparse_as_dense: bool,
                 average_aggregated_gradients: bool, process_set: ProcessSet = global_process_set,
                 scale_local_gradients: bool = True):
        super().__init__(backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients, 0,
                         self._OPTIMIZER_TYPE_KERAS, process_set, scale_local_gradients)

"""The gradients of Keras optimizers on TensorFlow."""
import numpy as np
import tensorflow as tf

from lightcc._keras import values
from lightcc._keras.gradient_reducer import GradientReducer
from lightcc.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from lightcc.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from lightcc.tensorflow.gradient_reducer import LocalVariables, _make_allreduce_grads_fn


class TensorFlowGradientReducer(GradientReducer):
    """Eagerly, in tf.functions and in v1 graphs."""

    framework = "tensorflow"

    def __init__(self, options, class_name):
        super().__init__(options, class_name)
        self._local = LocalVariables(options.process_set, options.scale_local_gradients)
        self._allreduce_grads = _make_allreduce_grads_fn(
            self.name, options.device_dense, options.device_sparse, self.wanted, options.sparse_as_dense,
            options.op, options.gradient_predivide_factor, options.groups, options.process_set)
        if options.backward_passes_per_step > 1:
            arguments = (options.backward_passes_per_step, self._over_ranks, options.sparse_as_dense,
                         options.average_aggregated_gradients)
            if tf.compat.v1.executing_eagerly_outside_functions():
                self.helper = LocalGradientAggregationHelperEager(*arguments)
            else:
                self.helper = LocalGradientAggregationHelper(
                    *arguments, 0, LocalGradientAggregationHelper._OPTIMIZER_TYPE_KERAS)

    @staticmethod
    def check(members):
        if members.__name__ == "Keras2" and not tf.__internal__.tf2.enabled():
            raise ValueError("With the behavior of TensorFlow 1, Keras would put a plain optimizer in place of a "
                             "DistributedOptimizer of this family: wrap one of tf.keras.optimizers.legacy.")

    def keep_local(self, variable):
        self._local.add(variable)

    @property
    def has_local(self) -> bool:
        """Whether gradients of some variables or layers stay on this rank."""
        return bool(self._layers or len(self._local))

    def apply(self, closure, optimizer, pairs=()):
        if self.helper is None:
            return closure()
        return self.helper.apply_gradients(closure, optimizer, pairs)

    def drop_sums(self, backend):
        variables = [] if self.helper is None else self.helper.local_variables
        values.write(backend, variables, [np.zeros(v.shape, v.dtype.as_numpy_dtype) for v in variables])

    def _reduce(self, grads, variables):
        reduce = self._over_ranks if self.helper is None else self.helper.compute_gradients
        return reduce(grads, variables)

    def _over_ranks(self, grads, variables):
        return self._local.around(self._allreduce_grads, grads, variables)

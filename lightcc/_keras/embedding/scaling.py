"""mixed_float16: a LossScaleOptimizer of Keras around an E.Optimizer. A step is applied on all ranks or on none, so all
have the same scale.

Keras asks whether the gradients are finite, and changes the scale and skips the step by the answer. Dense gradients are
reduced before, and so the same everywhere; those of tables are this rank's own. So the ranks agree on the answer.
"""
from typing import Any, Iterable, List, Sequence

import tensorflow as tf

from lightcc._keras import patches
from lightcc._keras.embedding.refusals import tables_in
from lightcc._keras.patches import wrap
from lightcc.core.ops import ReduceOps
from lightcc.core.process_sets import ProcessSet
from lightcc.tensorflow.reductions import allreduce


def install(keras: Any) -> None:
    """Has the LossScaleOptimizer of Keras 3 ask all ranks; that of Keras 2 has E.Optimizer aggregate the gradients."""
    if hasattr(keras.optimizers, "LossScaleOptimizer"):
        patches.install(keras)
        wrap(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)


def finite_everywhere(grads: Sequence[Any], process_sets: Iterable[ProcessSet]) -> tf.Tensor:
    """A bool: whether all these gradients are finite, on all ranks of these sets. Four bytes for each set.

    >>> from lightcc.core.process_sets import global_process_set
    >>> bool(finite_everywhere([tf.constant([1.0, 2.0]), None], [global_process_set]))
    True
    """
    finite = [tf.reduce_all(tf.math.is_finite(values)) for values in values_of(grads)]
    wrong = tf.cast(tf.logical_not(tf.reduce_all(finite or [True])), tf.int32)
    for process_set in {id(one): one for one in process_sets if one.included()}.values():
        wrong = allreduce(wrong, op=ReduceOps.Max, name="lightcc.embedding.finite", process_set=process_set)
    return tf.equal(wrong, 0)


def values_of(grads: Sequence[Any]) -> List[tf.Tensor]:
    """Of gradients, dense or not, those that are there.

    >>> [values.numpy().tolist() for values in values_of([None, tf.constant([1.0])])]
    [[1.0]]
    """
    return [grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
            for grad in grads if grad is not None]


def _check_finite(plain):
    def check_finite(self, grads):
        both = tables_in(self)
        return plain(self, grads) if both is None else finite_everywhere(grads, both.process_sets)
    return check_finite

"""check_weights: whether the ranks hold the same variables, of TensorFlow; and where that is asked as training runs."""
import warnings
from typing import Any, List, Sequence

import numpy as np
import tensorflow as tf

from lightcc.core import lib, weights
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.wrapper_arguments import stays_here

_COUNT = "_lightcc_exchanges"  # an attribute of a variable: of all tapes and traces that exchange its gradient


def check_weights(variables: Sequence[Any], process_set: ProcessSet = global_process_set) -> None:
    """Compares the variables of all ranks, bit by bit, by digests of 8 bytes. All ranks of the set must call it,
    between steps, with the same variables in the same order.

    variables: tf.Variable or Keras variables, such as model.trainable_variables (others differ where batch
    normalisation is each rank's own); tensors; or numpy arrays, as session.run(variables) returns them. Any dtype but
    strings. HOROVOD_CHECK_WEIGHTS=n has DistributedGradientTape and the DistributedOptimizers of Keras compare theirs
    every n exchanges of gradients, but not in graphs of TensorFlow 1 (docs/troubleshooting.md).

    Errors: RuntimeError on all ranks, with the variables that differ and the ranks that hold the same, and in a graph;
    those of allgather.

    >>> hvd.check_weights([tf.Variable([1.0, 2.0])])
    """
    if not tf.executing_eagerly():
        raise RuntimeError("check_weights compares values, and a graph is being built here: call it between steps; in "
                           "a session with session.run(variables).")
    if not stays_here(process_set):
        _compare(variables, "check_weights", process_set)


def compared(grads: List[Any], variables: Sequence[Any], process_set: ProcessSet) -> List[Any]:
    """The reduced gradients of variables; every HOROVOD_CHECK_WEIGHTS exchanges once the ranks have compared these. In
    a graph that is a part of it, which runs when all gradients are there and before any is applied."""
    if not weights.asked() or stays_here(process_set):
        return grads
    variables = [v for v in variables if isinstance(getattr(v, "_value", v), tf.Variable)]
    if not variables:
        return grads
    if not tf.compat.v1.executing_eagerly_outside_functions():
        if lib.rank() == 0:
            warnings.warn("HOROVOD_CHECK_WEIGHTS: in a graph of TensorFlow 1 weights are not compared as training "
                          "runs; call hvd.check_weights(session.run(variables)) between steps.", stacklevel=2)
        return grads
    exchanges = _exchanges_of(variables[0])

    def compare_if_due() -> None:
        if exchange := exchanges.due():
            _compare(variables, weights.at(exchange), process_set)

    if tf.executing_eagerly():
        compare_if_due()
        return grads
    with tf.control_dependencies([getattr(grad, "values", grad) for grad in grads if grad is not None]):
        done = tf.py_function(compare_if_due, [], [])
    with tf.control_dependencies([done]):
        return [grad if grad is None else _behind(grad) for grad in grads]


def _behind(grad: Any) -> Any:
    """The same gradient, behind what the control dependencies are."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)
    return tf.identity(grad)


def _exchanges_of(variable: Any) -> weights.Exchanges:
    inner = getattr(variable, "_value", variable)
    if not hasattr(inner, _COUNT):
        setattr(inner, _COUNT, weights.Exchanges())
    return getattr(inner, _COUNT)


def _compare(variables: Sequence[Any], when: str, process_set: ProcessSet) -> None:
    arrays = [np.asarray(v.numpy() if hasattr(v, "numpy") else v) for v in variables]
    weights.compare_in_order(variables, list(map(weights.digest_of, arrays)), when, process_set)

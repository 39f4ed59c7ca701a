"""The three ways in which TensorFlow runs a function, for checks on ranks: arrays in, arrays out."""
from collections import namedtuple

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
Slices = namedtuple("Slices", "values, indices, dense_shape")


def eager(function, *arrays):
    return _arrays(function(*map(tf.constant, arrays)))


def traced(function, *arrays):
    """In a tf.function that knows no shapes."""
    known = [tf.TensorSpec([None] * np.ndim(array), np.asarray(array).dtype) for array in arrays]
    return _arrays(tf.function(function, input_signature=known)(*map(tf.constant, arrays)))


def session(function, *arrays):
    """In a v1 graph that knows no shapes."""
    with tf.Graph().as_default(), v1.Session() as running:
        fed = {v1.placeholder(np.asarray(array).dtype, [None] * np.ndim(array)): array for array in arrays}
        fetched = function(*fed)
        running.run(v1.global_variables_initializer())
        return running.run(fetched, fed)


def _arrays(results):
    """What session.run would make of it."""
    if isinstance(results, (list, tuple)):
        return [_arrays(result) for result in results]
    if isinstance(results, tf.IndexedSlices):
        return Slices(*map(_arrays, (results.values, results.indices, results.dense_shape)))
    return results if results is None else results.numpy()


MODES = {"eager": eager, "function": traced, "session": session}

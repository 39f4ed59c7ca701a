"""Gradients of zero that are like others: what a rank without data sends in a step that other ranks make."""
from typing import Any, NamedTuple, Optional

import tensorflow as tf


class Like(NamedTuple):
    """The dtype of a gradient; and of its indices, if it is a tf.IndexedSlices."""

    dtype: Any
    indices: Any = None


def like(grad: Any) -> Optional[Like]:
    """What a gradient is like; None for None.

    >>> like(tf.constant([1.0])).dtype.name
    'float32'
    """
    if grad is None:
        return None
    return Like(grad.dtype, grad.indices.dtype if isinstance(grad, tf.IndexedSlices) else None)


def zero(kind: Optional[Like], variable: Any) -> Any:
    """A gradient of a variable.

    >>> zero(like(tf.constant([1.0])), tf.Variable([3.0, 4.0])).numpy().tolist()
    [0.0, 0.0]
    """
    if kind is None:
        return None
    if kind.indices is None:
        return tf.zeros(variable.shape, kind.dtype)
    shape = tuple(variable.shape)
    return tf.IndexedSlices(tf.zeros((0, *shape[1:]), kind.dtype), tf.zeros([0], kind.indices),
                            tf.constant(shape, kind.indices))

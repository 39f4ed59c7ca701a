"""Ids as tensors, and the keys that they are for a table: integers as they are, strings by their hash."""
from typing import Any, NamedTuple, Tuple

import tensorflow as tf

from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.library import operations

_INTEGERS = (tf.int64, tf.int32, tf.int16, tf.int8, tf.uint8, tf.uint16, tf.uint32)


class Keys(NamedTuple):
    """keys: int64, one-dimensional. checks: int32, as many, of a table of strings; else empty."""

    keys: tf.Tensor
    checks: tf.Tensor


def tensor_of(ids: Any, table: Table) -> tf.Tensor:
    """Ids of any shape as a tensor of integers or of strings.

    Errors: ValueError for floats, bools and the like, and for strings where integers are due or the other way round.

    >>> from lightcc import embedding
    >>> tensor_of([[3, 5]], embedding.Table("user", 4)).shape
    TensorShape([1, 2])
    """
    try:
        ids = tf.convert_to_tensor(ids)
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {table.name!r}: the ids are no tensor of integers or strings: {error}") from None
    if ids.dtype != tf.string and ids.dtype not in (*_INTEGERS, tf.uint64):
        raise ValueError(f"table {table.name!r}: the ids are {ids.dtype.name}; a key is an integer or a string.")
    if (ids.dtype == tf.string) != table.strings:
        raise ValueError(f"table {table.name!r} is for {'strings' if table.strings else 'integers'}, and the ids are "
                         f"{ids.dtype.name}.")
    return ids


def keys_of(ids: tf.Tensor, table: Table) -> Keys:
    """Of what tensor_of returns, in one dimension.

    >>> from lightcc import embedding
    >>> keys_of(tf.constant([[3, 5]]), embedding.Table("user", 4)).keys.numpy()
    array([3, 5])
    """
    flat = tf.reshape(ids, [-1])
    with tf.device("CPU:0"):
        if table.strings:
            return Keys(*operations.lightcc_embedding_hash(flat))
        keys = tf.bitcast(flat, tf.int64) if flat.dtype == tf.uint64 else tf.cast(flat, tf.int64)
        return Keys(keys, tf.zeros([0], tf.int32))


def joined(parts: Tuple[Keys, ...]) -> Keys:
    """Those of several lookups, one behind the other.

    >>> one = Keys(tf.constant([3], tf.int64), tf.zeros([0], tf.int32)); joined((one, one)).keys.numpy()
    array([3, 3])
    """
    if len(parts) == 1:
        return parts[0]
    return Keys(tf.concat([part.keys for part in parts], 0), tf.concat([part.checks for part in parts], 0))

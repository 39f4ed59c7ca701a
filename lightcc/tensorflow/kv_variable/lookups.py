"""Lookups by TFPlus's names. Each is one exchange, which all ranks take part in."""
from typing import Any, Optional

import tensorflow as tf

from lightcc.tensorflow.embedding.keys import keys_of, tensor_of
from lightcc.tensorflow.embedding.leaf import Leaf, Rows, leaf_of, look_up
from lightcc.tensorflow.kv_variable import ordering

_SEGMENTS = {"sum": tf.sparse.segment_sum, "mean": tf.sparse.segment_mean, "sqrtn": tf.sparse.segment_sqrt_n}


def embedding_lookup(params: Any, ids: Any, partition_strategy: str = "mod", name: Optional[str] = None,
                     validate_indices: bool = True, max_norm: Optional[float] = None,
                     training: Any = True) -> tf.Tensor:
    """The rows of ids, of shape ids.shape + (dim,).

    params: a kv variable, or a list of one; any other variable is looked up by tf.compat.v1.nn. ids: integers or
    strings, as the variable's key_dtype is, of any shape. max_norm: rows that are longer are scaled down to it.
    partition_strategy, validate_indices: TFPlus's, without effect here. training: a bool or a tensor of one; False: no
    gradient may come; TFPlus does not have it.
    Errors: ValueError for floats and for ids of another kind than the variable's keys, and for a list of several; those
    of lightcc.tensorflow.embedding.HashEmbedding. Source: tfplus.kv_variable.python.ops.embedding_ops.

    >>> from lightcc.tensorflow import kv_variable as kv
    >>> user = kv.get_kv_variable("buyer", embedding_dim=4, initializer=tf.zeros_initializer())
    >>> embedding_lookup(user, tf.constant([[1 << 60, -5]])).shape
    TensorShape([1, 2, 4])
    """
    leaf = _leaf(params)
    if leaf is None:
        return tf.compat.v1.nn.embedding_lookup(params, ids, partition_strategy, name, validate_indices, max_norm)
    with tf.compat.v1.name_scope(name, "embedding_lookup"):
        ids = tensor_of(ids, leaf.table)
        rows = _rows(leaf, ids, max_norm, training)
        found = tf.gather(rows.values, rows.inverse)
        return _shaped(found, tf.shape(ids), ids.shape, leaf.table.dim)


def embedding_lookup_sparse(params: Any, sp_ids: tf.SparseTensor, sp_weights: Optional[tf.SparseTensor],
                            partition_strategy: str = "mod", name: Optional[str] = None, combiner: Optional[str] = None,
                            max_norm: Optional[float] = None, training: Any = True) -> tf.Tensor:
    """The rows of each row of a sparse tensor, combined to one: a tensor of as many rows as the last that has ids.

    sp_weights: as sp_ids, one weight an id; None: all are 1. combiner: "sum"; "mean", which None stands for: the sum
    by that of the weights; "sqrtn": by the root of that of their squares. Others: those of embedding_lookup.
    Errors: TypeError for what is no tf.SparseTensor; ValueError for another combiner; those of embedding_lookup.

    >>> from lightcc.tensorflow import kv_variable as kv
    >>> user = kv.get_kv_variable("seller", embedding_dim=2, initializer=tf.ones_initializer())
    >>> bags = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], [7, 9, 7], [3, 2])
    >>> embedding_lookup_sparse(user, bags, None, combiner="sum").numpy()[:, 0].tolist()
    [2.0, 0.0, 1.0]
    """
    leaf = _leaf(params)
    if leaf is None:
        return tf.compat.v1.nn.embedding_lookup_sparse(params, sp_ids, sp_weights, partition_strategy, name, combiner,
                                                       max_norm)
    combiner = _checked(sp_ids, sp_weights, combiner or "mean")
    with tf.compat.v1.name_scope(name, "embedding_lookup_sparse"):
        return _combined(leaf, sp_ids, sp_weights, combiner, max_norm, None, training)


def safe_embedding_lookup_sparse(embedding_weights: Any, sparse_ids: tf.SparseTensor,
                                 sparse_weights: Optional[tf.SparseTensor] = None, combiner: Optional[str] = "mean",
                                 default_id: Any = None, name: Optional[str] = None, partition_strategy: str = "div",
                                 max_norm: Optional[float] = None, training: Any = True) -> tf.Tensor:
    """embedding_lookup_sparse of ids of any number of dimensions, whose last is combined, and where nothing may be:
    such a row is that of default_id, or zero without one.

    Ids with a weight of 0 or below are left out, but for a sum. Negative ids are keys as any other. Arguments and
    errors: those of embedding_lookup_sparse.

    >>> from lightcc.tensorflow import kv_variable as kv
    >>> user = kv.get_kv_variable("author", embedding_dim=2, initializer=tf.ones_initializer())
    >>> bags = tf.SparseTensor([[0, 0, 0], [1, 1, 0]], [7, 9], [2, 3, 2])
    >>> safe_embedding_lookup_sparse(user, bags).numpy()[..., 0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    leaf = _leaf(embedding_weights)
    if leaf is None:
        return tf.compat.v1.nn.safe_embedding_lookup_sparse(
            embedding_weights, sparse_ids, sparse_weights, combiner, default_id, name, partition_strategy, max_norm)
    combiner = _checked(sparse_ids, sparse_weights, combiner or "mean")
    with tf.compat.v1.name_scope(name, "safe_embedding_lookup_sparse"):
        outer, known = sparse_ids.dense_shape[:-1], sparse_ids.shape[:-1]
        count = tf.reduce_prod(outer)
        shape = tf.stack([count, sparse_ids.dense_shape[-1]])
        ids = tf.sparse.reshape(sparse_ids, shape)
        weights = None if sparse_weights is None else tf.SparseTensor(ids.indices, sparse_weights.values, shape)
        if weights is not None and combiner != "sum":
            kept = weights.values > 0
            ids, weights = tf.sparse.retain(ids, kept), tf.sparse.retain(weights, kept)
        if default_id is not None:
            ids, _ = tf.sparse.fill_empty_rows(ids, tf.cast(default_id, ids.dtype))
            if weights is not None:
                weights, _ = tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))
        rows = _combined(leaf, ids, weights, combiner, max_norm, count, training)
        return _shaped(rows, outer, known, leaf.table.dim)


def _leaf(params: Any) -> Optional[Leaf]:
    """The leaf of a kv variable; None for other variables."""
    several = list(params) if isinstance(params, (list, tuple)) else [params]
    leaves = [leaf_of(one) for one in several]
    if len(several) > 1 and any(leaf is not None for leaf in leaves):
        raise ValueError("params: give one kv variable, whose rows are spread over the ranks as they are, not a list.")
    return leaves[0] if leaves else None


def _rows(leaf: Leaf, ids: tf.Tensor, max_norm: Optional[float], training: Any) -> Rows:
    keys = keys_of(ids, leaf.table)
    with ordering.after_earlier(ids):
        rows, = look_up([(leaf, keys)], training)
    ordering.remember(rows.values, ids)
    return rows if max_norm is None else rows._replace(values=tf.clip_by_norm(rows.values, max_norm, axes=[1]))


def _checked(ids: Any, weights: Any, combiner: str) -> str:
    if combiner not in _SEGMENTS:
        raise ValueError(f"combiner={combiner!r}; give one of {', '.join(map(repr, _SEGMENTS))}.")
    if not isinstance(ids, tf.SparseTensor):
        raise TypeError(f"ids are a tf.SparseTensor here, not a {type(ids).__name__}.")
    if weights is not None and not isinstance(weights, tf.SparseTensor):
        raise TypeError(f"weights are None or a tf.SparseTensor, not a {type(weights).__name__}.")
    return combiner


def _combined(leaf: Leaf, ids: tf.SparseTensor, weights: Optional[tf.SparseTensor], combiner: str,
              max_norm: Optional[float], count: Optional[tf.Tensor], training: Any) -> tf.Tensor:
    """count: of the bags; None: up to the last that has ids."""
    rows = _rows(leaf, tensor_of(ids.values, leaf.table), max_norm, training)
    bags = ids.indices[:, 0]
    if weights is None:
        combined = _SEGMENTS[combiner](rows.values, rows.inverse, bags, num_segments=count)
    else:
        if count is None:
            count = tf.reduce_max(tf.concat([bags, [-1]], 0)) + 1
        combined = _weighted(rows, tf.cast(weights.values, rows.values.dtype), bags, combiner, count)
    return tf.ensure_shape(combined, [None, leaf.table.dim])


def _weighted(rows: Rows, weights: tf.Tensor, bags: tf.Tensor, combiner: str, count: tf.Tensor) -> tf.Tensor:
    weights = weights[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(tf.gather(rows.values, rows.inverse) * weights, bags, count)
    if combiner == "sum":
        return sums
    if combiner == "mean":
        return tf.math.divide_no_nan(sums, tf.math.unsorted_segment_sum(weights, bags, count))
    return tf.math.divide_no_nan(sums, tf.sqrt(tf.math.unsorted_segment_sum(weights * weights, bags, count)))


def _shaped(rows: tf.Tensor, outer: tf.Tensor, known: tf.TensorShape, dim: int) -> tf.Tensor:
    shaped = tf.reshape(rows, tf.concat([tf.cast(outer, tf.int64), [dim]], 0))
    return tf.ensure_shape(shaped, known.concatenate([dim]))

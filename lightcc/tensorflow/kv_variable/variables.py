"""get_kv_variable: a table by its name, and the variable by which graphs, scopes and optimizers know it.

A table is there once in a process: all graphs that ask for its name share its rows, and it stays until it is closed,
as graphs go at other times on other ranks.
"""
import logging
from typing import Any, Dict

import tensorflow as tf

from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.leaf import Leaf, leaf_of
from lightcc.tensorflow.embedding.modules import table_of as new_table
from lightcc.tensorflow.kv_variable.initial import first_values

_KEYS = (tf.int64, tf.int32, tf.string)
_logger = logging.getLogger("lightcc")
_tables: Dict[str, Table] = {}
_eager: Dict[str, Any] = {}
_has_warned = False


def get_kv_variable(name: str, embedding_dim: Any = None, key_dtype: Any = tf.int64, value_dtype: Any = tf.float32,
                    initializer: Any = None, regularizer: Any = None, trainable: Any = None, collections: Any = None,
                    partitioner: Any = None, constraint: Any = None, enter_threshold: int = 0,
                    kv_options: Any = None) -> Any:
    """A table as a variable without values, of shape (0, embedding_dim), which embedding_lookup and the optimizers of
    this package take.

    name: with the scope's, it names the table; the same on all ranks. In a graph, scopes and their reuse act as for
    tf.compat.v1.get_variable; eagerly the same name gives the same variable. embedding_dim: elements of a row.
    key_dtype: tf.int64, tf.int32 or tf.string. value_dtype: tf.float32 or tf.float64. initializer: zeros, ones, a
    constant, normal or uniform. trainable, collections: as for get_variable. enter_threshold: a key gets a row when it
    has occurred so often in lookups that were trained (min_count); before, it reads as zero. partitioner: ignored with
    one warning, as rows are spread over the ranks anyway.

    Errors: ValueError before init, for a name that has another dim, kind of key, dtype, initializer or threshold
    already, in this graph or another one, for other dtypes and initializers, and for regularizer, constraint and
    kv_options, which rows do not have. Source: tfplus.get_kv_variable.

    >>> user = get_kv_variable("viewer", embedding_dim=4, key_dtype=tf.int64, initializer=tf.zeros_initializer())
    >>> user.shape
    TensorShape([0, 4])
    """
    for what, given in (("regularizer", regularizer), ("constraint", constraint), ("kv_options", kv_options)):
        if given is not None:
            raise ValueError(f"kv variable {name!r}: rows have no {what}; leave it out.")
    scope = tf.compat.v1.get_variable_scope()
    _warn_of(partitioner if partitioner is not None else scope.partitioner)
    full_name = f"{scope.name}/{name}" if scope.name else name
    dtype = tf.as_dtype(value_dtype)
    init, seed = first_values(initializer, full_name)
    table = _table(full_name, dim=_dim_of(embedding_dim, full_name), dtype=dtype.name, init=init, seed=seed,
                   strings=_is_string(key_dtype, full_name), min_count=_count(enter_threshold, full_name))
    with tf.init_scope():
        if tf.executing_eagerly():
            return _eager_variable(table, dtype, trainable is not False)
    variable = _graph_variable(scope, name, table, dtype, trainable is not False, collections)
    if leaf_of(variable) is None:
        Leaf(table, variable)
    return variable


def table_of(variable: Any) -> Table:
    """The table of a kv variable: lightcc.embedding.Table. Its close() frees rows and name. ValueError for another
    variable.

    >>> table_of(get_kv_variable("reader", embedding_dim=4)).stats()["rows"]
    0
    """
    leaf = leaf_of(variable)
    if leaf is None:
        raise ValueError(f"{variable!r} is no kv variable.")
    return leaf.table


def _table(name: str, **options: Any) -> Table:
    table = _tables.get(name)
    if table is None or table.is_closed:
        table = _tables[name] = new_table(name, None, **options)
        return table
    for what, given in options.items():
        if getattr(table, what) != given:
            raise ValueError(f"kv variable {name!r} has {what}={getattr(table, what)!r} already, and cannot get "
                             f"{given!r}.")
    return table


def _eager_variable(table: Table, dtype: tf.DType, trainable: bool) -> tf.Variable:
    variable = _eager.get(table.name)
    leaf = leaf_of(variable)
    if leaf is None or leaf.table is not table:
        variable = tf.Variable(tf.zeros([0, table.dim], dtype), name=table.name, trainable=trainable)
        Leaf(table, variable)
        _eager[table.name] = variable
    return variable


def _graph_variable(scope: Any, name: str, table: Table, dtype: tf.DType, trainable: bool, collections: Any) -> Any:
    """As get_variable makes it, which must not split it by the scope's partitioner."""
    partitioner = scope.partitioner
    scope.set_partitioner(None)
    try:
        return tf.compat.v1.get_variable(
            name, shape=[0, table.dim], dtype=dtype, initializer=tf.compat.v1.zeros_initializer(), trainable=trainable,
            collections=collections, regularizer=tf.compat.v1.no_regularizer, use_resource=True)
    finally:
        scope.set_partitioner(partitioner)


def _dim_of(embedding_dim: Any, name: str) -> int:
    try:
        dims = tf.TensorShape(embedding_dim).as_list()
    except (TypeError, ValueError):
        dims = []
    if len(dims) != 1 or not dims[0]:
        raise ValueError(f"kv variable {name!r}: embedding_dim={embedding_dim!r} is no number of at least 1.")
    return dims[0]


def _is_string(key_dtype: Any, name: str) -> bool:
    dtype = tf.as_dtype(key_dtype)
    if dtype not in _KEYS:
        raise ValueError(f"kv variable {name!r}: key_dtype={dtype.name}; keys are int64, int32 or string.")
    return dtype == tf.string


def _count(enter_threshold: int, name: str) -> int:
    if enter_threshold < 0:
        raise ValueError(f"kv variable {name!r}: enter_threshold={enter_threshold} is negative.")
    return max(1, enter_threshold)


def _warn_of(partitioner: Any) -> None:
    global _has_warned
    if partitioner is not None and not _has_warned:
        _has_warned = True
        _logger.warning("get_kv_variable: a partitioner is ignored: rows are spread over the ranks.")

"""HashEmbedding, a module whose rows are in a table, and lookups of several such modules in one exchange."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.initializers import Initializer, Normal
from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.keys import keys_of, tensor_of
from lightcc.tensorflow.embedding.leaf import Leaf, look_up
from lightcc.tensorflow.embedding.saving import TableState

_DEFAULT = Normal(0, 0.01)


def table_of(name: str, evict: Any, **options: Any) -> Table:
    """A table for TensorFlow. ValueError in the scope of a tf.distribute.Strategy, and those of Table."""
    if tf.distribute.has_strategy():
        raise ValueError(f"table {name!r}: it is made in the scope of a {type(tf.distribute.get_strategy()).__name__}, "
                         "which would copy it for each of its replicas. A table is spread over lightcc's ranks, one "
                         "process each: start them with lightccrun, and make the model without a strategy.")
    return Table(name, evict=evict, **options)


class HashEmbedding(tf.Module):
    """Rows of a table by id: any 64-bit integer or string is a key, and no size is given.

    A row is born when it is first trained; until then its key reads as the initializer's value for it, which is the
    same on any number of ranks. trainable_variables has one variable for the table, without values, and optimizers of
    this package take its gradient.

    dim: elements of a row, at least 1. name: of the table, the same on all ranks, and no other live table's.
    init: Normal(mean, std) (default: 0, 0.01), Uniform, Constant, Zeros. dtype: tf.float32 (default) or tf.float64.
    seed: of the initializer. process_set: the ranks that the rows are spread over and that look up, all of them in the
    same order. wire: "float16" or "bfloat16": rows travel as these; None: as they are. strings: ids are strings, not
    integers. limit_bytes: most memory of this rank's shard, 0 for no limit. min_count: a key gets a row when it has
    occurred so often in lookups that were trained, over all ranks; before, it reads as `absent` in each element.
    admission: Bloom(bytes, error), which counts in a fixed size; None: exactly.
    evict: which rows go at the end of a step: Ttl, Count, L2, Asking or a function, which a graph calls through
    tf.numpy_function. max_rows: most rows of all ranks, 0 for no limit; above it those go that were trained least
    recently.

    Called with ids, integers or strings of any shape, it returns ids.shape + (dim,) of dtype, in eager mode and in a
    tf.function. training: a bool or a tensor of one; False: an evaluation, after which no gradient may come.

    Errors: ValueError for floats as ids, a name in use, a process set without this rank, and in the scope of a
    tf.distribute.Strategy; tf.errors.FailedPreconditionError, on every rank, if ranks differ in the table's dim, dtype,
    init, seed or optimizer, or look up other tables; HorovodInternalError if a rank is lost.

    >>> from lightcc.tensorflow import embedding as E
    >>> user = E.HashEmbedding(16, name="user", init=E.Normal(0, 0.01))
    >>> user([[1 << 60, -5], [7, 7]]).shape
    TensorShape([2, 2, 16])
    """

    def __init__(self, dim: int, name: str, init: Initializer = _DEFAULT, *, dtype: Any = tf.float32, seed: int = 0,
                 process_set: ProcessSet = global_process_set, wire: Optional[str] = None, strings: bool = False,
                 limit_bytes: int = 0, min_count: int = 1, absent: float = 0.0, evict: Any = None, max_rows: int = 0,
                 admission: Optional[Bloom] = None):
        super().__init__()
        table = table_of(name, evict, dim=dim, dtype=tf.as_dtype(dtype).name, init=init, seed=seed,
                         process_set=process_set, wire=wire, strings=strings, limit_bytes=limit_bytes,
                         min_count=min_count, absent=absent, max_rows=max_rows, admission=admission)
        self._rows_of = tf.Variable(tf.zeros([0, dim], dtype), name="rows_of_a_table")
        self.leaf = Leaf(table, self._rows_of)
        self._rows_in_checkpoints = TableState(table)

    @property
    def table(self) -> Table:
        """The table itself: lightcc.embedding.Table."""
        return self.leaf.table

    def __call__(self, ids: Any, training: Any = True) -> tf.Tensor:
        return lookup([(self, ids)], training)[0]

    def stats(self) -> Dict[str, Any]:
        """What lightcc.embedding.Table.stats says of this rank's shard."""
        return self.table.stats()

    def __len__(self) -> int:
        """Rows of this rank's shard."""
        return len(self.table)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Any) -> bool:
        """Whether the key has a row in this rank's shard."""
        return key in self.table


def lookup(requests: Sequence[Tuple[Any, Any]], training: Any = True) -> List[tf.Tensor]:
    """Looks up several modules' ids in one exchange, which all ranks take part in, and returns their rows.

    requests: (module, ids). The same modules in the same order on all ranks of the tables' process set; ids may be any
    number, also none. A module may come twice. training, results and errors: those of HashEmbedding.

    >>> from lightcc.tensorflow import embedding as E
    >>> user, item = E.HashEmbedding(4, name="user"), E.HashEmbedding(8, name="item")
    >>> users, items = E.lookup([(user, [1, 2]), (item, [[5], [6]])]); users.shape, items.shape
    (TensorShape([2, 4]), TensorShape([2, 1, 8]))
    """
    tensors = [tensor_of(ids, module.leaf.table) for module, ids in requests]
    wanted = [(module.leaf, keys_of(ids, module.leaf.table)) for (module, _), ids in zip(requests, tensors)]
    return [_shaped(tf.gather(rows.values, rows.inverse), ids)
            for rows, ids in zip(look_up(wanted, training), tensors)]


def _shaped(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """One row an id, as the ids are shaped."""
    shaped = tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
    return tf.ensure_shape(shaped, ids.shape.concatenate(rows.shape[1:]))

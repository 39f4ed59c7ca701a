"""What TensorFlow sees of a table: a trainable variable without values, whose gradient is that of the rows that were
looked up since.

The rows themselves are in lightcc.embedding's table, spread over the ranks. A lookup is an operation on the variable,
so tapes and models find it among what is to be trained; its gradient is a tf.IndexedSlices: values are the rows of one
lookup, or of several one behind the other, and indices say of which.
"""
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.keys import Keys, joined
from lightcc.tensorflow.embedding.library import number_of, operations, run

_MARK = "_lightcc_leaf"


class Leaf:
    """A table and its variable, of shape (0, dim), which belongs to whoever tracks it: a module or a layer."""

    def __init__(self, table: Table, variable: Any):
        self.table, self.variable, self.number = table, variable, number_of(table)
        setattr(variable, _MARK, self)

    def read(self) -> tf.Tensor:
        """Its variable as a tensor, by which a tape comes to watch it."""
        return tf.convert_to_tensor(self.variable)


def leaf_of(variable: Any) -> Optional[Leaf]:
    """The leaf that a variable is of; None for any other variable.

    >>> leaf_of(tf.Variable(1.0)) is None
    True
    """
    return getattr(variable, _MARK, None)


def tables(model: Any) -> List[Table]:
    """The tables of a model, for lightcc.embedding.save, load, export and the like; in the order of its variables.

    model: a tf.Module, a Keras layer that is built, or a model.

    >>> from lightcc import embedding; from lightcc.tensorflow import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); embedding.export(lambda table, columns: None, E.tables(user))
    0
    """
    leaves = [leaf_of(variable) for variable in model.trainable_variables]
    return list({leaf.number: leaf.table for leaf in leaves if leaf is not None}.values())


class Rows(NamedTuple):
    """values: (at least as many as there are different keys, dim), rounded up to 2^k or 1.5 * 2^k, zero behind those.
    inverse: int64, the row of each key."""

    values: tf.Tensor
    inverse: tf.Tensor


def look_up(wanted: Sequence[Tuple[Leaf, Keys]], training: Any) -> List[Rows]:
    """Looks the keys of several tables up in one exchange, which all ranks of their process set take part in. A table
    may come more than once. training: a bool or a tensor of one: gradients are to come."""
    of_table: "dict[int, List[int]]" = {}
    for i, (leaf, _) in enumerate(wanted):
        of_table.setdefault(leaf.number, []).append(i)
    of_group: "dict[int, List[List[int]]]" = {}
    for indices in of_table.values():
        of_group.setdefault(id(wanted[indices[0]][0].table.group), []).append(indices)
    found: "List[Any]" = [None] * len(wanted)
    for several in of_group.values():
        leaves = [wanted[indices[0]][0] for indices in several]
        parts = [tuple(wanted[i][1] for i in indices) for indices in several]
        for indices, own, rows in zip(several, parts, _exchange(leaves, [joined(one) for one in parts], training)):
            for i, inverse in zip(indices, _split(rows.inverse, own)):
                found[i] = Rows(rows.values, inverse)
    return found


def _split(inverse: tf.Tensor, parts: Tuple[Keys, ...]) -> List[tf.Tensor]:
    if len(parts) == 1:
        return [inverse]
    return tf.split(inverse, tf.stack([tf.size(part.keys) for part in parts]), num=len(parts))


def _exchange(leaves: List[Leaf], keys: List[Keys], training: Any) -> List[Rows]:
    rows, inverse, _ = run(
        operations.lightcc_embedding_lookup, [leaf.read() for leaf in leaves], [one.keys for one in keys],
        [one.checks for one in keys], tf.cast(training, tf.bool), tables=" ".join(str(leaf.number) for leaf in leaves))
    return [Rows(*one) for one in zip(rows, inverse)]


@tf.RegisterGradient("LightccEmbeddingLookup")
def _gradient(op, *grads):
    """For each leaf the gradients of its rows, each with the lookup's token as its index."""
    count = op.get_attr("N")

    def of_leaf(i):
        if grads[i] is None:
            return None
        values = tf.convert_to_tensor(grads[i])
        tokens = tf.fill([tf.shape(values)[0]], op.outputs[2 * count + i])
        return tf.IndexedSlices(values, tokens, dense_shape=tf.shape(op.inputs[i]))
    return [of_leaf(i) for i in range(count)] + [None] * (len(op.inputs) - count)


tf.no_gradient("LightccEmbeddingUpdate")
tf.no_gradient("LightccEmbeddingHash")

"""A layer's inputs (dense, ragged or sparse ids) as keys, and the rows of these as the layer's output: one row an id,
or one combined row a bag of ids."""
from typing import Any, Optional

import tensorflow as tf

from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.keys import Keys, keys_of, tensor_of
from lightcc.tensorflow.embedding.leaf import Rows

COMBINERS = {"sum": tf.math.unsorted_segment_sum, "mean": tf.math.unsorted_segment_mean,
             "sqrtn": tf.math.unsorted_segment_sqrt_n}


class Ids:
    """The ids of one call of a layer.

    inputs: a dense, ragged or sparse tensor. combiner: None, sum, mean or sqrtn; the bags are the last dimension. mask:
    None, or bool of the shape of dense inputs; what is False is left out, and without a combiner zero.
    Attribute flat: those that are looked up, in a tensor.
    Errors: ValueError for sparse ids without a combiner, for dense ones of one dimension with one, for a mask of
    another shape or beside ragged or sparse ids, and those of tensor_of.
    """

    def __init__(self, inputs: Any, combiner: Optional[str], mask: Any, table: Table):
        self._combiner, self._mask, self._inputs, self._table = combiner, mask, inputs, table
        if isinstance(inputs, tf.SparseTensor):
            self._expect(combiner is not None, "sparse ids need a combiner: sum, mean or sqrtn")
            self.flat = _checked(inputs.values, table)
        elif isinstance(inputs, tf.RaggedTensor):
            self.flat = _checked(inputs.flat_values, table)
        else:
            self._inputs = _checked(inputs, table)
            self.flat = self._inputs
            self._expect(combiner is None or self._inputs.shape.rank != 1,
                         f"combiner={combiner!r} combines the last of at least two dimensions of ids")
            if mask is not None:
                self._expect(self._inputs.shape.is_compatible_with(mask.shape),
                             f"the mask has the shape {mask.shape}, the ids {self._inputs.shape}")
                self.flat = tf.boolean_mask(self._inputs, mask)
            return
        self._expect(mask is None, "a mask goes with dense ids; leave ids out of ragged and sparse ones")
        self._expect(combiner is None or inputs.shape.rank == 2, "ragged and sparse ids have two dimensions for a "
                                                                 f"combiner, not {inputs.shape.rank}")

    def keys(self) -> Keys:
        """What is looked up."""
        return keys_of(self.flat, self._table)

    def rows_spec(self) -> Any:
        """What holds one row an id, as the ids are shaped; sparse ids have ragged rows."""
        shape, dtype = self._inputs.shape.concatenate([self._table.dim]), self._table.dtype
        if isinstance(self._inputs, tf.Tensor):
            return tf.TensorSpec(shape, dtype)
        return tf.RaggedTensorSpec(shape, dtype, getattr(self._inputs, "ragged_rank", 1))

    def output_of(self, rows: Any) -> Any:
        """output() of rows that are given, as rows_spec says, and not looked up. Of the ids themselves nothing is read,
        and of a mask what it leaves out."""
        is_dense = isinstance(rows, tf.Tensor)
        flat = rows if is_dense else rows.flat_values
        places = tf.zeros(tf.shape(flat)[:-1], tf.string if self._table.strings else tf.int64)
        places = tf.ensure_shape(places, flat.shape[:-1])
        ids = Ids(places if is_dense else rows.with_flat_values(places), self._combiner, self._mask, self._table)
        values = flat if self._mask is None else tf.boolean_mask(flat, self._mask)
        values = tf.reshape(values, [-1, self._table.dim])
        return ids.output(Rows(values, tf.range(tf.shape(values)[0])))

    def output(self, rows: Rows) -> Any:
        """What the layer returns: a tensor, or for ragged ids without a combiner a ragged one."""
        of_ids = tf.gather(rows.values, rows.inverse)
        if self._combiner is not None:
            combined = COMBINERS[self._combiner](of_ids, self._bags(), self._bag_count())
            return self._shaped(combined, self._shape()[:-1], self._inputs.shape[:-1])
        if isinstance(self._inputs, tf.RaggedTensor):
            return self._inputs.with_flat_values(self._shaped(of_ids, tf.shape(self.flat), self.flat.shape))
        if self._mask is not None:
            places = tf.cast(tf.where(self._mask), tf.int64)
            shape = tf.concat([tf.shape(self._inputs, tf.int64), [self._table.dim]], 0)
            return tf.scatter_nd(places, of_ids, shape)
        return self._shaped(of_ids, self._shape(), self._inputs.shape)

    def _shape(self) -> tf.Tensor:
        if isinstance(self._inputs, tf.Tensor):
            return tf.shape(self._inputs, tf.int64)
        if isinstance(self._inputs, tf.SparseTensor):
            return self._inputs.dense_shape
        return tf.stack([self._inputs.nrows(tf.int64), 0])

    def _bag_count(self) -> tf.Tensor:
        return tf.reduce_prod(self._shape()[:-1])

    def _bags(self) -> tf.Tensor:
        """For each id the number of its bag."""
        if isinstance(self._inputs, tf.RaggedTensor):
            return self._inputs.value_rowids()
        if isinstance(self._inputs, tf.SparseTensor):
            return self._inputs.indices[:, 0]
        numbers = tf.reshape(tf.range(self._bag_count()), tf.concat([self._shape()[:-1], [1]], 0))
        numbers = tf.broadcast_to(numbers, self._shape())
        return tf.reshape(numbers, [-1]) if self._mask is None else tf.boolean_mask(numbers, self._mask)

    def _shaped(self, rows: tf.Tensor, shape: tf.Tensor, known: tf.TensorShape) -> tf.Tensor:
        dim = self._table.dim
        shaped = tf.reshape(rows, tf.concat([tf.cast(shape, tf.int64), [dim]], 0))
        return tf.ensure_shape(shaped, known.concatenate([dim]))

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ValueError(f"table {self._table.name!r}: {otherwise}.")


def _checked(ids: Any, table: Table) -> tf.Tensor:
    if getattr(ids, "dtype", None) in (tf.float32, tf.float16, tf.bfloat16):
        raise ValueError(f"table {table.name!r}: the ids are {ids.dtype.name}. Keras makes floats of a model's inputs "
                         "whose dtype it is not told: begin the model with keras.Input(shape, "
                         f"dtype={'string' if table.strings else 'int64'!r}).")
    return tensor_of(ids, table)

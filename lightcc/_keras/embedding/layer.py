"""The layer Embedding, and Together, which several of them share for one exchange; for a Keras."""
import contextvars
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import tensorflow as tf

from lightcc._keras.embedding import formats, optimizer_config, refusals, saving, scaling
from lightcc._keras.embedding.bags import COMBINERS, Ids
from lightcc._keras.embedding.optimizer import of_config
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.eviction import Asking, policy_of
from lightcc.embedding.initializers import Initializer, Normal
from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.leaf import Leaf, look_up
from lightcc.tensorflow.embedding.modules import table_of
from lightcc.tensorflow.embedding.saving import TableState

_DEFAULT = Normal(0, 0.01)
_KEY_DTYPES = ("int64", "int32", "string")
_DTYPES = ("float32", "float64")


class HasTable:
    """What the layers of all Kerases have in common, beside keras.layers.Layer."""

    leaf: Leaf  # from build on

    @property
    def table(self) -> Table:
        """The table itself, lightcc.embedding.Table; the layer must be built."""
        return self.leaf.table


Source = Callable[[Sequence[Any], Sequence[Ids], Any], Iterable[Any]]


def from_tables(layers: Sequence[Any], ids: Sequence[Ids], training: Any) -> Iterable[Any]:
    """The outputs of layers, in one exchange."""
    every = look_up([(layer.leaf, one.keys()) for layer, one in zip(layers, ids)],
                    False if training is None else training)
    return [one.output(rows) for one, rows in zip(ids, every)]


source: "contextvars.ContextVar[Source]" = contextvars.ContextVar("source", default=from_tables)  # serving.py sets it


def outputs_of(layers: Sequence[Any], inputs: Sequence[Any], masks: Sequence[Any], training: Any) -> List[Any]:
    """Of layers that are built."""
    ids = [Ids(one, layer.combiner, mask, layer.table) for layer, one, mask in zip(layers, inputs, masks)]
    return [tf.cast(output, layer.compute_dtype) if output.dtype != layer.compute_dtype else output
            for layer, output in zip(layers, source.get()(layers, ids, training))]


def layer_class(keras: Any) -> type:
    """The class of the layer Embedding for a Keras: keras.layers.Layer is its base."""
    return _class_of(keras, "Embedding", _layer_class)


def together_class(keras: Any) -> type:
    """The class of the layer Together for a Keras."""
    return _class_of(keras, "Together", _together_class)


def _class_of(keras: Any, name: str, make: Callable[[Any], type]) -> type:
    """One for all packages that have this Keras, which finds it by its name in files."""
    key = keras.layers.Layer, name
    if key not in _classes:
        if all(layer is not keras.layers.Layer for layer, _ in _classes):
            _install(keras)
        _classes[key] = keras.utils.register_keras_serializable("lightcc", name)(make(keras))
    return _classes[key]


_classes: Dict[Tuple[type, str], type] = {}


def _install(keras: Any) -> None:
    """What Keras's own classes and functions must know of tables."""
    for part in (refusals, saving, formats, scaling):
        part.install(keras)
    optimizer_config.register(keras, of_config)


def _layer_class(keras: Any) -> type:
    is_keras3 = hasattr(keras, "ops")

    class Embedding(HasTable, keras.layers.Layer):
        """Rows of a table by id: any 64-bit integer or string is an id, and no size is given.

        A row is born when it is first trained; until then its id reads as the initializer's value for it. The model is
        compiled with E.Optimizer, since Keras's own optimizers would update every row.

        dim: elements of a row. key_dtype: "int64" (default), "int32" or "string", what ids are. combiner: None, one row
        an id; or "sum", "mean", "sqrtn" (the sum over the root of the number): one row for the ids of the last
        dimension, zero where there are none. init: Normal(mean, std) (default: 0, 0.01), Uniform, Constant, Zeros.
        min_count: an id gets a row when it has occurred so often in training, over all ranks; before, it reads as
        `absent` in each element. admission: Bloom(bytes, error), which counts in a fixed size; None: exactly. evict:
        which rows go at the end of a step: Ttl, Count, L2, Asking or a function, of which no config knows. max_rows:
        most rows of all ranks, 0 for no limit; above it those go that were trained least recently. name: of the layer
        and of its table, the same on all ranks, and no other live table's. dtype: the rows' is its variable dtype,
        float32 or float64. seed, process_set, wire, limit_bytes: those of lightcc.tensorflow.embedding.HashEmbedding.

        Called with ids: a dense tensor of any shape, a tf.RaggedTensor, or a tf.SparseTensor with a combiner. A model
        begins with keras.Input(shape, dtype=key_dtype), or Keras makes floats of its inputs, which are refused. mask:
        bool of the shape of dense ids, from a layer before or given; what is False is left out, and without a combiner
        zero.
        training: rows are trained; in fit it is so, in a tf.GradientTape say model(x, training=True).

        Errors: ValueError for a wrong argument, floats as ids, a name in use, a process set without this rank, and in
        the scope of a tf.distribute.Strategy. A lookup fails as that of HashEmbedding.
        """

        def __init__(self, dim: int, key_dtype: str = "int64", combiner: Optional[str] = None,
                     init: Initializer = _DEFAULT, min_count: int = 1, evict: Any = None, name: Optional[str] = None,
                     *, seed: int = 0, process_set: ProcessSet = global_process_set, wire: Optional[str] = None,
                     absent: float = 0.0, limit_bytes: int = 0, max_rows: int = 0,
                     admission: Optional[Bloom] = None, **options: Any):
            super().__init__(name=name, **options)
            if key_dtype not in _KEY_DTYPES:
                raise ValueError(f"Embedding {self.name!r}: key_dtype={key_dtype!r}; give {', '.join(_KEY_DTYPES)}.")
            if combiner is not None and combiner not in COMBINERS:
                raise ValueError(f"Embedding {self.name!r}: combiner={combiner!r}; give None, {', '.join(COMBINERS)}.")
            self.dim, self.key_dtype, self.combiner, self.supports_masking = dim, key_dtype, combiner, True
            self._table_options = {
                "init": init, "min_count": min_count, "evict": evict, "seed": seed, "process_set": process_set,
                "wire": wire, "absent": absent, "limit_bytes": limit_bytes, "max_rows": max_rows,
                "admission": admission, "strings": key_dtype == "string"}
            self.supports_jit = False  # for Keras 3: XLA cannot compile what talks to other processes

        def build(self, input_shape: Any = None) -> None:
            dtype = tf.as_dtype(self.variable_dtype).name
            if dtype not in _DTYPES:
                raise ValueError(f"Embedding {self.name!r}: rows of {dtype}; give the layer dtype='float32'.")
            with tf.init_scope():
                table = table_of(self.name, dim=self.dim, dtype=dtype, **self._table_options)
            autocast = {"autocast": False} if is_keras3 else {"experimental_autocast": False}
            variable = self.add_weight(name="rows_of_a_table", shape=(0, self.dim), dtype=dtype, initializer="zeros",
                                       trainable=True, **autocast)
            self.leaf = Leaf(table, variable)
            self.built = True
            self.rows_in_checkpoints = TableState(table)  # tf.train.Checkpoint may load the rows here

        def call(self, inputs: Any, mask: Any = None, training: Any = None) -> Any:
            return outputs_of([self], [inputs], [mask], training)[0]

        def get_config(self) -> Dict[str, Any]:
            """Of all but the rows, and limit_bytes and the like too. ValueError with a process set and with a function
            that evict= asks, which a file cannot name."""
            options = dict(self._table_options)
            process_set, asks = options.pop("process_set"), isinstance(policy_of(options["evict"], self.name), Asking)
            if process_set is not global_process_set or asks:
                what = "function of evict=" if asks else "process set"
                raise ValueError(f"Embedding {self.name!r}: a config cannot name its {what}. Make the model as before, "
                                 "and use save_weights and load_weights.")
            del options["strings"]
            return {**super().get_config(), "dim": self.dim, "key_dtype": self.key_dtype, "combiner": self.combiner,
                    **{name: saving.as_config(value) for name, value in options.items()}}

        @classmethod
        def from_config(cls, config: Dict[str, Any]) -> Any:
            return cls(**{name: saving.from_config(value) if name in ("init", "evict", "admission") else value
                          for name, value in config.items()})

        def save_own_variables(self, store: Any) -> None:
            """For Keras: a reference to the rows."""
            saving.save_reference(self.table, store)

        def load_own_variables(self, store: Any) -> None:
            saving.load_reference(self.table, store)

        def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
            return mask if self.combiner is None else None

        def compute_output_shape(self, input_shape: Any) -> Any:
            shape = tuple(input_shape)
            return (*(shape if self.combiner is None else shape[:-1]), self.dim)

    return Embedding


def _together_class(keras: Any) -> type:
    class Together(keras.layers.Layer):
        """Several Embedding layers whose rows travel in one exchange, and not in one each.

        layers: of E.Embedding; one may come more than once, for features of the same ids. The layer is called with a
        list of as many inputs (and masks), and returns the list of their outputs. Errors: ValueError for other layers,
        and for another number of inputs; those of Embedding.
        """

        def __init__(self, layers: Sequence[Any], name: Optional[str] = None, **options: Any):
            super().__init__(name=name, **options)
            self.parts, self.supports_masking, self.supports_jit = list(layers), True, False
            if not self.parts or not all(isinstance(part, HasTable) for part in self.parts):
                raise ValueError(f"Together {self.name!r}: give a list of E.Embedding layers.")
            for index, part in enumerate(self.parts):  # tf.train.Checkpoint does not see lists of Keras 3
                self._track_trackable(part, f"part_{index}", overwrite=True)

        def build(self, input_shape: Any) -> None:
            for part, shape in zip(self.parts, input_shape):
                if not part.built:
                    part.build(shape)
            self.built = True

        def call(self, inputs: Sequence[Any], mask: Any = None, training: Any = None) -> List[Any]:
            if len(inputs) != len(self.parts):
                raise ValueError(f"Together {self.name!r}: {len(inputs)} inputs for {len(self.parts)} layers.")
            return outputs_of(self.parts, inputs, self._masks(mask), training)

        def get_config(self) -> Dict[str, Any]:
            different = list({id(part): part for part in self.parts}.values())
            return {**super().get_config(), "layers": [keras.utils.serialize_keras_object(part) for part in different],
                    "order": [different.index(part) for part in self.parts]}

        @classmethod
        def from_config(cls, config: Dict[str, Any]) -> Any:
            options = dict(config)
            layers = [keras.utils.deserialize_keras_object(layer) for layer in options.pop("layers")]
            return cls([layers[index] for index in options.pop("order")], **options)

        def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
            return [part.compute_mask(None, one) for part, one in zip(self.parts, self._masks(mask))]

        def compute_output_shape(self, input_shape: Any) -> Any:
            return [part.compute_output_shape(shape) for part, shape in zip(self.parts, input_shape)]

        def _masks(self, mask: Any) -> Sequence[Any]:
            return [None] * len(self.parts) if mask is None else mask

    return Together

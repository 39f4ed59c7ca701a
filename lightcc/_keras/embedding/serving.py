"""Models with tables for whoever serves them, who needs no lightcc: SavedModels of TensorFlow.

The model is traced once more, with rows from elsewhere than its tables: from constants, or from inputs.
"""
import os
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, Set

import numpy
import tensorflow as tf

from lightcc._keras.embedding.bags import Ids
from lightcc._keras.embedding.layer import Source, source
from lightcc._keras.embedding.signature import Signature, identifier, named, read_for, with_name
from lightcc.embedding.checkpoint import agreed, group_of
from lightcc.embedding.exporting import export, whatever_fails
from lightcc.embedding.initializers import Uniform, parameters_of
from lightcc.embedding.table import Group, Table
from lightcc.tensorflow.embedding.keys import keys_of, tensor_of
from lightcc.tensorflow.embedding.leaf import Leaf, Rows, leaf_of, look_up

_SLICE_IDS = 1 << 16
_OF_LIGHTCC = "LightccEmbedding"  # how the names of its operations begin


def freeze(model: Any, ids: Any, path: str, inputs: Any = None, unknown: Optional[float] = None) -> None:
    """Writes a SavedModel that has the rows of some ids in itself, and predicts as the model does, without lightcc. All
    ranks of the tables call it, between two steps; the first writes.

    ids: for each table, by the name of its layer, those whose rows are to be there: integers or strings of any shape;
    for a model of one table also without the name. Those of all ranks are taken together. path: a folder. inputs: for
    a model that is not made of keras.Input, the specs of what it is called with, as tf.TensorSpec(shape, dtype, name).
    unknown: what another id reads as, in each element. None: as in the table where that is one value for all ids
    (`absent` of a table with min_count, the value of Constant or Zeros); else the mean of the initializer.

    The SavedModel has a function serve(**inputs), by the inputs' names, which returns a dictionary of the outputs: by
    their keys if the model returns a dictionary, else output_0 and so on. Where all inputs are dense, it is the
    signature serving_default, too.
    Errors, on every rank: ValueError for ids of no table or of another kind, for a table without ids, and for a model
    whose inputs are not known; HorovodInternalError for what writing fails with.

    >>> import keras; from lightcc.keras import embedding as E; from lightcc.tensorflow import broadcast_object
    >>> model = keras.Sequential([keras.Input((2,), dtype="int64", name="item"), E.Embedding(4, combiner="sum")])
    >>> path = broadcast_object(os.path.abspath("frozen")); E.freeze(model, [7, 1 << 60], path)
    >>> frozen = tf.saved_model.load(path); frozen.serve(item=tf.constant([[7, 9]], tf.int64))["output_0"].shape
    TensorShape([1, 4])
    """
    leaves = _leaves_of(model)
    group = group_of([leaf.table for leaf in leaves.values()], "freeze")
    of_ranks = agreed(lambda: _ids_of(ids, leaves), group, "freeze")
    keys = {name: numpy.unique(numpy.concatenate([of_rank[name] for of_rank in of_ranks])) for name in leaves}
    weights = {name: _read(leaf, keys[name], group) for name, leaf in leaves.items()}

    def write() -> None:
        signature = Signature(model, inputs)
        rows = {leaf.number: _Frozen(leaf.table, keys[name], weights[name], unknown) for name, leaf in leaves.items()}

        def constants(layers: Sequence[Any], ids: Sequence[Ids], training: Any) -> Iterable[Any]:
            return [one.output(rows[layer.leaf.number](one.flat)) for layer, one in zip(layers, ids)]
        _save(path, model, signature.specs, lambda given: _called(model, signature, given, constants),
              list(rows.values()))
    agreed(whatever_fails(write if group.rank == 0 else _nothing), group, "freeze")


def split(model: Any, path: str, inputs: Any = None) -> Dict[str, str]:
    """Writes a model in two parts that need no lightcc: path/model, a SavedModel that is given rows in place of ids,
    and path/tables, the rows themselves, as lightcc.embedding.export writes them. All ranks of the tables call it,
    between two steps; path is a folder that all ranks see.

    For each call of an Embedding layer the SavedModel has an input named <layer>_rows (the second call of a layer:
    <layer>_rows_1; a dot becomes _): one row an id, in the shape of ids + (dim,); ragged for ragged and for sparse ids.
    Combiners and masks are in the model. Of the model's own inputs those are left that it reads for other things than
    rows, a mask say. inputs, serve, and errors: those of freeze. Returns for each such input the name of its table.

    >>> import keras; from lightcc.keras import embedding as E; from lightcc.tensorflow import broadcast_object
    >>> model = keras.Sequential([keras.Input((2,), dtype="int64"), E.Embedding(4, combiner="sum", name="item")])
    >>> path = broadcast_object(os.path.abspath("parts")); E.split(model, path)
    {'item_rows': 'item'}
    >>> part = tf.saved_model.load(f"{path}/model")
    >>> part.serve(item_rows=tf.ones([1, 2, 4]))["output_0"].numpy().tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    """
    tables = [leaf.table for leaf in _leaves_of(model).values()]
    group = group_of(tables, "split")

    def write() -> Dict[str, str]:
        signature, asked = Signature(model, inputs), _Asked()
        left: Set[str] = set()

        @tf.function
        def outline(**given: Any) -> None:
            left.update(read_for(_called(model, signature, given, asked.placeholders), given))
        outline.get_concrete_function(**signature.specs)
        specs = {name: spec for name, spec in signature.specs.items() if name in left}
        _save(os.path.join(path, "model"), model, {**specs, **asked.specs},
              lambda given: _called(model, signature, given, asked.given(given)))
        return asked.tables
    written = agreed(whatever_fails(write if group.rank == 0 else _nothing), group, "split")
    export(os.path.join(path, "tables"), tables)
    return written[0]


class _Asked:
    """What the layers of a model ask for, call by call, as inputs: specs, and names of tables, by name."""

    def __init__(self) -> None:
        self.specs: Dict[str, Any] = {}
        self.tables: Dict[str, str] = {}

    def placeholders(self, layers: Sequence[Any], ids: Sequence[Ids], training: Any) -> Iterable[Any]:
        for layer, one in zip(layers, ids):
            name = identifier(f"{layer.name}_rows")
            again = sum(other == layer.name for other in self.tables.values())
            name, spec = f"{name}_{again}" if again else name, one.rows_spec()
            self.tables[name] = layer.name
            self.specs[name] = with_name(spec, name)
            yield one.output_of(_placeholder(spec))

    def given(self, rows: Mapping[str, Any]) -> Source:
        """The rows in the same order."""
        names = iter(self.specs)
        return lambda layers, ids, training: [one.output_of(rows[next(names)]) for one in ids]


class _Frozen(tf.Module):
    """The rows of some keys, and one for all others, which is the last."""

    def __init__(self, table: Table, keys: numpy.ndarray, weights: numpy.ndarray, unknown: Optional[float]):
        super().__init__()
        other = numpy.full((1, table.dim), _unknown(table) if unknown is None else unknown, table.dtype)
        self._count, self._table = len(keys), table
        self._rows = tf.Variable(numpy.concatenate([weights, other]), trainable=False, name="rows")
        if table.strings:
            words = keys.tolist() or [b""]  # it cannot be empty
            entries = tf.lookup.KeyValueTensorInitializer(tf.constant(words), tf.range(len(words), dtype=tf.int64))
            self._places = tf.lookup.StaticHashTable(entries, self._count)
        else:
            self._keys = tf.Variable(numpy.append(keys, keys[-1:] if len(keys) else 0), trainable=False, name="keys",
                                     dtype=tf.int64)  # with one for the last row, which is found for no key

    def __call__(self, ids: tf.Tensor) -> Rows:
        if self._table.strings:
            return Rows(self._rows, self._places.lookup(tf.reshape(ids, [-1])))
        keys = keys_of(ids, self._table).keys
        places = tf.minimum(tf.searchsorted(self._keys, keys, out_type=tf.int64), self._count)
        found = tf.equal(tf.gather(self._keys, places), keys)
        return Rows(self._rows, tf.where(found, places, tf.cast(self._count, tf.int64)))


def _unknown(table: Table) -> float:
    """What a key without a row reads as, if that is one value; else the mean of what keys read as."""
    if table.min_count > 1:
        return table.absent
    _, a, b = parameters_of(table.init)
    return (a + b) / 2 if isinstance(table.init, Uniform) else a


def _leaves_of(model: Any) -> Dict[str, Leaf]:
    """By the names of the tables, also of those that are not trained now."""
    leaves = [leaf_of(variable) for variable in model.variables]
    return {leaf.table.name: leaf for leaf in leaves if leaf is not None}


def _plain(variable: Any) -> tf.Variable:
    """TensorFlow's own variable, which one of Keras 3 has in itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _ids_of(ids: Any, leaves: Mapping[str, Leaf]) -> Dict[str, numpy.ndarray]:
    """Each of them once, by table: int64 or bytes."""
    by_name = ids if isinstance(ids, Mapping) else {name: ids for name in leaves} if len(leaves) == 1 else None
    if by_name is None or set(by_name) != set(leaves):
        raise ValueError(f"freeze: give ids by table, a dictionary with {sorted(leaves)}.")
    return {name: _keys(by_name[name], leaf.table) for name, leaf in leaves.items()}


def _keys(ids: Any, table: Table) -> numpy.ndarray:
    if not isinstance(ids, tf.Tensor) and numpy.size(ids) == 0:
        return numpy.empty(0, object if table.strings else numpy.int64)  # an empty list is one of floats
    tensor = tensor_of(ids, table)
    return numpy.unique(tensor.numpy() if table.strings else keys_of(tensor, table).keys.numpy())


def _read(leaf: Leaf, keys: numpy.ndarray, group: Group) -> numpy.ndarray:
    """The rows of keys as an evaluation reads them, for the first rank; the others take part."""
    parts = [numpy.zeros((0, leaf.table.dim), leaf.table.dtype)]
    for begin in range(0, len(keys), _SLICE_IDS):
        mine = keys[begin:begin + _SLICE_IDS] if group.rank == 0 else keys[:0]
        ids = tf.constant(mine.tolist(), tf.string if leaf.table.strings else tf.int64, [len(mine)])
        rows, = look_up([(leaf, keys_of(ids, leaf.table))], False)
        parts.append(tf.gather(rows.values, rows.inverse).numpy())
    return numpy.concatenate(parts)


def _called(model: Any, signature: Signature, given: Mapping[str, Any], of_rows: Source) -> Dict[str, Any]:
    """The model's outputs for inputs by name, in a graph, with rows from elsewhere than its tables."""
    before = source.set(of_rows)
    try:
        return named(model(signature.packed(given), training=False))
    finally:
        source.reset(before)


def _save(path: str, model: Any, specs: Dict[str, Any], body: Callable[[Mapping[str, Any]], Dict[str, Any]],
          frozen: Sequence[Any] = ()) -> None:
    """A SavedModel with the function serve, its variables and its lookup tables."""
    @tf.function
    def serve(**given: Any) -> Dict[str, Any]:
        return body(given)
    concrete = serve.get_concrete_function(**specs)
    _expect_none_of_lightcc(concrete)
    module = tf.Module()
    module.serve, module.frozen = serve, list(frozen)
    module.dense = [_plain(variable) for variable in model.variables if leaf_of(variable) is None]
    module.resources = [value for layer in model._flatten_layers() for value in vars(layer).values()
                        if isinstance(value, tf.saved_model.experimental.TrackableResource)]
    is_dense = all(isinstance(spec, tf.TensorSpec) for spec in specs.values()) and all(
        isinstance(one, tf.Tensor) for one in concrete.structured_outputs.values())
    tf.saved_model.save(module, path, signatures={"serving_default": concrete} if is_dense else None)


def _expect_none_of_lightcc(concrete: Any) -> None:
    graph = concrete.graph.as_graph_def()
    every = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if any(node.op.startswith(_OF_LIGHTCC) for node in every):
        raise ValueError("the model looks rows up in a tf.function of its own, which was traced before; call its "
                         "Embedding layers outside of one.")


def _placeholder(spec: Any) -> Any:
    """A tensor of the graph that is being traced, which nobody runs."""
    parts = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _nothing() -> None:
    """What ranks do that do not write."""

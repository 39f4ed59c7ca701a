"""Layers with tables in Keras's files: what a config says of a table, and the functions of Keras that write and read
the files, so that the rows are saved beside them (lightcc.tensorflow.embedding.saving).

These are functions of modules that Keras 2 and Keras 3 both have. What has no place for a reference is refused
(formats.py).
"""
import dataclasses
import functools
import importlib
import os
from typing import Any, Callable, Dict, List

import numpy

from lightcc._keras.embedding.refusals import tables_in
from lightcc._keras.patches import wrap
from lightcc.embedding import checkpoint
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.eviction import L2, Count, Ttl
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.meeting import meet
from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.leaf import leaf_of
from lightcc.tensorflow.embedding.saving import load_referenced, opening, reference, save_beside

_KINDS = {cls.__name__: cls for cls in (Bloom, Constant, Count, L2, Normal, Ttl, Uniform, Zeros)}
_REFERENCE, _STEPS = "table", "sparse_iterations"  # in a file, of a layer and of an optimizer
_MARK = "_lightcc_with_tables"


def as_config(value: Any) -> Any:
    """An initializer, an eviction policy or an admission as JSON; all else as it is.

    >>> from lightcc import embedding
    >>> as_config(embedding.Ttl(3)), as_config(None)
    ({'kind': 'Ttl', 'steps': 3}, None)
    """
    return {"kind": type(value).__name__, **dataclasses.asdict(value)} if type(value) in _KINDS.values() else value


def from_config(value: Any) -> Any:
    """The other way round. ValueError for a kind that there is not.

    >>> from_config({"kind": "Ttl", "steps": 3})
    Ttl(steps=3)
    """
    if not isinstance(value, dict):
        return value
    numbers = dict(value)
    kind = numbers.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"a layer's config has an initializer, eviction or admission {value}; there are "
                         f"{', '.join(_KINDS)}.")
    return _KINDS[kind](**numbers)


def save_reference(table: Table, store: Any) -> None:
    """In place of a layer's variables, which have no values."""
    store[_REFERENCE] = numpy.frombuffer(reference(table).encode(), numpy.uint8)


def load_reference(table: Table, store: Any) -> None:
    text = bytes(numpy.asarray(store[_REFERENCE])).decode() if _REFERENCE in store.keys() else ""
    load_referenced(table, text)


def install(keras: Any) -> None:
    """Has Keras's functions that write and read files save and load tables, too; once for each Keras."""
    files = importlib.import_module(f"{package_of(keras)}.src.saving.saving_lib")
    wrap_function(files, "save_model", _saving)
    wrap_function(files, "save_weights_only", _saving)
    wrap_function(files, "load_model", _loading_model)
    wrap_function(files, "load_weights_only", _loading_weights)
    wrap(keras.optimizers.Optimizer, "save_own_variables", _save_own_variables)
    wrap(keras.optimizers.Optimizer, "load_own_variables", _load_own_variables)
    wrap(keras.callbacks.BackupAndRestore, "on_train_begin", _with_folder)
    wrap(keras.callbacks.BackupAndRestore, "on_train_end", _without_folder)


def package_of(keras: Any) -> str:
    """The package of a Keras: keras or tf_keras."""
    return next(base for base in keras.layers.Layer.__mro__ if base.__name__ == "Layer").__module__.split(".")[0]


def wrap_function(module: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts around(function) into the place of a function of a module, once."""
    plain = getattr(module, name)
    if not hasattr(plain, _MARK):
        wrapped = functools.wraps(plain)(around(plain))
        setattr(wrapped, _MARK, True)
        setattr(module, name, wrapped)


def _saving(plain: Callable[..., Any]) -> Callable[..., Any]:
    def save(model, filepath, *args, **options):
        tables = tables_of(model)
        if not tables:
            return plain(model, filepath, *args, **options)
        return save_beside(filepath, tables, lambda: plain(model, filepath, *args, **options))
    return save


def _loading_model(plain: Callable[..., Any]) -> Callable[..., Any]:
    def load(filepath, *args, **options):
        opening(filepath)
        return plain(filepath, *args, **options)
    return load


def _loading_weights(plain: Callable[..., Any]) -> Callable[..., Any]:
    def load(model, filepath, *args, **options):
        opening(filepath)
        return plain(model, filepath, *args, **options)
    return load


def _save_own_variables(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of an optimizer: the steps of the sparse one, too."""
    def save_own_variables(self, store):
        plain(self, store)
        if (both := tables_in(self)) is not None:
            store[_STEPS] = both.sparse.iterations.numpy()
    return save_own_variables


def _load_own_variables(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Those of a file in which a plain optimizer was saved have no steps of the sparse one."""
    def load_own_variables(self, store):
        both = tables_in(self)
        if both is None or _STEPS not in store.keys():
            return plain(self, store)
        both.sparse.iterations.assign(numpy.asarray(store[_STEPS]))
        return plain(self, {name: store[name] for name in store.keys() if name != _STEPS})
    return load_own_variables


def _with_folder(plain: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks back up into one folder. Keras would make it on each of them if it is not there, and read what another
    rank is still writing."""
    def on_train_begin(self, logs=None):
        tables = tables_of(self.model)
        if tables:
            meet(tables, "BackupAndRestore")
            os.makedirs(self.backup_dir, exist_ok=True)
        return plain(self, logs)
    return on_train_begin


def _without_folder(plain: Callable[..., Any]) -> Callable[..., Any]:
    """And Keras would remove it on each, while others have not done with their last backup, or remove it, too."""
    def on_train_end(self, logs=None):
        tables = tables_of(self.model)
        if not tables:
            return plain(self, logs)
        meet(tables, "BackupAndRestore")
        group = checkpoint.group_of(tables, "save")
        checkpoint.agreed(lambda: plain(self, logs) if group.rank == 0 else None, group, "backup")
        # The others find it gone, or remove folders of their own.
        checkpoint.agreed(lambda: plain(self, logs) if group.rank > 0 else None, group, "backup")
    return on_train_end


def tables_of(model: Any) -> List[Table]:
    """By name, of all its layers, also those that are not trained."""
    if not getattr(model, "built", False):
        return []
    leaves = [leaf_of(variable) for variable in model.weights]
    tables: Dict[str, Table] = {leaf.table.name: leaf.table for leaf in leaves if leaf is not None}
    return [tables[name] for name in sorted(tables)]

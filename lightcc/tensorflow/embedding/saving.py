"""Rows of tables beside the files of Keras and of tf.train.Checkpoint.

The file itself has a reference to a save of lightcc.embedding, which is in a folder beside it: `<file>.tables/<save>`.
Saving and loading are collective. The ranks that give the same path write one file, those with paths of their own write
their own; the folder is beside that of the first rank. The save that was there goes when the new file is whole.
"""
import functools
import json
import os
import re
import shutil
import uuid
from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from lightcc.core import objects
from lightcc.embedding import checkpoint
from lightcc.embedding.meeting import meet
from lightcc.embedding.table import Table
from lightcc.tensorflow.embedding.leaf import leaf_of

_FOLDER = ".tables"
_SAVE = re.compile("[0-9a-f]{32}")
_REMEMBERED = 64
_writing: Optional[Dict[str, Any]] = None  # of the file that is being written: its save, and where that is
_opened: Dict[str, None] = {}              # files that were read, the newest last: layers made later are in them


class TableState(tf.train.experimental.PythonState):
    """What tf.train.Checkpoint finds of a table: whoever has the table has this as an attribute."""

    def __init__(self, table: Table):
        self.table = table

    def serialize(self) -> str:
        """The reference. ValueError in what is no checkpoint, a SavedModel."""
        if _writing is None:
            raise ValueError(f"table {self.table.name!r}: a SavedModel has no place for its rows. Keep it in a "
                             "tf.train.Checkpoint; to serve a Keras model there are E.freeze and E.split.")
        return reference(self.table)

    def deserialize(self, string_value: Any) -> None:
        load_referenced(self.table, tf.compat.as_str(string_value))


def reference(table: Table) -> str:
    """To the rows of a table, for the file that save_beside is writing. ValueError outside of it."""
    if _writing is None:
        raise ValueError(f"table {table.name!r}: a copy or a pickle of its layer would lack the rows. Save the model "
                         "to a file, and load that.")
    return json.dumps({"table": table.name, **_writing})


def save_beside(path: Any, tables: Sequence[Table], write: Callable[[], Any]) -> None:
    """Saves tables, and writes the file that refers to them by write(), on all ranks of their process set together.

    Errors, on every rank: those of lightcc.embedding.save and of write(); ValueError in a tf.function, for a path that
    is none of a local file, and if other ranks do not save.
    """
    global _writing
    what = f"saving {path}"
    if not tf.executing_eagerly():
        raise ValueError(f"{what}: save tables outside of a tf.function and of graphs, between two steps.")
    place, group = _place(path, what), checkpoint.group_of(tables, "save")
    meet(tables, what)
    every = objects.allgather_object((place, uuid.uuid4().hex), "lightcc.embedding.saving", group.process_set)
    places, save = [one for one, _ in every], every[0][1]
    folder = places[0] + _FOLDER
    checkpoint.save(os.path.join(folder, save), tables)
    _writing = {"save": save, "folder": os.path.relpath(folder, os.path.dirname(place))}
    try:
        mine = place not in places[:group.rank]
        checkpoint.agreed(lambda: write() if mine else None, group, "save")
    finally:
        _writing = None
    checkpoint.agreed(lambda: _remove_saves(folder, but=save) if group.rank == 0 else None, group, "save")


def opening(path: Any) -> None:
    """To be called before a file is read, so that references in it find their folder."""
    if isinstance(path, (str, bytes, os.PathLike)):
        place = os.path.realpath(os.fsdecode(path))
        _opened.pop(place, None)
        _opened[place] = None
        while len(_opened) > _REMEMBERED:
            del _opened[next(iter(_opened))]


def load_referenced(table: Table, text: str) -> None:
    """Loads the rows that a file refers to, on all ranks of the table's process set together.

    Errors, on every rank: those of lightcc.embedding.load; ValueError if the folder is not there, and if other ranks do
    not load.
    """
    meet([table], f"loading table {table.name!r}")
    folder = checkpoint.agreed(lambda: _folder(table, text), table.group, "load")[table.group.rank]
    checkpoint.load(folder, [table])


def remove_beside(path: str) -> None:
    """The tables of a file that is gone. Called on the rank beside whose file they are."""
    folder = os.path.realpath(path) + _FOLDER
    if os.path.isdir(folder):
        _remove_saves(folder)
        try:
            os.rmdir(folder)
        except OSError:  # there is something else in it
            pass


def _place(path: Any, what: str) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)) or "://" in os.fsdecode(path):
        raise ValueError(f"{what}: rows of tables are saved beside a file, in a folder that all ranks see; give its "
                         "path.")
    return os.path.realpath(os.fsdecode(path))


def _folder(table: Table, text: str) -> str:
    what = f"table {table.name!r}"
    if not text:
        raise ValueError(f"{what}: the file was saved without its rows.")
    try:
        told = json.loads(text)
        save, folder = str(told["save"]), str(told["folder"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: the file's reference to its rows cannot be read ({error!r}).") from error
    if not _SAVE.fullmatch(save):
        raise ValueError(f"{what}: the file refers to {save!r}, which is no save.")
    newest = list(reversed(_opened))
    tried = [os.path.join(one, save) for place in newest
             for one in (place + _FOLDER, os.path.normpath(os.path.join(os.path.dirname(place), folder)))]
    for one in tried:
        if os.path.isdir(one):
            return one
    raise ValueError(f"{what}: its rows are not there. The file refers to save {save}, which would be in the folder "
                     f"{os.path.dirname(tried[0]) if tried else folder} beside it; copy and move both together.")


def _remove_saves(folder: str, but: str = "") -> None:
    for name in os.listdir(folder):
        if _SAVE.fullmatch(name) and name != but:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


class _Saver:
    """In the place of what writes a checkpoint's file, while that is written with tables."""

    def __init__(self, plain: Any, tables: List[Table]):
        self._plain, self._tables = plain, tables

    def save(self, file_prefix: Any, **options: Any) -> tf.Tensor:
        path = file_prefix.numpy() if hasattr(file_prefix, "numpy") else file_prefix
        save_beside(path, self._tables, lambda: self._plain.save(file_prefix, **options))
        return tf.constant(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _tables_under(saver: Any) -> List[Table]:
    """By name, of all that a checkpoint keeps. ValueError for a model one of whose tables it would not keep."""
    found, _ = saver._graph_view.breadth_first_traversal()
    tables = {id(one.table): one.table for one in found if isinstance(one, TableState)}
    for one in found:
        is_model = callable(one) and getattr(one, "built", True)  # or a layer, or a module
        for leaf in filter(None, map(leaf_of, getattr(one, "trainable_variables", ()) if is_model else ())):
            if id(leaf.table) not in tables:
                raise ValueError(f"tf.train.Checkpoint does not find the layer of table {leaf.table.name!r}, as in "
                                 "Keras 3 one in a list: give the layer an attribute of its own.")
    return sorted(tables.values(), key=lambda table: table.name)


def _write(plain: Callable[..., Any]) -> Callable[..., Any]:
    def _write(self, file_prefix, options=None, **others):
        saver = self._saver
        tables = _tables_under(saver)
        if not tables:
            return plain(self, file_prefix, options, **others)
        if options is not None and options.experimental_enable_async_checkpoint:
            raise ValueError(f"saving {file_prefix}: table {tables[0].name!r} is saved between two steps; leave "
                             "experimental_enable_async_checkpoint out.")
        object.__setattr__(self, "_saver", _Saver(saver, tables))
        try:
            return plain(self, file_prefix, options, **others)
        finally:
            object.__setattr__(self, "_saver", saver)
    return _write


def _read(plain: Callable[..., Any]) -> Callable[..., Any]:
    def read(self, save_path, options=None):
        opening(save_path)
        return plain(self, save_path, options)
    return read


def _save(plain: Callable[..., Any]) -> Callable[..., Any]:
    """With max_to_keep the tables go with their checkpoint. When it returns, all ranks have written the list of
    checkpoints, which is one file where they save to one place."""
    def save(self, *args, **options):
        before, tables = self.checkpoints, _tables_under(self.checkpoint._saver)
        path = plain(self, *args, **options)
        if tables and path:
            meet(tables, f"saving {path}")
            if checkpoint.group_of(tables, "save").rank == 0:
                for old in set(before) - set(self.checkpoints):
                    if not os.path.exists(old + ".index"):
                        remove_beside(old)
        return path
    return save


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    setattr(cls, name, functools.wraps(getattr(cls, name))(around(getattr(cls, name))))


_wrap(tf.train.Checkpoint, "_write", _write)
_wrap(tf.train.Checkpoint, "read", _read)
_wrap(tf.train.CheckpointManager, "save", _save)

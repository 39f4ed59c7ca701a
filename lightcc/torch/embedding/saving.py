"""Saving and loading the tables of a model: lightcc.embedding.checkpoint says how they are on the disk."""
from typing import Iterable, List, Union

import torch

from lightcc.embedding import checkpoint
from lightcc.embedding.exporting import Sink
from lightcc.embedding.exporting import export as export_tables
from lightcc.embedding.table import Table
from lightcc.torch.embedding import pipeline
from lightcc.torch.embedding.modules import tables
from lightcc.torch.embedding.parameter import TableParameter

Model = Union[torch.nn.Module, Iterable[TableParameter]]


def save(path: str, model: Model) -> None:
    """Writes the tables of a model, with their optimizers' slots, to a folder that all ranks see; all ranks call it.

    model: a module, or E.tables of one. The dense part is not in it: save model.state_dict() as ever, which has no
    tables. A save that was there before is replaced when this one is whole. Memory: a slice of 16,384 rows.
    Errors, on every rank: those of lightcc.embedding.save.

    >>> import os; from lightcc.torch import embedding as E
    >>> user, folder = E.HashEmbedding(4, name="user"), hvd.broadcast_object(os.path.abspath("saved"))
    >>> E.save(folder, user); E.load(folder, user)
    """
    checkpoint.save(path, _tables_of(model))


def load(path: str, model: Model) -> None:
    """Replaces the rows of the model's tables by those of a folder that save has written, on any number of ranks.

    All ranks call it. The optimizer of a table is made before or after, with the rule that the save has.
    Errors, on every rank: those of lightcc.embedding.load.

    >>> from lightcc.torch import embedding as E
    >>> E.load("/nowhere", E.HashEmbedding(4, name="user"))
    Traceback (most recent call last):
    ValueError: load, on rank 0: /nowhere has no manifest.json: nothing was saved there, or the save was cut short.
    """
    checkpoint.load(path, _tables_of(model))


def save_delta(path: str, model: Model, weights_only: bool = False) -> int:
    """Writes to the folder of a save what has changed since, with slots, or without (weights_only, for serving).
    Returns the delta's number. All ranks call it. Errors, on every rank: those of lightcc.embedding.save_delta.

    >>> import os; from lightcc.torch import embedding as E
    >>> user, folder = E.HashEmbedding(4, name="user"), hvd.broadcast_object(os.path.abspath("saved"))
    >>> E.save(folder, user); E.save_delta(folder, user), E.save_delta(folder, user)
    (1, 2)
    """
    return checkpoint.save_delta(path, _tables_of(model), weights_only)


def load_deltas(path: str, model: Model) -> int:
    """Makes the changes of the folder's deltas that the model's tables do not have yet. Returns the last one's number.
    load() does it, too. All ranks call it. Errors, on every rank: those of lightcc.embedding.load_deltas.

    >>> import os; from lightcc.torch import embedding as E
    >>> user, folder = E.HashEmbedding(4, name="user"), hvd.broadcast_object(os.path.abspath("saved"))
    >>> E.save(folder, user); E.load_deltas(folder, user)
    0
    """
    return checkpoint.load_deltas(path, _tables_of(model))


def export(to: Union[str, Sink], model: Model, min_count: int = 0, min_l2: float = 0.0, format: str = "npz") -> int:
    """Gives away the rows of a model's tables for serving, to a folder or a function, without slots and zero rows.
    Returns how many. All ranks call it. Arguments and errors: those of lightcc.embedding.export.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); E.export(lambda table, columns: print(table, len(columns["key"])), user)
    0
    """
    return export_tables(to, _tables_of(model), min_count, min_l2, format)


def _tables_of(model: Model) -> List[Table]:
    """What waits in a Pipeline is in them."""
    found = [one.table for one in (tables(model) if isinstance(model, torch.nn.Module) else model)]
    pipeline.finish(found)
    return found

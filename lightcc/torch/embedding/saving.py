"""Saving and loading the tables of a model: lightcc.embedding.checkpoint says how they are on the disk."""
from typing import Iterable, List, Union

import torch

from lightcc.embedding import checkpoint
from lightcc.embedding.table import Table
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


def _tables_of(model: Model) -> List[Table]:
    return [one.table for one in (tables(model) if isinstance(model, torch.nn.Module) else model)]

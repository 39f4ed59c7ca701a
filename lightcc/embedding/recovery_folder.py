"""The folder of a job's checkpoints, as recovery.py writes them: which of them are whole, and reading them.

What a delta needs is its own folder and those before it, back to one with all rows.
"""
import json
import logging
import os
import shutil
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy

from lightcc.embedding import lib, manifest, rows
from lightcc.embedding.admission import COUNTED, fit, insert_candidates
from lightcc.embedding.moving import ElasticShard
from lightcc.embedding.owners import renumbered
from lightcc.embedding.recovery import CANDIDATE, DONE, LOG, ROWS, SLICE_ROWS, STATE
from lightcc.embedding.shard_file import ShardReader
from lightcc.embedding.table import Table

_logger = logging.getLogger("lightcc")


class Damaged(Exception):
    """A checkpoint cannot be read: a file is missing, truncated or foreign, which the text names."""


class Checkpoints:
    """The folder of a job's checkpoints. path: one that all ranks see; job: a name that no other job has."""

    def __init__(self, path: str, job: str):
        self.folder = os.path.join(path, job)

    def name(self, step: int, version: int) -> str:
        return os.path.join(self.folder, f"{step:012}.{version:06}")

    def newest(self, older_than: Optional[str] = None, warn: bool = False) -> Optional[str]:
        """The newest that is whole. warn: of those that are newer and are not."""
        for name in self._all():
            if older_than is not None and name >= older_than:
                continue
            if (lacks := what_lacks(name)) is None:
                return name
            if warn:
                _logger.warning("The checkpoint %s is not whole: %s. An older one is taken.", name, lacks)
        return None

    def _all(self) -> List[str]:
        """The newest first, whole or not."""
        if not os.path.isdir(self.folder):
            return []
        return [os.path.join(self.folder, name) for name in sorted(os.listdir(self.folder), reverse=True)]

    def last_version(self) -> int:
        """Of all, whole or not; 0: there are none."""
        return max((int(name.rpartition(".")[2]) for name in self._all()), default=0)

    def remove_old(self) -> None:
        """All that are older than the newest whole one and what that is a delta of."""
        newest = self.newest()
        if newest is None:
            return
        oldest = min(save.folder for save in _saves(newest))
        for name in self._all():
            if name < oldest:
                shutil.rmtree(name, ignore_errors=True)


def newest_job(path: str) -> Optional[str]:
    """The job whose newest whole checkpoint was written last, of those that share a path."""
    newest = {job: Checkpoints(path, job).newest() for job in (os.listdir(path) if os.path.isdir(path) else ())}
    written = {job: os.path.getmtime(os.path.join(name, f"0.{DONE}")) for job, name in newest.items() if name}
    return max(written, key=written.__getitem__, default=None)


def what_lacks(folder: str) -> Optional[str]:
    """Why this checkpoint cannot be read, which names the file; None: it is whole."""
    try:
        for save in _saves(folder):
            for rank in range(save.size):
                for name, size in save.done(rank)["files"].items():
                    path = save.path(rank, name)
                    if (found := os.path.getsize(path)) != size:
                        return f"{path} is truncated: it has {found} bytes of {size}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _told(error)
    return None


def read(folder: str, shards: Sequence[ElasticShard], version: int) -> List[bytes]:
    """Replaces the shards of this rank by a checkpoint's rows that belong to it now. Returns each old rank's state.

    Errors: ValueError for tables that are others than were saved, with the shards unchanged; Damaged.
    """
    try:
        saves = _saves(folder)
        size = saves[-1].size
        described = {shard.table.name: saves[-1].done(0)["tables"].get(shard.table.name) for shard in shards}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(_told(error)) from error
    for shard in shards:
        of_table = described[shard.table.name]
        if of_table is None:
            raise ValueError(f"{folder} has no table {shard.table.name!r}.")
        manifest.expect_same(shard.table, of_table, folder)
    try:
        for shard in shards:
            _read_table(saves, shard, version)
        return [_bytes(saves[-1].path(rank, STATE)) for rank in range(size)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(_told(error)) from error


def _read_table(saves: List["_Save"], shard: ElasticShard, version: int) -> None:
    shard.broken = True
    table, group, size = shard.table, shard.table.group, saves[-1].size
    saved = saves[-1].done(0)["tables"][table.name]
    before = manifest.owners_of(saved)
    owners = renumbered(before, [rank if rank < group.size else -1 for rank in range(size)], group.size)
    alphas = numpy.concatenate([save.reader(0, ROWS).all(f"{table.name}.alphas") for save in saves])
    lib.call("end_log", table.handle, lib.OF_COMMIT)
    lib.call("end_log", table.handle, lib.OF_CHECKPOINT)
    manifest.restore(table, saved, owners, alphas)
    ranks, counts_fit = sorted(set(before[owners == group.rank].tolist())), fit(table, saved)
    for save in saves:
        for rank in ranks:
            save.insert(table, rank)
            if counts_fit:
                save.insert_candidates(table, rank)
    shard.loaded(version, owners)


class _Save:
    """A folder: all rows, or what has changed since the one before it."""

    def __init__(self, folder: str):
        self.folder = folder
        self._done: Dict[int, Dict[str, Any]] = {}
        self.size = int(self.done(0)["size"])

    def path(self, rank: int, name: str) -> str:
        return os.path.join(self.folder, f"{rank}.{name}")

    def done(self, rank: int) -> Dict[str, Any]:
        if rank not in self._done:
            with open(self.path(rank, DONE)) as file:
                try:
                    self._done[rank] = json.load(file)
                except ValueError as error:
                    raise ValueError(f"{file.name} is no JSON ({error})") from error
        return self._done[rank]

    def reader(self, rank: int, name: str) -> ShardReader:
        return ShardReader(self.path(rank, name))

    def insert(self, table: Table, rank: int) -> None:
        """What an old rank has of a table, as far as it belongs to this rank now."""
        of_rows = self.reader(rank, ROWS)
        if self.done(rank)["after"] is not None:
            gone = of_rows.all(f"{table.name}.gone")
            lib.call("erase", table.handle, lib.address(gone), len(gone))
        counts = self.done(rank)["tables"][table.name]
        for reader, total in ((of_rows, counts["rows"]), (self.reader(rank, LOG), counts["log"])):
            for columns in _slices(reader, f"{table.name}.", rows.columns_of(table), total):
                rows.insert(table, columns)

    def insert_candidates(self, table: Table, rank: int) -> None:
        counts = self.done(rank)["tables"][table.name]
        for name, total in ((ROWS, counts["candidates"]), (LOG, counts["candidate_log"])):
            for columns in _slices(self.reader(rank, name), f"{table.name}.{CANDIDATE}", COUNTED, total):
                insert_candidates(table, columns)


def _saves(folder: str) -> List[_Save]:
    """What is to be read one after the other: all rows, and deltas."""
    saves = [_Save(folder)]
    while (after := saves[0].done(0)["after"]) is not None:
        if after >= os.path.basename(saves[0].folder):
            raise ValueError(f"{saves[0].path(0, DONE)} follows {after}, which is not older")
        saves.insert(0, _Save(os.path.join(os.path.dirname(folder), after)))
    return saves


def _slices(reader: ShardReader, prefix: str, columns: rows.Columns, total: int) -> Iterator[Dict[str, numpy.ndarray]]:
    for first in range(0, total, SLICE_ROWS):
        count = min(SLICE_ROWS, total - first)
        yield {name: reader.read(f"{prefix}{name}", first, count) for name in columns}


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, ValueError) else f"it cannot be read ({error!r})"

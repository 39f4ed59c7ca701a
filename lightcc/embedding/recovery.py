"""Checkpoints of an elastic job, written in the background, from which a rank's lost rows come back.

A folder `<job>/<step>.<version>` has for each rank `<rank>.rows.safetensors`, with the rows and candidates that had not
changed before they were read, `<rank>.log.safetensors`, with the others as they were at that step, `<rank>.state`,
bytes of whoever has more to keep, and `<rank>.json`, which is written last and by rename. So the folder is whole when
all ranks' are there, and no rank waits for another one. A folder of a delta has only rows and candidates that have
changed since the one before it, which its JSON names, and the keys whose rows have gone. A key that was a candidate and
has a row now is none any more. recovery_folder.py reads them.
"""
import json
import math
import os
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import numpy

from lightcc.embedding import lib, manifest, rows
from lightcc.embedding.admission import COUNTED, candidates, candidates_of_log, held, logged_candidates
from lightcc.embedding.background_file import Writer
from lightcc.embedding.moving import ElasticShard
from lightcc.embedding.shard_file import ShardWriter
from lightcc.embedding.table import Table

SLICE_ROWS = 16384
CANDIDATE = "candidate."  # columns of candidates begin so
ROWS, LOG, STATE, DONE = "rows.safetensors", "log.safetensors", "state", "json"


class Checkpoint:
    """One that is being written, of this rank: the tables as they are now, though they train on. after: the one that
    this one is a delta of, which has been read; None: all rows are in it. before: run in the thread that writes, first.
    Attributes: folder; step; is_read, whether all is in that thread's hands."""

    def __init__(self, folder: str, step: int, shards: Sequence[ElasticShard], state: bytes,
                 after: Optional["Checkpoint"] = None, before: Optional[Callable[[], None]] = None):
        self.folder, self.step, self.is_read = folder, step, False
        group = shards[0].table.group
        self._tables = [shard.table for shard in shards]
        self._writer = Writer(f"the checkpoint {folder}")
        self._base = os.path.join(folder, str(group.rank))
        self._only = lib.OF_CHECKPOINTS if after is not None else 0
        self._slices = self._read()
        self._done: Dict[str, Any] = {"size": group.size, "after": after and os.path.basename(after.folder),
                                      "files": {}, "tables": {}}
        columns: Dict[str, numpy.ndarray] = {}  # that are written at once
        described: Dict[str, Any] = {}
        self._left = 0  # about: the log's slices are further
        for table in self._tables:
            steps_before = after._done["tables"][table.name]["steps"] if after is not None else 0
            columns.update(self._begun(table, steps_before))
            counts = _changed(table) if after is not None else len(table), held(table, self._only)
            described.update(_described(table, counts))
            self._left += sum(-(-count // SLICE_ROWS) for count in counts)
        described.update((name, (values.dtype, values.shape)) for name, values in columns.items())
        self._file: Optional[ShardWriter] = None
        if before is not None:
            self._writer.put(before)
        self._writer.put(lambda: self._open(folder, described, state))
        for name, values in columns.items():
            self._put(name, 0, values)

    @property
    def failed(self) -> bool:
        """It could not be written."""
        return self._writer.failed

    def advance(self, share: float) -> None:
        """Queues this share of the slices that are left, fewer if the disk is slow; 1: all of them, whatever it takes.
        """
        turns = math.ceil(self._left * share) + 1
        while not self.is_read and (turns > 0 or share >= 1):
            if share < 1 and self._writer.is_busy:
                return
            turns -= 1
            self._left = max(self._left - 1, 0)
            if not next(self._slices, False):
                self._end()

    def finish(self) -> None:
        """Waits until it is on the disk."""
        self.advance(1)
        self._writer.join()

    def abandon(self) -> None:
        """It will not be whole, unless it has been read already."""
        if self.is_read:
            return
        self.is_read = True
        for table in self._tables:
            lib.call("end_log", table.handle, lib.OF_CHECKPOINT)
        self._writer.abandon()
        if self._file is not None:
            self._file.abandon()

    def _begun(self, table: Table, steps_before: int) -> Dict[str, numpy.ndarray]:
        """This is the moment that the checkpoint is of. Returns what it has of the table beside rows."""
        gone = rows.gone(table, lib.OF_CHECKPOINTS) if self._only else None
        lib.call("begin_log", table.handle, lib.OF_CHECKPOINT)
        lib.call("forget_gone", table.handle, lib.OF_CHECKPOINTS)
        self._done["tables"][table.name] = manifest.described(table)
        columns = {} if gone is None else {f"{table.name}.gone": gone}
        if table.group.rank == 0:
            columns[f"{table.name}.alphas"] = rows.alphas(table)[steps_before:]
        return columns

    def _read(self) -> Iterator[bool]:
        """Queues a slice in each turn."""
        for table in self._tables:
            unread = self._only | lib.TAKE
            yield from self._read_slices(table, "rows", rows.slices(table, SLICE_ROWS, changed=unread))
            yield from self._read_slices(table, "candidates", candidates(table, unread, SLICE_ROWS), CANDIDATE)
        self._writer.put(self._close_file)
        totals = {table.name: (_log_records(table), logged_candidates(table, lib.OF_CHECKPOINT))
                  for table in self._tables}
        described = {name: column for table in self._tables
                     for name, column in _described(table, totals[table.name]).items()}
        self._writer.put(lambda: self._open_file(LOG, described))
        for table in self._tables:  # what has changed since is in the first file
            records, counts = totals[table.name]
            of_rows = rows.slices(table, SLICE_ROWS, lib.OF_CHECKPOINT, changed=self._only)
            yield from self._read_slices(table, "log", _first(of_rows, records))
            of_counts = candidates_of_log(table, lib.OF_CHECKPOINT, counts, SLICE_ROWS)
            yield from self._read_slices(table, "candidate_log", of_counts, CANDIDATE)

    def _read_slices(self, table: Table, what: str, slices: Iterator[Dict[str, numpy.ndarray]],
                     prefix: str = "") -> Iterator[bool]:
        """Notes how many rows or candidates there were, as `what`. prefix: of the columns' names."""
        first = 0
        for columns in slices:
            for name, values in columns.items():
                self._put(f"{table.name}.{prefix}{name}", first, values)
            first += len(columns["key"])
            yield True
        self._done["tables"][table.name][what] = first

    def _end(self) -> None:
        for table in self._tables:
            lib.call("end_log", table.handle, lib.OF_CHECKPOINT)
        self._writer.put(self._close_file)
        self._writer.put(lambda: _write_json(f"{self._base}.{DONE}", self._done))
        self._writer.end()
        self.is_read = True

    # In the writer's thread.

    def _put(self, name: str, first: int, values: numpy.ndarray) -> None:
        def write() -> None:
            assert self._file is not None
            self._file.write(name, first, values)
        self._writer.put(write)

    def _open(self, folder: str, described: Dict[str, Any], state: bytes) -> None:
        os.makedirs(folder, exist_ok=True)
        with open(f"{self._base}.{STATE}", "wb") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        self._done["files"][STATE] = len(state)
        self._open_file(ROWS, described)

    def _open_file(self, name: str, described: Dict[str, Any]) -> None:
        self._file = ShardWriter(f"{self._base}.{name}", described, {})
        self._done["files"][name] = self._file.bytes

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _first(slices: Iterator[Dict[str, numpy.ndarray]], total: int) -> Iterator[Dict[str, numpy.ndarray]]:
    """Of all rows the first ones."""
    while total and (columns := next(slices, None)):
        yield {name: values[:total] for name, values in columns.items()}
        total = max(total - len(columns["key"]), 0)


def _described(table: Table, counts: Tuple[int, int]) -> Dict[str, Tuple[Any, Tuple[int, ...]]]:
    """The columns of a file with so many rows and candidates."""
    return {f"{table.name}.{prefix}{name}": (dtype, (count, *width))
            for prefix, count, columns in zip(("", CANDIDATE), counts, (rows.columns_of(table), COUNTED))
            for name, (dtype, width) in columns.items()}


def _log_records(table: Table) -> int:
    keys, records, size = lib.c_int64(), lib.c_int64(), lib.c_int64()
    lib.call("log_stats", table.handle, lib.OF_CHECKPOINT, keys, records, size)
    return records.value


def _changed(table: Table) -> int:
    """Rows that the checkpoint before does not have as they are."""
    count = lib.c_int64()
    lib.call("changed", table.handle, lib.OF_CHECKPOINTS, count)
    return count.value


def _write_json(path: str, value: Any) -> None:
    with open(path + ".part", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)

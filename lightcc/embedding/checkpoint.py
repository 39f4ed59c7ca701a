"""Tables in a folder: a file of safetensors for each rank's shard, and a manifest in JSON, which is written last.

A shard has for each table the columns `<table>.key`, `.count`, `.last`, `.weight` and one for each slot, a row's
numbers at one index; the first rank's has `<table>.alphas` too, what Adam's rules keep of each step. The manifest says
which shards belong together, and each table's owner map, so that another number of ranks moves as few rows as it can.
It gets its name when all shards are on the disk: a save that is cut short leaves the one before it as it was.
"""
import json
import os
import uuid
from typing import Any, Callable, Dict, List, Sequence, TypeVar

import numpy

from lightcc.core import objects
from lightcc.core.exceptions import HorovodInternalError
from lightcc.embedding import manifest as of_tables
from lightcc.embedding import rows
from lightcc.embedding.owners import moved
from lightcc.embedding.shard_file import ShardReader, ShardWriter
from lightcc.embedding.table import Group, Table

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "lightcc.embedding", 1
_SLICE_ROWS = 16384
_T = TypeVar("_T")


def save(path: str, tables: Sequence[Table]) -> None:
    """Writes all rows of the tables, with their slots, to a folder that all ranks see. All ranks of their process set
    call it between two steps; a save that was there is replaced when this one is whole.

    Memory: a slice of 16,384 rows. Errors, on every rank: HorovodInternalError that names the rank and the file if one
    cannot write its shard (a full disk: what was saved before is still there); ValueError for tables of several process
    sets.

    >>> import os; from lightcc import embedding
    >>> table, folder = embedding.Table("user", 4), hvd.broadcast_object(os.path.abspath("saved"))
    >>> embedding.save(folder, [table]); embedding.load(folder, [table])
    """
    group = _group_of(tables, "save")
    identity = objects.broadcast_object(uuid.uuid4().hex, group.ranks[0], "lightcc.embedding.save", group.process_set)
    file = _file_name(identity, group.rank, group.size)
    bytes_of = _agreed(lambda: _write_shard(path, file, identity, tables), group, "save")
    shards = [{"file": _file_name(identity, rank, len(bytes_of)), "bytes": size} for rank, size in enumerate(bytes_of)]
    manifest = {"format": _FORMAT, "version": _VERSION, "save": identity, "shards": shards,
                "tables": {table.name: of_tables.described(table) for table in tables}}
    _agreed(lambda: _write_manifest(path, manifest) if group.rank == 0 else None, group, "save")


def load(path: str, tables: Sequence[Table]) -> None:
    """Replaces the tables' rows by those of a folder that save has written, on this or another number of ranks.

    All ranks of the tables' process set call it; all of them see the folder. A table without an optimizer takes that of
    the save, and its own must be of the same rule. The folder may have other tables too.
    Errors, on every rank: ValueError, with the tables unchanged, for a folder without a manifest, a manifest without a
    shard, a truncated or foreign file, a table that is not there or of another dim, dtype or optimizer;
    HorovodInternalError if a file cannot be read, or memory does not suffice.

    >>> load("/nowhere", [])
    Traceback (most recent call last):
    ValueError: load: give at least one table.
    """
    group = _group_of(tables, "load")
    manifest = _agreed(lambda: _checked(path, tables), group, "load")[group.rank]
    _agreed(lambda: _read_shards(path, manifest, tables), group, "load")


def _write_shard(path: str, file: str, identity: str, tables: Sequence[Table]) -> int:
    """Returns the file's bytes."""
    os.makedirs(path, exist_ok=True)
    described: Dict[str, Any] = {}
    counts = {table.name: len(table) for table in tables}
    for table in tables:
        for name, (dtype, width) in rows.columns_of(table).items():
            described[f"{table.name}.{name}"] = dtype, (counts[table.name], *width)
        if table.group.rank == 0:
            described[f"{table.name}.alphas"] = numpy.float64, (table.stats()["steps"],)
    writer = ShardWriter(os.path.join(path, file), described, {"format": _FORMAT, "save": identity})
    try:
        for table in tables:
            first = 0
            for columns in rows.slices(table, _SLICE_ROWS):
                for name, values in columns.items():
                    writer.write(f"{table.name}.{name}", first, values)
                first += len(columns["key"])
            if table.group.rank == 0:
                writer.write(f"{table.name}.alphas", 0, rows.alphas(table))
        writer.close()
    finally:
        writer.abandon()
    return writer.bytes


def _write_manifest(path: str, manifest: Dict[str, Any]) -> None:
    """Then removes the shards that no manifest names any more."""
    whole = os.path.join(path, MANIFEST)
    with open(whole + ".part", "w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(whole + ".part", whole)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    named = {shard["file"] for shard in manifest["shards"]}
    for name in os.listdir(path):
        if name.startswith("shard-") and name.endswith(".safetensors") and name not in named:
            os.unlink(os.path.join(path, name))


def _checked(path: str, tables: Sequence[Table]) -> Dict[str, Any]:
    """The manifest, if all that it names is there and fits the tables."""
    whole = os.path.join(path, MANIFEST)
    try:
        with open(whole) as file:
            manifest = json.load(file)
        known = manifest["format"] == _FORMAT and manifest["version"] == _VERSION
        shards, saved = manifest["shards"], manifest["tables"]
    except FileNotFoundError:
        raise ValueError(f"{path} has no {MANIFEST}: nothing was saved there, or the save was cut short.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{whole} is no manifest of tables ({error!r}).") from error
    if not known:
        raise ValueError(f"{whole} is no manifest of tables that this version reads: {manifest['format']} "
                         f"{manifest['version']}.")
    for table in tables:
        if table.name not in saved:
            raise ValueError(f"{path} has no table {table.name!r}; it has {', '.join(sorted(saved))}.")
        of_tables.expect_same(table, saved[table.name], whole)
        of_tables.owners_of(saved[table.name])
    for shard in shards:
        try:
            reader = ShardReader(os.path.join(path, shard["file"]))
        except FileNotFoundError:
            raise ValueError(f"{whole} names the shard {shard['file']}, which is not there.") from None
        if reader.metadata.get("save") != manifest["save"] or reader.bytes != shard["bytes"]:
            raise ValueError(f"{reader.path} is not of the save of {whole}.")
        for table in tables:
            _expect_columns(reader, table.name, rows.columns_of(table, of_tables.rule_of(saved[table.name])))
    return manifest


def _expect_columns(reader: ShardReader, name: str, columns: Dict[str, Any]) -> None:
    count = reader.columns[f"{name}.key"].shape[0] if f"{name}.key" in reader.columns else -1
    for column, (dtype, width) in columns.items():
        of = reader.columns.get(f"{name}.{column}")
        if of is None or of.dtype != dtype or of.shape != (count, *width):
            raise ValueError(f"{reader.path}: column {name}.{column} is {of and (str(of.dtype), of.shape)}, not "
                             f"{(dtype.name, (count, *width))}.")


def _read_shards(path: str, manifest: Dict[str, Any], tables: Sequence[Table]) -> None:
    readers = [ShardReader(os.path.join(path, shard["file"])) for shard in manifest["shards"]]
    for table in tables:
        saved = manifest["tables"][table.name]
        before = of_tables.owners_of(saved)
        owners = moved(before, table.group.size)
        alphas = readers[0].read(f"{table.name}.alphas", 0, readers[0].columns[f"{table.name}.alphas"].shape[0])
        of_tables.restore(table, saved, owners, alphas)
        for index in sorted(set(before[owners == table.group.rank].tolist())):
            reader, columns = readers[index], list(rows.columns_of(table))
            total = reader.columns[f"{table.name}.key"].shape[0]
            for first in range(0, total, _SLICE_ROWS):
                count = min(_SLICE_ROWS, total - first)
                rows.insert(table, {name: reader.read(f"{table.name}.{name}", first, count) for name in columns})


def _agreed(work: Callable[[], _T], group: Group, what: str) -> List[_T]:
    """What the work returns on each rank; if it fails on some rank, every rank raises what the first one has."""
    result, failed = None, None
    try:
        result = work()
    except (OSError, ValueError, MemoryError, HorovodInternalError) as error:
        failed = error
    answers = objects.allgather_object((result, _text(failed), isinstance(failed, ValueError)),
                                       f"lightcc.embedding.{what}", group.process_set)
    for rank, (_, text, is_value) in enumerate(answers):
        if text:
            told = f"{what}, on rank {group.ranks[rank]}: {text}"
            raise (ValueError if is_value else HorovodInternalError)(told) from failed
    return [answer for answer, _, _ in answers]


def _text(error: Any) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _group_of(tables: Sequence[Table], what: str) -> Group:
    if not tables:
        raise ValueError(f"{what}: give at least one table.")
    if any(table.group is not tables[0].group for table in tables):
        raise ValueError(f"{what}: the tables are of several process sets; {what} those of each by themselves.")
    return tables[0].group


def _file_name(identity: str, rank: int, size: int) -> str:
    return f"shard-{identity}-{rank}-of-{size}.safetensors"

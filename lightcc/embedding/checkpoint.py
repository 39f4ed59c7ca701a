"""Tables in a folder: a file of safetensors for each rank's shard, and a manifest in JSON, which is written last.

A shard has for each table the columns `<table>.key`, `.count`, `.last`, `.weight` and one for each slot, a row's
numbers at one index, and `.candidate.key` and `.candidate.count` of keys that are counted before they get a row; the
first rank's has `<table>.alphas` too, what Adam's rules keep of each step. The manifest says which shards belong
together, and each table's owner map, so that another number of ranks moves as few rows as it can.
It gets its name when all shards are on the disk: a save that is cut short leaves the one before it as it was.
"""
import json
import os
import uuid
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import numpy

from lightcc.core import objects
from lightcc.core.exceptions import HorovodInternalError
from lightcc.embedding import delta, rows
from lightcc.embedding import manifest as of_tables
from lightcc.embedding.admission import candidates, fit, held, insert_candidates
from lightcc.embedding.owners import moved
from lightcc.embedding.shard_file import ShardReader, ShardWriter
from lightcc.embedding.table import Group, Table

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "lightcc.embedding", 1
_DELTA = "lightcc.embedding.delta"
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
    group = group_of(tables, "save")
    identity = objects.broadcast_object(uuid.uuid4().hex, group.ranks[0], "lightcc.embedding.save", group.process_set)
    file = _file_name(identity, group.rank, group.size)
    bytes_of = agreed(lambda: _write_shard(path, file, identity, tables), group, "save")
    shards = [{"file": _file_name(identity, rank, len(bytes_of)), "bytes": size} for rank, size in enumerate(bytes_of)]
    manifest = {"format": _FORMAT, "version": _VERSION, "save": identity, "shards": shards,
                "tables": {table.name: of_tables.described(table) for table in tables}}
    agreed(lambda: _write_manifest(path, MANIFEST, manifest) if group.rank == 0 else None, group, "save")
    for table in tables:
        delta.begin_history(table, identity)


def save_delta(path: str, tables: Sequence[Table], weights_only: bool = False) -> int:
    """Writes to the folder of a save what has changed of its tables since, or since the last delta, and returns the
    delta's number: 1 for the first after the save. All ranks call it between two steps; load() reads them, too.

    weights_only: without slots, for serving; load() refuses such a one. Memory: of the rows that have changed.
    Errors, on every rank, with nothing written and the changes kept for the next one: ValueError for tables that were
    not saved together, or of which more rows have gone than there are; HorovodInternalError if a file cannot be
    written.

    >>> import os; from lightcc import embedding
    >>> table, folder = embedding.Table("user", 4), hvd.broadcast_object(os.path.abspath("saved"))
    >>> embedding.save(folder, [table]); embedding.save_delta(folder, [table]); embedding.load(folder, [table])
    1
    """
    group = group_of(tables, "save_delta")
    every = agreed(lambda: _write_delta(path, tables, weights_only), group, "save_delta")
    save_id, before, _ = delta.same_history(list(tables))
    number = before + 1
    manifest = {"format": _DELTA, "version": _VERSION, "save": save_id, "sequence": number,
                "weights_only": weights_only,
                "shards": [{"file": _delta_name(save_id, number, rank, len(every)), "bytes": size}
                           for rank, size in enumerate(every)],
                "tables": {table.name: delta.with_step_before(table) for table in tables}}
    name = _delta_manifest(save_id, number)
    agreed(lambda: _write_manifest(path, name, manifest) if group.rank == 0 else None, group, "save_delta")
    for table in tables:
        delta.taken(table, number)
    return number


def load_deltas(path: str, tables: Sequence[Table]) -> int:
    """Makes the changes of the folder's deltas that the tables do not have yet, and returns the number of the last one.
    All ranks call it, of any number.

    Errors, on every rank, with the tables unchanged: ValueError for deltas of another save, with one missing between
    them, or without slots, and for a truncated or foreign file.

    >>> load_deltas("/nowhere", [])
    Traceback (most recent call last):
    ValueError: load_deltas: give at least one table.
    """
    group = group_of(tables, "load_deltas")
    manifests = agreed(lambda: _deltas(path, tables), group, "load_deltas")[group.rank]
    agreed(lambda: _read_deltas(path, manifests, tables), group, "load_deltas")
    return delta.same_history(list(tables))[1]


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
    group = group_of(tables, "load")
    manifest, deltas = agreed(lambda: _checked_all(path, tables), group, "load")[group.rank]
    agreed(lambda: _read_shards(path, manifest, tables), group, "load")
    agreed(lambda: _read_deltas(path, deltas, tables), group, "load")


def _write_shard(path: str, file: str, identity: str, tables: Sequence[Table]) -> int:
    """Returns the file's bytes."""
    os.makedirs(path, exist_ok=True)
    described: Dict[str, Any] = {}
    counts = {table.name: len(table) for table in tables}
    for table in tables:
        for name, (dtype, width) in rows.columns_of(table).items():
            described[f"{table.name}.{name}"] = dtype, (counts[table.name], *width)
        count = held(table)
        described[f"{table.name}.candidate.key"] = numpy.int64, (count,)
        described[f"{table.name}.candidate.count"] = numpy.uint32, (count,)
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
            first = 0
            for columns in candidates(table):
                for name, values in columns.items():
                    writer.write(f"{table.name}.candidate.{name}", first, values)
                first += len(columns["key"])
            if table.group.rank == 0:
                writer.write(f"{table.name}.alphas", 0, rows.alphas(table))
        writer.close()
    finally:
        writer.abandon()
    return writer.bytes


def write_json(path: str, name: str, content: Dict[str, Any]) -> None:
    """A file that is whole on the disk before it has its name."""
    whole = os.path.join(path, name)
    with open(whole + ".part", "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(whole + ".part", whole)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_manifest(path: str, name: str, manifest: Dict[str, Any]) -> None:
    """Then removes, after a save, the shards and deltas that follow another one."""
    write_json(path, name, manifest)
    if name != MANIFEST:
        return
    named = {shard["file"] for shard in manifest["shards"]}
    for other in os.listdir(path):
        if other.startswith(("shard-", "delta-")) and other.endswith((".safetensors", ".json")) and other not in named:
            os.unlink(os.path.join(path, other))


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
        reader = _opened(path, shard, manifest, whole)
        for table in tables:
            _expect_columns(reader, table.name, rows.columns_of(table, of_tables.rule_of(saved[table.name])))
    return manifest


def _checked_all(path: str, tables: Sequence[Table]) -> Tuple[Dict[str, Any], List[Dict[str, Any]]]:
    """The save's manifest and those of its deltas."""
    manifest = _checked(path, tables)
    return manifest, _following(path, tables, manifest["save"], 0)


def _deltas(path: str, tables: Sequence[Table]) -> List[Dict[str, Any]]:
    save_id, sequence, _ = delta.same_history(list(tables))
    return _following(path, tables, save_id, sequence)


def _following(path: str, tables: Sequence[Table], save_id: str, sequence: int) -> List[Dict[str, Any]]:
    """The manifests of the deltas after number `sequence` of a save, in order, all of whose files are there."""
    begin = f"delta-{save_id}-"
    numbers = sorted(int(name[len(begin):-5]) for name in os.listdir(path)
                     if name.startswith(begin) and name.endswith(".json"))
    manifests = []
    for expected, number in enumerate((number for number in numbers if number > sequence), sequence + 1):
        whole = os.path.join(path, _delta_manifest(save_id, number))
        if number != expected:
            raise ValueError(f"{path} has delta {number}, and delta {expected} before it is missing.")
        with open(whole) as file:
            manifest = json.load(file)
        if manifest.get("format") != _DELTA or manifest["version"] != _VERSION or manifest["sequence"] != number:
            raise ValueError(f"{whole} is no manifest of a delta that this version reads.")
        if manifest["save"] != save_id:
            raise ValueError(f"{whole} follows another save than {save_id}.")
        if manifest["weights_only"]:
            raise ValueError(f"{whole} has weights only, without slots.")
        for shard in manifest["shards"]:
            reader = _opened(path, shard, manifest, whole)
            for table in tables:
                if table.name not in manifest["tables"]:
                    raise ValueError(f"{whole} has no table {table.name!r}.")
                saved = manifest["tables"][table.name]
                of_tables.expect_same(table, saved, whole)
                _expect_columns(reader, table.name, rows.columns_of(table, of_tables.rule_of(saved)))
        manifests.append(manifest)
    return manifests


def _opened(path: str, shard: Dict[str, Any], manifest: Dict[str, Any], whole: str) -> ShardReader:
    try:
        reader = ShardReader(os.path.join(path, shard["file"]))
    except FileNotFoundError:
        raise ValueError(f"{whole} names the shard {shard['file']}, which is not there.") from None
    if reader.metadata.get("save") != manifest["save"] or reader.bytes != shard["bytes"]:
        raise ValueError(f"{reader.path} is not of the save of {whole}.")
    return reader


def _read_deltas(path: str, manifests: List[Dict[str, Any]], tables: Sequence[Table]) -> None:
    for manifest in manifests:
        readers = [ShardReader(os.path.join(path, shard["file"])) for shard in manifest["shards"]]
        for table in tables:
            delta.apply_parts(table, [delta.of_file(reader, table.name, manifest) for reader in readers])


def _write_delta(path: str, tables: Sequence[Table], weights_only: bool) -> int:
    """Returns the file's bytes."""
    save_id, before, _ = delta.same_history(list(tables))
    group = tables[0].group
    arrays = dict(one for table in tables for one in delta.arrays_of(delta.collected(table, weights_only)))
    writer = ShardWriter(os.path.join(path, _delta_name(save_id, before + 1, group.rank, group.size)),
                         {name: (values.dtype, values.shape) for name, values in arrays.items()},
                         {"format": _DELTA, "save": save_id})
    try:
        for name, values in arrays.items():
            writer.write(name, 0, values)
        writer.close()
    finally:
        writer.abandon()
    return writer.bytes


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
        counts_fit = fit(table, saved)
        alphas = readers[0].read(f"{table.name}.alphas", 0, readers[0].columns[f"{table.name}.alphas"].shape[0])
        of_tables.restore(table, saved, owners, alphas)
        for index in sorted(set(before[owners == table.group.rank].tolist())):
            reader, columns = readers[index], list(rows.columns_of(table))
            total = reader.columns[f"{table.name}.key"].shape[0]
            for first in range(0, total, _SLICE_ROWS):
                count = min(_SLICE_ROWS, total - first)
                rows.insert(table, {name: reader.read(f"{table.name}.{name}", first, count) for name in columns})
            if counts_fit:
                _read_candidates(reader, table)
        delta.begin_history(table, manifest["save"])


def _read_candidates(reader: ShardReader, table: Table) -> None:
    """None in a save of a version that did not count."""
    of = reader.columns.get(f"{table.name}.candidate.key")
    total = of.shape[0] if of else 0
    for first in range(0, total, _SLICE_ROWS):
        count = min(_SLICE_ROWS, total - first)
        insert_candidates(table, {name: reader.read(f"{table.name}.candidate.{name}", first, count)
                                  for name in ("key", "count")})


def agreed(work: Callable[[], _T], group: Group, what: str) -> List[_T]:
    """What the work returns on each rank; if it fails on some rank, every rank raises what the first one has."""
    result, failed = None, None
    try:
        result = work()
    except Exception as error:  # also what frameworks raise, or the other ranks would wait
        failed = error
    answers = objects.allgather_object((result, _text(failed), isinstance(failed, ValueError)),
                                       f"lightcc.embedding.{what}", group.process_set)
    for rank, (_, text, is_value) in enumerate(answers):
        if text:
            told = f"{what}, on rank {group.ranks[rank]}: {text}"
            raise (ValueError if is_value else HorovodInternalError)(told) from failed
    return [answer for answer, _, _ in answers]


def _text(error: Optional[Exception]) -> str:
    if error is None:
        return ""
    if isinstance(error, (OSError, ValueError, HorovodInternalError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def group_of(tables: Sequence[Table], what: str) -> Group:
    if not tables:
        raise ValueError(f"{what}: give at least one table.")
    if any(table.group is not tables[0].group for table in tables):
        raise ValueError(f"{what}: the tables are of several process sets; {what} those of each by themselves.")
    return tables[0].group


def _delta_manifest(identity: str, sequence: int) -> str:
    return f"delta-{identity}-{sequence:06}.json"


def _delta_name(identity: str, sequence: int, rank: int, size: int) -> str:
    return f"delta-{identity}-{sequence:06}-{rank}-of-{size}.safetensors"


def _file_name(identity: str, rank: int, size: int) -> str:
    return f"shard-{identity}-{rank}-of-{size}.safetensors"

"""What of a table has changed since it was saved: rows that were trained, with their slots, keys whose rows went, and
candidates. A save and all deltas that follow it, in order, are the table, bit for bit.

A table's place in that order is its history: the save it descends from, and how many deltas have followed. A delta says
which comes before it, so one that was applied already changes nothing, and one that is missing is noticed.
"""
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy

from lightcc.embedding import lib, rows
from lightcc.embedding import manifest as of_tables
from lightcc.embedding.admission import COUNTED, candidates, insert_candidates
from lightcc.embedding.table import Table

_SLICE_ROWS = 16384


@dataclass(frozen=True)
class Delta:
    """What has changed of one table, on one rank. table: its name; save: of which it descends; sequence: 1 for the
    first delta after that; step_before, step: of the table, from and to; described: what the manifest says of the
    table; rows: by column, as lightcc.embedding.rows has them; gone: keys; counted: key and count of candidates;
    alphas: of the steps between. weights_only: it has no slots, and is not for training.
    """

    table: str
    save: str
    sequence: int
    step_before: int
    step: int
    described: Dict[str, Any]
    rows: Dict[str, numpy.ndarray]
    gone: numpy.ndarray
    counted: Dict[str, numpy.ndarray]
    alphas: numpy.ndarray
    weights_only: bool = False


def take_delta(table: Table, since: Optional[int] = None, weights_only: bool = False) -> Delta:
    """What has changed of this rank's shard since delta number `since` (0: the save itself; None: the last one), which
    must be the last that was taken. The next one begins here. All ranks take it at the same step.

    Errors: ValueError for a table that was not saved or loaded before, another `since`, and where more rows have gone
    than there are (a save is smaller then).

    >>> import os; from lightcc import embedding
    >>> table = embedding.Table("user", 4); folder = hvd.broadcast_object(os.path.abspath("saved"))
    >>> embedding.save(folder, [table]); take_delta(table).sequence, take_delta(table, since=1).sequence
    (1, 2)
    """
    delta = collected(table, weights_only)
    if since is not None and since != delta.sequence - 1:
        raise ValueError(f"table {table.name!r}: changes are known since delta {delta.sequence - 1}, not {since}.")
    taken(table, delta.sequence)
    return delta


def collected(table: Table, weights_only: bool = False) -> Delta:
    """The next delta of this shard, which stays the next one until taken()."""
    if table.history is None:
        raise ValueError(f"table {table.name!r} was not saved or loaded yet, or has gone back or moved to other ranks "
                         "since: a delta follows a save.")
    save, sequence, step_before = table.history
    gone = rows.gone(table, lib.OF_DELTAS)
    if gone is None:
        raise ValueError(f"table {table.name!r}: more rows have gone than there are since the last save or delta. Save "
                         "it in full.")
    of_rows = rows.columns_of(table)
    if weights_only:
        of_rows = {name: of for name, of in of_rows.items() if name in ("key", "check", "weight")}
    changed = joined(rows.slices(table, _SLICE_ROWS, only=tuple(of_rows), changed=lib.OF_DELTAS), of_rows)
    counted = joined([] if weights_only else candidates(table, changed=lib.OF_DELTAS), COUNTED)
    step = table.stats()["steps"]
    return Delta(table.name, save, sequence + 1, step_before, step, of_tables.described(table), changed,
                 numpy.unique(gone), counted, rows.alphas(table)[step_before:], weights_only)


def taken(table: Table, sequence: int) -> None:
    """What has changed until now is in the delta of this number, or in the save (0)."""
    assert table.history is not None
    lib.call("forget_changes", table.handle)
    table.history = (table.history[0], sequence, table.stats()["steps"])


def begin_history(table: Table, save: str) -> None:
    """The table is now as in this save."""
    table.history = (save, 0, 0)
    taken(table, 0)


def apply_delta(table: Table, delta: Delta) -> bool:
    """Makes the changes of a delta; returns False, and does nothing, if it was applied already. Rows that other ranks
    own are passed over: where the number of ranks differs, each rank applies the deltas of all ranks (apply_parts).

    Errors: ValueError, with the table unchanged, for a delta of another table or save, one that another must come
    before, and one without slots.

    >>> import os; from lightcc import embedding
    >>> table = embedding.Table("user", 4); folder = hvd.broadcast_object(os.path.abspath("saved"))
    >>> embedding.save(folder, [table]); embedding.apply_delta(table, embedding.take_delta(table))
    False
    """
    return apply_parts(table, [delta])


def apply_parts(table: Table, deltas: Iterable[Delta]) -> bool:
    """Those of one number, of all ranks that there were."""
    parts = list(deltas)
    if not all(is_next(table, part) for part in parts):
        return False
    for part in parts:
        gone = numpy.ascontiguousarray(part.gone)
        lib.call("erase", table.handle, lib.address(gone), len(gone))
    for part in parts:
        rows.insert(table, part.rows)
        if part.described.get("filter") == table.filter:  # else the load of its save has said so
            insert_candidates(table, part.counted)
    alphas = numpy.concatenate([rows.alphas(table), max((part.alphas for part in parts), key=len)])
    lib.call("set_alphas", table.handle, lib.address(alphas), len(alphas))
    of_tables.restore_numbers(table, parts[0].described)
    taken(table, parts[0].sequence)
    return True


def is_next(table: Table, delta: Delta) -> bool:
    """Whether the delta follows what the table is; False: it was applied. ValueError: neither."""
    what = f"table {table.name!r}: delta {delta.sequence}"
    if delta.table != table.name:
        raise ValueError(f"{what} is of table {delta.table!r}.")
    of_tables.expect_same(table, delta.described, f"delta {delta.sequence}")
    if table.history is None or table.history[0] != delta.save:
        raise ValueError(f"{what} follows another save than the table was loaded from.")
    if delta.sequence <= table.history[1]:
        return False
    if delta.sequence != table.history[1] + 1 or delta.step_before != table.stats()["steps"]:
        raise ValueError(f"{what} follows delta {delta.sequence - 1} of step {delta.step_before}; the table is at "
                         f"delta {table.history[1]}, step {table.stats()['steps']}. One is missing, or the table was "
                         "trained since.")
    if delta.weights_only:
        raise ValueError(f"{what} has weights only, without slots.")
    return True


def joined(parts: Iterable[Dict[str, numpy.ndarray]], columns: rows.Columns) -> Dict[str, numpy.ndarray]:
    """Slices one behind the other."""
    every = list(parts)
    return {name: numpy.concatenate([numpy.empty((0, *width), dtype)] + [part[name] for part in every])
            for name, (dtype, width) in columns.items()}


def arrays_of(delta: Delta) -> Iterator[Tuple[str, numpy.ndarray]]:
    """All that a file holds, by the name of its column."""
    for name, values in delta.rows.items():
        yield f"{delta.table}.{name}", values
    yield f"{delta.table}.gone", delta.gone
    for name, values in delta.counted.items():
        yield f"{delta.table}.candidate.{name}", values
    yield f"{delta.table}.alphas", delta.alphas


def of_file(reader: Any, name: str, manifest: Dict[str, Any]) -> Delta:
    """A rank's delta of a table from its file."""
    described = manifest["tables"][name]
    read: Dict[str, numpy.ndarray] = {}
    for column, of in reader.columns.items():
        if column.startswith(f"{name}."):
            read[column[len(name) + 1:]] = reader.read(column, 0, of.shape[0])
    gone, alphas = read.pop("gone"), read.pop("alphas")
    counted = {column: read.pop(f"candidate.{column}") for column in COUNTED}
    return Delta(name, manifest["save"], manifest["sequence"], described["step_before"], described["steps"], described,
                 read, gone, counted, alphas, manifest["weights_only"])


def with_step_before(table: Table) -> Dict[str, Any]:
    """What a delta's manifest says of a table."""
    assert table.history is not None
    return {**of_tables.described(table), "step_before": table.history[2]}


def same_history(tables: List[Table]) -> Tuple[str, int, int]:
    """Of tables that share a file. ValueError if they were saved at different times."""
    histories = {table.name: table.history and table.history[:2] for table in tables}
    if len(set(histories.values())) != 1 or tables[0].history is None:
        raise ValueError(f"a delta follows a save of the same tables, and these have {histories}: save them in full "
                         "first.")
    return tables[0].history

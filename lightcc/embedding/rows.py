"""A shard's rows as arrays, in slices: for checkpoints and for tests."""
from typing import Dict, Iterator, Mapping, Optional, Tuple

import numpy

from lightcc.embedding import lib
from lightcc.embedding.rules import Rule
from lightcc.embedding.table import Table

Columns = Dict[str, Tuple[numpy.dtype, Tuple[int, ...]]]
_FIELDS = {"key": "keys", "check": "checks", "count": "counts", "last": "lasts", "weight": "weights"}


def columns_of(table: Table, rule: Optional[Rule] = None) -> Columns:
    """What there is of a row: for each column its dtype, and its width if it is no single number.

    key; check, of a table of strings; count, of updates; last, the step of the last one; weight; the slots of the rule
    (None: the table's own).

    >>> from lightcc import embedding
    >>> list(columns_of(embedding.Table("user", 4), Rule("lazy_adam")))
    ['key', 'count', 'last', 'weight', 'm', 'v']
    """
    rule, of_weights = rule or table.rule, numpy.dtype(table.dtype)
    columns: Columns = {"key": (numpy.dtype(numpy.int64), ())}
    if table.strings:
        columns["check"] = numpy.dtype(numpy.uint32), ()
    columns["count"] = columns["last"] = numpy.dtype(numpy.uint32), ()
    columns["weight"] = of_weights, (table.dim,)
    for name, width in (rule.slots(table.dim) if rule else {}).items():
        columns[name] = of_weights, (width,)
    return columns


def slices(table: Table, most: int, log: Optional[int] = None, only: Tuple[str, ...] = (),
           changed: int = 0) -> Iterator[Dict[str, numpy.ndarray]]:
    """The rows of this rank's shard, at most so many at a time: by column, in arrays that are the caller's. only: of
    the columns; none: all. changed: flags of lib; OF_DELTAS: only rows that have changed since the last save or delta.

    Meanwhile no row may be born or erased. log: lib.OF_...: instead, what this log has of rows that have changed since
    it was begun, as they were then.

    >>> from lightcc import embedding
    >>> list(slices(embedding.Table("user", 4), 100))
    []
    """
    cursor = 0
    while True:
        arrays = {name: numpy.empty((most, *width), dtype) for name, (dtype, width) in columns_of(table).items()
                  if not only or name in only}
        rows = _rows(table, arrays, capacity=most, cursor=cursor, changed=changed)
        if log is None:
            lib.call("export", table.handle, rows)
        else:
            lib.call("export_log", table.handle, log, rows)
        if not rows.count:
            return
        cursor = rows.cursor
        yield {name: array[:rows.count] for name, array in arrays.items()}


def insert(table: Table, columns: Mapping[str, numpy.ndarray]) -> int:
    """Puts those rows into this rank's shard that it owns; rows of the same keys are replaced. Returns how many.

    >>> import numpy; from lightcc import embedding
    >>> table, rows = embedding.Table("user", 1), {"key": numpy.array([5]), "weight": numpy.ones((1, 1), "f4")}
    >>> insert(table, rows) == len(table)
    True
    """
    expected = columns_of(table)
    arrays = {name: numpy.ascontiguousarray(array, expected[name][0]) for name, array in columns.items()}
    rows = _rows(table, arrays, capacity=len(arrays["key"]), count=len(arrays["key"]))
    lib.call("import", table.handle, rows)
    return rows.taken


def gone(table: Table, reader: int) -> Optional[numpy.ndarray]:
    """The keys whose rows have gone since this reader, lib.OF_..., has read; None: that is not known.

    >>> from lightcc import embedding
    >>> gone(embedding.Table("user", 4), lib.OF_DELTAS) is None
    True
    """
    count = lib.c_int64()
    lib.call("gone", table.handle, reader, 0, None, count)
    if count.value < 0:
        return None
    keys = numpy.empty(count.value, numpy.int64)
    lib.call("gone", table.handle, reader, len(keys), lib.address(keys), count)
    return keys


def alphas(table: Table) -> numpy.ndarray:
    """float64: the factor of each step until now, which SparseAdam needs of the past.

    >>> from lightcc import embedding
    >>> alphas(embedding.Table("user", 4)).shape
    (0,)
    """
    values = numpy.empty(table.counters().steps, numpy.float64)
    lib.call("alphas", table.handle, 1, len(values), lib.address(values))
    return values


def _rows(table: Table, arrays: Mapping[str, numpy.ndarray], **fields: int) -> lib.Rows:
    rows = lib.struct(lib.Rows, **fields)
    for name, field in _FIELDS.items():
        setattr(rows, field, lib.address(arrays.get(name)))
    for index, name in enumerate(table.rule.slots(table.dim) if table.rule else ()):
        rows.slots[index] = lib.address(arrays.get(name))
    return rows

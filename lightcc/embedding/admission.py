"""Keys that are counted before they get a row: those of this rank's shard as arrays, for checkpoints.

Of a table with a Bloom filter a "key" is the number of 32 bits of it, and its "count" these bits.
"""
import logging
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy

from lightcc.embedding import lib, rows
from lightcc.embedding.owners import BUCKETS, buckets_of
from lightcc.embedding.table import Table

_logger = logging.getLogger("lightcc")
COUNTED: rows.Columns = {"key": (numpy.dtype(numpy.int64), ()), "count": (numpy.dtype(numpy.uint32), ())}


def candidates(table: Table, changed: int = 0, least: int = 1) -> Iterator[Dict[str, numpy.ndarray]]:
    """key, int64, and count, uint32, of the candidates of this rank's shard, in slices of at least so many but for the
    last one. changed: flags of lib, as those of rows.slices; OF_DELTAS: only those that have changed since the last
    save or delta.

    >>> from lightcc import embedding
    >>> sum(len(part["key"]) for part in candidates(embedding.Table("user", 4, min_count=3)))
    0
    """
    parts: List[Dict[str, numpy.ndarray]] = []
    for part in range(lib.CANDIDATE_PARTS):
        keys, counts = _empty(_export(table, part, changed))
        _export(table, part, changed, keys, counts)
        parts.append({"key": keys, "count": counts})
        total = sum(len(one["key"]) for one in parts)
        if total and (total >= least or part + 1 == lib.CANDIDATE_PARTS):
            yield {name: numpy.concatenate([one[name] for one in parts]) for name in COUNTED}
            parts = []


def held(table: Table, changed: int = 0) -> int:
    """How many candidates() has.

    >>> from lightcc import embedding
    >>> held(embedding.Table("user", 4, min_count=3))
    0
    """
    if table.filter is None and not changed:
        return table.stats()["candidates"]
    return sum(_export(table, part, changed) for part in range(lib.CANDIDATE_PARTS))


def buckets_of_candidates(table: Table, keys: numpy.ndarray) -> numpy.ndarray:
    """The bucket of each, which has an owner.

    >>> import numpy; from lightcc import embedding
    >>> table = embedding.Table("user", 4, min_count=3, admission=embedding.Bloom(8 << 20))
    >>> buckets_of_candidates(table, numpy.array([0, 31, 32])).tolist()
    [0, 0, 1]
    """
    return buckets_of(keys) if table.filter is None else keys // (table.filter["bytes"] // 4 // BUCKETS)


def fit(table: Table, saved: Dict[str, Any]) -> bool:
    """Whether candidates that were saved are counted here in the same way; saved: the table's part of the manifest. If
    not, a warning says that counting begins anew."""
    if table.min_count == 1 or saved.get("filter") == table.filter:
        return True
    if table.group.rank == 0:
        _logger.warning("table %r: keys without a row were counted %s when it was saved, and are counted %s here; "
                        "their counts are not read, and counting begins anew.", table.name, _told(saved.get("filter")),
                        _told(table.filter))
    return False


def _told(shape: Optional[Dict[str, int]]) -> str:
    return f"in a filter of {shape}" if shape else "exactly"


def candidates_of_log(table: Table, log: int, total: int, most: int) -> Iterator[Dict[str, numpy.ndarray]]:
    """The first `total` candidates whose counts have changed since this log (lib.OF_...) began, as they were then,
    count 0 if they were none; at most so many at a time.

    >>> from lightcc import embedding
    >>> table = embedding.Table("user", 4, min_count=3); lib.call("begin_log", table.handle, lib.OF_COMMIT)
    >>> list(candidates_of_log(table, lib.OF_COMMIT, logged_candidates(table, lib.OF_COMMIT), 100))
    []
    """
    for first in range(0, total, most):
        keys, counts = _empty(min(most, total - first))
        lib.call("export_candidate_log", table.handle, log, first, len(keys), lib.address(keys), lib.address(counts),
                 lib.c_int64())
        yield {"key": keys, "count": counts}


def logged_candidates(table: Table, log: int) -> int:
    """How many a log has until now.

    >>> from lightcc import embedding
    >>> logged_candidates(embedding.Table("user", 4, min_count=3), lib.OF_COMMIT)
    0
    """
    count = lib.c_int64()
    lib.call("export_candidate_log", table.handle, log, 0, 0, None, None, count)
    return count.value


def insert_candidates(table: Table, columns: Dict[str, numpy.ndarray]) -> None:
    """Puts those into this rank's shard that it owns; count 0: the key is no candidate any more. A table that does not
    count passes over all.

    >>> import numpy; from lightcc import embedding
    >>> table = embedding.Table("user", 4, min_count=3)
    >>> insert_candidates(table, {"key": numpy.array([7]), "count": numpy.array([2])})
    >>> table.stats()["candidates"] <= 1
    True
    """
    keys = numpy.ascontiguousarray(columns["key"], numpy.int64)
    counts = numpy.ascontiguousarray(columns["count"], numpy.uint32)
    lib.call("import_candidates", table.handle, lib.address(keys), lib.address(counts), len(keys))


def _export(table: Table, part: int, changed: int, keys: Optional[numpy.ndarray] = None,
            counts: Optional[numpy.ndarray] = None) -> int:
    """Fills the arrays, and returns how many there are."""
    count = lib.c_int64()
    lib.call("export_candidates", table.handle, part, changed, 0 if keys is None else len(keys), lib.address(keys),
             lib.address(counts), count)
    return count.value


def _empty(count: int) -> Tuple[numpy.ndarray, numpy.ndarray]:
    return numpy.empty(count, numpy.int64), numpy.empty(count, numpy.uint32)

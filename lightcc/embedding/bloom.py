"""A size that does not grow for the counts of keys that have no row yet: admission=Bloom(...)."""
import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Tuple

import numpy

from lightcc.embedding.owners import BUCKETS

_logger = logging.getLogger("lightcc")
LINE_BYTES = 64
SMALLEST = BUCKETS * LINE_BYTES  # one line a bucket
_LARGEST = SMALLEST << 20
_WIDTHS = {4: 2, 16: 4, 256: 8, 65536: 16}  # the largest min_count, and the bits of a counter


@dataclass(frozen=True)
class Bloom:
    """Counts the keys of a table with min_count in a counting Bloom filter instead of 14 to 18 bytes a key.

    bytes: of all ranks together, which share them as they share the rows; at least 4 MiB (4,194,304), rounded up to
    whole ones. error: the most of the keys that may be let in too early while the filter has counted keys(min_count)
    of them; from 1e-6 to 0.5. min_count is at most 65,536 then.

    The filter never counts too low. It forgets no key: one whose row went has the count that it had before it was let
    in. Errors: ValueError for other numbers.
    Source: Bloom 1970; Fan et al. 2000 (counters); Estan and Varghese 2002 (conservative update); Putze et al. 2007
    (all counters of a key in one cache line).

    >>> from lightcc import embedding
    >>> embedding.Bloom(4 << 20).keys(min_count=3) > 1_400_000
    True
    """

    bytes: int
    error: float = 0.01

    def __post_init__(self) -> None:
        if int(self.bytes) != self.bytes or not SMALLEST <= self.bytes <= _LARGEST:
            raise ValueError(f"{self}: bytes must be a whole number from {SMALLEST} (4 MiB) to {_LARGEST}, of all "
                             "ranks together.")
        if not 1e-6 <= self.error <= 0.5:
            raise ValueError(f"{self}: error must be from 1e-6 to 0.5.")

    def shape(self, min_count: int) -> Dict[str, int]:
        """Of the filter: bytes; hashes, a key's counters, as many as let it count the most keys; bits, of a counter.
        ValueError for a min_count above 65,536.

        >>> Bloom(5 << 20, error=0.01).shape(min_count=3)
        {'bytes': 8388608, 'hashes': 6, 'bits': 2}
        """
        return {"bytes": self._lines * SMALLEST, "hashes": self._best(min_count)[1], "bits": self._bits(min_count)}

    def keys(self, min_count: int) -> int:
        """How many keys without a row the filter counts, on all ranks together, before more than `error` of those that
        come next are let in too early. ValueError for a min_count above 65,536.

        >>> Bloom(8 << 20).keys(3) == 2 * Bloom(4 << 20).keys(3), Bloom(4 << 20).keys(3) > Bloom(4 << 20).keys(100)
        (True, True)
        """
        return int(self._best(min_count)[0] * BUCKETS) * self._lines

    def error_of(self, keys: float, min_count: int) -> float:
        """The share of further keys that are let in too early when so many were counted, on all ranks together: an
        estimate, which is `error` at keys(min_count). ValueError for a min_count above 65,536.

        >>> bloom = Bloom(8 << 20, error=0.01)
        >>> bloom.error_of(0, 3), round(bloom.error_of(bloom.keys(3), 3), 5), bloom.error_of(2 * bloom.keys(3), 3) > 0.1
        (0.0, 0.01, True)
        """
        counters = LINE_BYTES * 8 // self._bits(min_count)
        return _error(counters, self._best(min_count)[1], keys / (self._lines * BUCKETS))

    @property
    def _lines(self) -> int:
        """Of 64 bytes, of each of the 65,536 buckets of keys."""
        return -(-int(self.bytes) // SMALLEST)

    def _bits(self, min_count: int) -> int:
        for most, bits in _WIDTHS.items():
            if min_count <= most:
                return bits
        raise ValueError(f"{self}: min_count={min_count}; a filter counts to 65536.")

    def _best(self, min_count: int) -> Tuple[float, int]:
        """Keys a line, and the hashes with which they are most."""
        return _best(LINE_BYTES * 8 // self._bits(min_count), self.error)


class Watch:
    """Looks at how many keys a table's filter has counted, on all ranks together, and warns once when that is more than
    its error allows. table: its name.

    >>> watch = Watch(Bloom(4 << 20), 3, "user"); watch.look(1_000_000); watch.has_warned
    False
    """

    def __init__(self, bloom: Bloom, min_count: int, table: str):
        self._bloom, self._min_count, self._table = bloom, min_count, table
        self._most = bloom.keys(min_count)
        self.has_warned = False

    def look(self, counted: int) -> None:
        if self.has_warned or counted <= self._most:
            return
        self.has_warned = True
        bloom, times = self._bloom, -(-2 * counted // self._most)
        larger = Bloom(min(times * bloom.shape(self._min_count)["bytes"], _LARGEST), bloom.error)
        _logger.warning(
            "table %r: its filter has counted about %d keys, and about %.2g of those that come next get their row too "
            "early. %s keeps its error up to %d keys. Make the table with admission=%s, which keeps it up to %d; "
            "counting begins anew then.", self._table, counted, bloom.error_of(counted, self._min_count), bloom,
            self._most, larger, larger.keys(self._min_count))


@lru_cache(maxsize=None)
def _best(counters: int, error: float) -> Tuple[float, int]:
    return max((_load(counters, hashes, error), hashes) for hashes in range(1, 21))


def _load(counters: int, hashes: int, error: float) -> float:
    """The keys of a line with which a further key finds all its counters taken with probability `error`."""
    low, high = 0.0, float(counters)
    for _ in range(40):
        load = (low + high) / 2
        low, high = (load, high) if _error(counters, hashes, load) <= error else (low, load)
    return low


def _error(counters: int, hashes: int, load: float) -> float:
    """The probability with which a further key of a line finds all its counters taken; load: the line's keys, on the
    average."""
    if load <= 0:
        return 0.0
    keys = numpy.arange(1, int(load + 12 * math.sqrt(load) + 30))
    poisson = numpy.exp(keys * math.log(load) - load - numpy.cumsum(numpy.log(keys)))
    return float((poisson * (1 - (1 - 1 / counters) ** (keys * hashes)) ** hashes).sum())

"""A size that does not grow for the counts of keys that have no row yet: admission=Bloom(...)."""
import math
from dataclasses import dataclass
from typing import Dict, Tuple

import numpy

from lightcc.embedding.owners import BUCKETS

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
        counters = LINE_BYTES * 8 // self._bits(min_count)
        return max((_load(counters, hashes, self.error), hashes) for hashes in range(1, 21))


def _load(counters: int, hashes: int, error: float) -> float:
    """The keys of a line with which a further key finds all its counters taken with probability `error`."""
    low, high = 0.0, float(counters)
    for _ in range(40):
        load = (low + high) / 2
        keys = numpy.arange(1, int(load + 12 * math.sqrt(load) + 30))
        poisson = numpy.exp(keys * math.log(load) - load - numpy.cumsum(numpy.log(keys)))
        taken = (1 - (1 - 1 / counters) ** (keys * hashes)) ** hashes
        low, high = (load, high) if (poisson * taken).sum() <= error else (low, load)
    return low

"""Which rank owns a key: the top 16 bits of its hash name one of 65,536 buckets, and a map gives each bucket's rank."""
from typing import Sequence

import numpy

from lightcc.embedding import lib

BUCKETS = 1 << 16


def first_map(ranks: int) -> numpy.ndarray:
    """uint16, the owner of each bucket, for a new table on so many ranks: each gets as many as any other, or one more.

    >>> [int((first_map(3) == rank).sum()) for rank in range(3)]
    [21846, 21845, 21845]
    """
    return moved(numpy.zeros(BUCKETS, numpy.uint16), ranks)


def moved(owners: numpy.ndarray, ranks: int) -> numpy.ndarray:
    """The map for another number of ranks: a bucket stays where it can, and ranks differ by at most one bucket.

    Ranks that are more give none up but what exceeds their new share; those that are gone give all. Which buckets move
    depends on the map alone, so all ranks find the same.

    >>> before = first_map(4); after = moved(before, 5); round(float((before != after).mean()), 3)
    0.2
    >>> round(float((before != moved(before, 3)).mean()), 3)
    0.25
    """
    counts = numpy.bincount(owners, minlength=max(ranks, int(owners.max()) + 1))
    most_first = sorted(range(ranks), key=lambda rank: (-counts[rank], rank))  # one more goes to those who have most
    share = {rank: len(owners) // ranks + (place < len(owners) % ranks) for place, rank in enumerate(most_first)}
    result = owners.astype(numpy.uint16, copy=True)
    free = [numpy.flatnonzero(owners == rank)[share.get(rank, 0):] for rank in range(len(counts))]
    to_give = numpy.sort(numpy.concatenate(free))
    takers = [numpy.full(max(share[rank] - int(counts[rank]), 0), rank, numpy.uint16) for rank in range(ranks)]
    result[to_give] = numpy.concatenate(takers)
    return result


def buckets_of(keys: numpy.ndarray) -> numpy.ndarray:
    """The bucket of each key, as csrc/embedding/hash.h has it.

    >>> table = __import__("lightcc.embedding").embedding.Table("user", 1); keys = numpy.arange(-5, 1000)
    >>> ranks, of_bucket = numpy.empty(len(keys), numpy.uint16), numpy.empty(BUCKETS, numpy.uint16)
    >>> lib.call("owner_of", table.handle, lib.address(keys), len(keys), lib.address(ranks))
    >>> lib.call("owners", table.handle, lib.address(of_bucket)); bool((of_bucket[buckets_of(keys)] == ranks).all())
    True
    """
    with numpy.errstate(over="ignore"):
        mixed = keys.astype(numpy.int64).view(numpy.uint64) + numpy.uint64(0x9e3779b97f4a7c15)
        mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
        mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
    return ((mixed ^ (mixed >> numpy.uint64(31))) >> numpy.uint64(48)).astype(numpy.int64)


def renumbered(owners: numpy.ndarray, new_rank_of: Sequence[int], ranks: int) -> numpy.ndarray:
    """The map for other ranks, with as few moves as can be. new_rank_of: of each rank before its number among the
    `ranks` that there are now; -1: it has gone.

    >>> before = first_map(3); after = renumbered(before, [1, -1, 0], 3)
    >>> bool((after[before == 2] == 0).all()), round(float((after == 2).mean()), 3)
    (True, 0.333)
    """
    known, result = numpy.array(new_rank_of, numpy.int32), numpy.empty(BUCKETS, numpy.uint16)
    before = numpy.ascontiguousarray(owners, numpy.uint16)
    lib.call("move_owners", lib.address(before), len(known), lib.address(known), ranks, lib.address(result))
    return result

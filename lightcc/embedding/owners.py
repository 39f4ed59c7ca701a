"""Which rank owns a key: the top 16 bits of its hash name one of 65,536 buckets, and a map gives each bucket's rank."""
import numpy

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

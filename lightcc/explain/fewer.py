"""What fewer exchanges would bring: the seconds that an exchange adds to a step, and the bytes a second that a host
sends, with DistributedOptimizer, DelayedGradients, LocalSGD and DiLoCo (docs/fewer_exchanges.md). Pure arithmetic
over what an all-reduce takes."""
import math
from collections.abc import Callable
from typing import NamedTuple, Optional

BACKWARD_SHARE = 2 / 3  # of a step's computation: what DistributedOptimizer can hide an exchange behind


class Way(NamedTuple):
    """A way to train, and what a step of it is predicted to take."""
    name: str
    step_s: float
    exposed_s: float    # of a step, on average: what no computation hides
    bytes_per_s: float  # that a host sends


def ways(seconds_of: Callable[[int], float], nbytes: int, hosts: int, compute_s: float, sync_every: int, fragments: int,
         delay: int, compressed_share: float = 0.0,
         compressed_of: Optional[Callable[[int], Optional[float]]] = None) -> list[Way]:
    """The ways to train a model of `nbytes` bytes of gradients.

    seconds_of: what an all-reduce of so many bytes takes; compressed_of: with a codec that sends compressed_share of
    each byte, None where it cannot run: its ways are left out then. compute_s: of a step without communication. delay:
    of DiLoCo. ValueError for numbers that cannot be.

    >>> [(way.name, round(way.step_s, 2)) for way in ways(lambda nbytes: nbytes / 1e6, 1_000_000, 2, 1.0, 10, 2, 1)]
    [('DistributedOptimizer', 1.33), ('DelayedGradients', 1.0), ('LocalSGD', 1.1), ('DiLoCo', 1.0)]
    """
    if sync_every < 1 or not 1 <= fragments <= sync_every or not 0 <= delay < sync_every:
        raise ValueError(f"--sync-every {sync_every} --fragments {fragments} --delay {delay}: fragments are 1 to "
                         "sync-every, and the delay is shorter than that")
    if not 0 < compute_s < math.inf:
        raise ValueError("--compute-ms: give what a step computes, above 0")
    whole, part = seconds_of(nbytes), seconds_of(-(-nbytes // fragments))
    sent = 2 * (hosts - 1) / hosts * nbytes  # of a ring, by each host
    found = [_way("DistributedOptimizer", compute_s, max(0.0, whole - BACKWARD_SHARE * compute_s), sent),
             _way("DelayedGradients", compute_s, max(0.0, whole - compute_s), sent),
             _way("LocalSGD", compute_s, whole / sync_every, sent / sync_every),
             _way("DiLoCo", compute_s, _of_fragments(part, fragments, sync_every, delay, compute_s),
                  sent / sync_every)]
    if compressed_share and compressed_of is not None:
        share = (hosts - 1) * compressed_share * nbytes  # each host sends its message to all others
        whole_coded, part_coded = compressed_of(nbytes), compressed_of(-(-nbytes // fragments))
        if whole_coded is not None:
            found.append(_way("DistributedOptimizer, codec", compute_s,
                              max(0.0, whole_coded - BACKWARD_SHARE * compute_s), share))
        if part_coded is not None:
            found.append(_way("DiLoCo, codec", compute_s,
                              _of_fragments(part_coded, fragments, sync_every, delay, compute_s), share / sync_every))
    return found


def _of_fragments(part: float, fragments: int, sync_every: int, delay: int, compute_s: float) -> float:
    """Exposed seconds of a step: those that the delay does not hide, or that the cable has no time for."""
    late = fragments * max(0.0, part - delay * compute_s) / sync_every
    return max(late, fragments * part / sync_every - compute_s, 0.0)


def _way(name: str, compute_s: float, exposed_s: float, sent: float) -> Way:
    step_s = compute_s + exposed_s
    return Way(name, step_s, exposed_s, sent / step_s)

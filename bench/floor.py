"""When the gradients of a step can all be reduced at the earliest, from when they are ready and what cables carry.

It knows nothing of the engine that it judges. The network is a queue of a fluid: of an all-reduce between H hosts each
cable carries 2 (H - 1) / H of the bytes each way, in the mean over the hosts, whatever the algorithm. A gradient enters
the queue when it is ready; there gradients may be fused, split and taken in any order at no cost, and a host adds up
its ranks in no time. A cable that never rests while something waits is done at

    max over t of (t + bytes that are ready at t or later * 2 (H - 1) / H / goodput)

in every order, and nothing is done earlier: those bytes cannot enter a cable before t. Then one round of start-ups is
added, for what was sent last has to arrive: a host that sends to one other at a time has heard of all after log2 H.
"""
import math
from typing import Sequence


def bound_s(hosts: int, nbytes: int, goodput: float) -> float:
    """An all-reduce of so many bytes takes at least that; goodput: bytes a second of a host's cable, each way."""
    return 2 * (hosts - 1) / hosts * nbytes / goodput


def last_reduced_s(ready_s: Sequence[float], nbytes: Sequence[int], hosts: int, goodput: float, latency_s: float
                   ) -> float:
    """When the last gradient is reduced, on the clock of ready_s.

    >>> last_reduced_s([1.0, 2.0], [100, 300], hosts=2, goodput=100.0, latency_s=0.5)
    5.5
    """
    done = 0.0
    for ready, size in sorted(zip(ready_s, nbytes)):
        done = max(done, ready) + bound_s(hosts, size, goodput)
    return done + math.ceil(math.log2(hosts)) * latency_s


def exposed_s(ready_s: Sequence[float], nbytes: Sequence[int], hosts: int, goodput: float, latency_s: float) -> float:
    """How much of that is left when computation ends, which is when the last gradient is ready."""
    return last_reduced_s(ready_s, nbytes, hosts, goodput, latency_s) - max(ready_s)

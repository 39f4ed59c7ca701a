"""When the fragments of a model are exchanged by ranks that make steps of their own: a function of the step's number,
so that all ranks decide alike without a word. LocalSGD and DiLoCo of every framework stand on it.

Steps count from 1. A fragment is due every `sync_every` steps; fragments take turns, at distances as equal as whole
numbers allow, so that no step has to send all bytes. What a fragment sends after a step is taken in `delay` steps
later. Source of both: Douillard et al., Streaming DiLoCo, 2025 (arXiv 2501.18512), sections 2.1 and 2.2.
"""
from typing import List, NamedTuple, Sequence, Tuple

from lightcc.core.agreed_settings import whole


class ExchangeSchedule(NamedTuple):
    """
    >>> schedule = ExchangeSchedule(sync_every=4, fragments=2, delay=1)
    >>> [(step, *schedule.at(step)) for step in range(1, 6)]
    [(1, [], []), (2, [], [0]), (3, [0], []), (4, [], [1]), (5, [1], [])]
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def at(self, step: int) -> Tuple[List[int], List[int]]:
        """After a step: the fragments whose exchange ends, and those whose exchange begins; the latter also end at once
        if there is no delay."""
        return self._due(step - self.delay) if self.delay else [], self._due(step)

    def _due(self, step: int) -> List[int]:
        return [fragment for fragment in range(self.fragments)
                if step > 0 and (step - (fragment + 1) * self.sync_every // self.fragments) % self.sync_every == 0]


def checked(what: str, sync_every: int, fragments: int = 1, delay: int = 0) -> ExchangeSchedule:
    """A schedule. ValueError, which begins with `what`, for numbers that make none.

    >>> checked("hvd.LocalSGD", 4)
    ExchangeSchedule(sync_every=4, fragments=1, delay=0)
    """
    whole(what, "sync_every", sync_every, 1)
    whole(what, "fragments", fragments, 1)
    whole(what, "delay", delay, 0)
    if fragments > sync_every:
        raise ValueError(f"{what}: fragments={fragments} and sync_every={sync_every}: fragments take turns, at most "
                         "one a step; give at most as many as steps.")
    if delay >= sync_every:
        raise ValueError(f"{what}: delay={delay} and sync_every={sync_every}: what a fragment has sent must be taken "
                         "in before its next turn; give a smaller delay.")
    return ExchangeSchedule(sync_every, fragments, delay)


def in_fragments(sizes: Sequence[int], fragments: int) -> List[List[int]]:
    """Cuts tensors of these sizes, in their order, into so many parts of sizes as equal as a cut between tensors
    allows. Returns the indices of each part, of which none is empty; there are at least as many tensors.

    >>> in_fragments([4, 1, 1, 1, 1], 2)
    [[0], [1, 2, 3, 4]]
    """
    parts: List[List[int]] = [[] for _ in range(fragments)]
    total, before, part = max(sum(sizes), 1), 0, 0
    for index, size in enumerate(sizes):
        middle = (before + size / 2) * fragments / total
        while part < fragments - 1 and parts[part] and (middle >= part + 1 or
                                                        len(sizes) - index <= fragments - 1 - part):
            part += 1
        parts[part].append(index)
        before += size
    return parts

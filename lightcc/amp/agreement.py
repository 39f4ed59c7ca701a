"""How ranks agree on the level of the next step: one small asynchronous all-reduce, which travels during backward.

Each rank sends its loss and a vote. They are added up, so all ranks read the same numbers: the mean loss, and how many
ranks have voted for each level. The levels that a policy may choose, and the level now, are in the operation's name. So
a rank that does not vote at all is named by the core's warnings and errors, and the timeline has a row for each level.
"""
import contextlib
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from lightcc.core import lib, objects, ops
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet
from lightcc.core.wrapper_arguments import stays_here


class Agreed(NamedTuple):
    """What all ranks know together. loss: the mean over the ranks that have sent one, None if none has. votes: by
    level, from the most precise, how many ranks asked for it."""

    loss: Optional[float]
    votes: Tuple[int, ...]


class Agreement:
    """One vote in flight at a time. All ranks of the set call gather() and start() in the same order."""

    def __init__(self, process_set: ProcessSet):
        self._process_set = process_set
        self._name, self._epoch, self._handle = "", 0, 0
        self._mine: Any = None
        self._agreed: Optional[Agreed] = None

    def gather(self, mine: Any) -> List[Any]:
        """What each rank gives, by rank."""
        if stays_here(self._process_set):
            return [mine]
        return objects.allgather_object(mine, "lightcc.amp.policies", self._process_set)

    def start(self, name: str, vote: int, levels: int, loss: Any) -> None:
        """vote: which of so many levels, from the most precise. loss: a number; None: this rank has none yet."""
        previous = _latest.get(name)
        if previous is not None:  # its own, or that of another training in this process with the same levels
            previous.settle()
        _latest[name] = self
        numbers = [0.0 if loss is None else 1.0, 0.0, *(float(i == vote) for i in range(levels))]
        self._agreed, self._name, self._epoch = None, name, lib.epoch
        self._handle, self._mine = self._sent(name, numbers, loss)

    def in_flight(self) -> bool:
        """Whether there is something to take."""
        self.settle()
        return self._agreed is not None

    def settle(self) -> None:
        """Waits for what is in flight and keeps it. What the end of an epoch has cut off is lost."""
        if self._mine is None:
            return
        (handle, mine), self._mine = (self._handle, self._mine), None
        if handle and self._epoch != lib.epoch:
            return
        numbers = self._received(handle, mine)
        if numbers is not None:
            count, total = numbers[0], numbers[1]
            self._agreed = Agreed(total / count if count else None, tuple(int(votes) for votes in numbers[2:]))

    def take(self) -> Agreed:
        """What start() has led to; once."""
        self.settle()
        agreed, self._agreed = self._agreed, None
        assert agreed is not None  # in_flight() says so
        return agreed

    def drop(self) -> None:
        """Forgets it, also one that a lost rank has ended."""
        with contextlib.suppress(HorovodInternalError):
            self.settle()
        self._agreed = None

    # How numbers travel; on a GPU in another way

    def _sent(self, name: str, numbers: Sequence[float], loss: Any) -> Tuple[int, Any]:
        """numbers: what is added up, with the loss's place in [1]. Returns a handle, 0 if nothing travels, and what
        _received needs."""
        mine = np.array(numbers)
        mine[1] = 0.0 if loss is None else loss
        return (0 if stays_here(self._process_set) else self._submit(name, mine)), mine

    def _received(self, handle: int, mine: Any) -> Optional[Sequence[float]]:
        """None: it was cut off."""
        mine = ops.synchronize(handle) if handle else mine
        return None if mine is None else mine.tolist()

    def _submit(self, name: str, mine: Any) -> int:
        return ops.allreduce_async_(mine, name=name, op=ops.ReduceOps.Sum, process_set=self._process_set)


_latest: Dict[str, Agreement] = {}  # by name: who has used it last

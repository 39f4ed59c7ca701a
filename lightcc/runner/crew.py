"""The ranks of this host as events (messages.py), for supervise.py and for an agent alike.

A crew is the ranks of one host: send(rank, signum), pause(on), end() to its ranks; from them come the events that
its callables in the selector return. The other crew is remote.py's.
"""

import functools
import os
import selectors
from collections.abc import Iterator, Sequence
from typing import Optional

from lightcc.runner import groups
from lightcc.runner.local import Rank
from lightcc.runner.messages import Ended, Message, Output, Over, Started

READ_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20  # what a pipe can still hold after its writer has ended


class Here:
    def __init__(self, host: str, ranks: Sequence[Rank], selector: selectors.BaseSelector,
                 pipes: selectors.BaseSelector) -> None:
        """pipes: an empty one, which goes into the selector, so that one call pauses all reading."""
        self._host = host
        self._ranks = {rank.number: rank for rank in ranks}
        self._selector = selector
        self._pipes = pipes
        self._paused = True
        for rank in ranks:
            selector.register(rank.pidfd, selectors.EVENT_READ, functools.partial(self._ended, rank))
            for stream, pipe in ((1, rank.process.stdout), (2, rank.process.stderr)):
                pipes.register(pipe.fileno(), selectors.EVENT_READ, (rank.number, stream))
        self.pause(False)

    def started(self) -> list[Message]:
        return [Started(rank.number, rank.pid) for rank in self._ranks.values()]

    def send(self, rank: int, signum: int) -> None:
        self._ranks[rank].send(signum)

    def pause(self, on: bool) -> None:
        if on != self._paused:
            self._paused = on
            if on:
                self._selector.unregister(self._pipes.fileno())
            else:
                self._selector.register(self._pipes.fileno(), selectors.EVENT_READ, self._read)

    def end(self) -> Iterator[Message]:
        """What a rank leaves in its group ends with the job; only then its pipes say all they have to say."""
        stuck = groups.end([rank.pid for rank in self._ranks.values()])
        self.pause(True)
        for key in list(self._pipes.get_map().values()):
            left = MAX_PIPE_BYTES  # a process that left the group may still be writing
            while left > 0 and (chunk := _read_some(key.fd)):
                yield Output(*key.data, chunk)
                left -= len(chunk)
            yield Output(*key.data, b"")
            self._pipes.unregister(key.fd)
        yield Over(self._host, stuck)

    def _ended(self, rank: Rank) -> list[Message]:
        self._selector.unregister(rank.pidfd)
        return [Ended(rank.number, rank.exit_code())]

    def _read(self) -> Iterator[Message]:
        for key, _ in self._pipes.select(0):
            chunk = _read_some(key.fd)
            if chunk is not None:
                yield Output(*key.data, chunk)
            if chunk == b"":
                self._pipes.unregister(key.fd)


def _read_some(fd: int) -> Optional[bytes]:
    """b"" at the end, None when there is nothing now."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None

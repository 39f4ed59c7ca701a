"""The ranks of this host as events (messages.py), for event_loop.py and for an agent alike.

The ranks of a host are one object with send(rank, signum), give(input), pause(on) and end(); the callables that it puts
into the selector return the ranks' events. HostRanks is that of the host where this process runs; remote.Agent has the
same methods for another host.
"""

import contextlib
import functools
import os
import selectors
import socket
from collections.abc import Iterator, Sequence
from typing import Optional

from lightcc.launch import groups
from lightcc.launch.local import Rank
from lightcc.launch.messages import Ended, Message, Output, Over, Said, Started
from lightcc.launch.output import Sink
from lightcc.launch.standard_input import Feed

READ_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20  # what a pipe can still hold after its writer has ended


class HostRanks:
    def __init__(self, host: str, ranks: Sequence[Rank], selector: selectors.BaseSelector,
                 pipes: selectors.BaseSelector) -> None:
        """pipes: an empty selector, which is registered in `selector`, so that one call pauses all reading."""
        self.host = host
        self._ranks: dict[int, Rank] = {}
        self._selector = selector
        self._pipes = pipes
        self._paused = True
        self._feed: Optional[Feed] = None  # rank 0's input
        self._talks: dict[int, Sink] = {}  # what ranks are told, on its way
        for rank in ranks:
            self.add(rank)
        self.pause(False)

    def add(self, rank: Rank) -> None:
        self._ranks[rank.number] = rank
        if rank.process.stdin:
            self._feed = Feed(rank.process.stdin, self._selector)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, functools.partial(self._ended, rank))
        for stream, pipe in ((1, rank.process.stdout), (2, rank.process.stderr)):
            self._pipes.register(pipe, selectors.EVENT_READ, (rank.number, stream))
        if rank.talk:
            self._talks[rank.number] = Sink(rank.talk.fileno(), f"the connection to rank {rank.number}")
            self._selector.register(rank.talk, selectors.EVENT_READ, functools.partial(self._hear, rank))

    def started(self) -> list[Message]:
        return [Started(rank.number, rank.pid) for rank in self._ranks.values()]

    def tell(self, rank: int, chunk: bytes) -> None:
        """By the socket that it has for that, if it has not closed it. What it says is an event (Said)."""
        if rank in self._talks:
            self._talks[rank].put(None, chunk)

    def hang_up(self) -> bool:
        """Ends all talks; False: there are none."""
        for number in self._talks:
            with contextlib.suppress(OSError):  # it has hung up itself
                self._ranks[number].talk.shutdown(socket.SHUT_RDWR)
        return bool(self._talks)

    def flush(self) -> None:
        """What ranks were told and were too slow to take. Is to be called often."""
        for talk in self._talks.values():
            talk.flush()

    def send(self, rank: int, signum: int) -> None:
        self._ranks[rank].send(signum)

    def give(self, chunk: bytes) -> None:
        """Writes to rank 0's standard input; b"" ends it. What the rank has read is an event (Taken)."""
        if self._feed:
            self._feed.put(chunk)

    def pause(self, on: bool) -> None:
        if on != self._paused:
            self._paused = on
            if on:
                self._selector.unregister(self._pipes.fileno())
            else:
                self._selector.register(self._pipes.fileno(), selectors.EVENT_READ, self._read)

    def end(self) -> Iterator[Message]:
        """What a rank leaves in its group ends with the job; only then its pipes have all that it wrote."""
        if self._feed:
            self._feed.close()
        stuck = groups.end([rank.pid for rank in self._ranks.values()])
        self.pause(True)
        for key in list(self._pipes.get_map().values()):
            left = MAX_PIPE_BYTES  # a process that left the group may still be writing
            while left > 0 and (chunk := _read_some(key.fd)):
                yield Output(*key.data, chunk)
                left -= len(chunk)
            yield Output(*key.data, b"")
            self._pipes.unregister(key.fd)
        yield Over(self.host, stuck)

    def _ended(self, rank: Rank) -> list[Message]:
        said: list[Message] = []
        while last_words := self._hear(rank):  # which come before its end
            said += last_words
        self._selector.unregister(rank.pidfd)
        rank.unwatch()
        return [*said, Ended(rank.number, rank.exit_code())]

    def _hear(self, rank: Rank) -> list[Message]:
        if rank.number not in self._talks:
            return []
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = rank.talk.recv(READ_BYTES, socket.MSG_DONTWAIT)
        if chunk:
            return [Said(rank.number, chunk)]
        del self._talks[rank.number]
        self._selector.unregister(rank.talk)
        rank.talk.close()
        return []

    def _read(self) -> Iterator[Message]:
        for key, _ in self._pipes.select(0):
            chunk = _read_some(key.fd)
            if chunk is not None:
                yield Output(*key.data, chunk)
            if chunk == b"":
                self._pipes.unregister(key.fd)
                key.fileobj.close()


def _read_some(fd: int) -> Optional[bytes]:
    """b"" at the end, None when there is nothing now."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None

"""python -m lightcc.runner.agent: starts the ranks of a host that lightccrun is not on. It is started by ssh or its
like, hears from the launcher on stdin and tells it on stdout (messages.py) what the ranks say and how they end.

It goes when the launcher does: at the end of stdin, and when nobody reads stdout, it ends its ranks and itself. If it
is killed, its watcher ends them (local.py).
"""

import contextlib
import os
import selectors
import sys
import time
from typing import Optional

from lightcc.runner.crew import READ_BYTES, Here
from lightcc.runner.exchange import Exchange
from lightcc.runner.hosts import Place
from lightcc.runner.local import Job, StartError, started
from lightcc.runner.messages import (
    Alive,
    Begin,
    End,
    Ended,
    Failed,
    Load,
    Message,
    Over,
    Pause,
    Remark,
    Signal,
    Unpacker,
    greeting,
    pack,
)
from lightcc.runner.output import MAX_PENDING_BYTES, Sink
from lightcc.runner.pieces import PIECE_BYTES, Outbox

ALIVE_S = 2.0


def main() -> int:
    # What a rank's library or this interpreter prints by mistake must not come between messages.
    out = os.dup(1)
    os.dup2(2, 1)
    with contextlib.ExitStack() as stack:
        _Agent(Sink(out, "the connection to the launcher"), stack).run()
    return 0


class _Agent:
    def __init__(self, out: Sink, stack: contextlib.ExitStack) -> None:
        self._out = out
        self._stack = stack
        self._selector = stack.enter_context(selectors.PollSelector())  # stdin may be /dev/null, which epoll refuses
        self._pipes = stack.enter_context(selectors.DefaultSelector())
        self._unpacker = Unpacker()
        self._crew: Optional[Here] = None
        self._exchange: Optional[Exchange] = None  # if the ranks are run()'s
        self._outbox: Optional[Outbox] = None
        self._paused = False  # by the launcher
        self._over = False    # all has been said
        self._alone = False   # nobody listens

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, self._listen)
        self._out.put(None, greeting())
        alive_at = time.monotonic() + ALIVE_S
        while not (self._alone or self._out.error or (self._over and not self._out.pending_bytes)):
            wait_s = 0.0 if self._outbox and self._has_room() else max(0.0, alive_at - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                for message in key.data() or ():
                    self._tell(message)
            if self._outbox and self._has_room():  # one piece at a time: commands and output are heard between
                self._say(self._outbox.take())
            if time.monotonic() >= alive_at:
                alive_at = time.monotonic() + ALIVE_S
                if not self._out.pending_bytes:
                    self._say(Alive())
            self._pace()

    def _has_room(self) -> bool:
        return self._out.pending_bytes <= PIECE_BYTES

    def _tell(self, message: Message) -> None:
        """What the ranks do. That one has ended is said after what it has left."""
        if isinstance(message, Ended) and self._outbox is not None:
            self._outbox.put(message)
        else:
            self._say(message)

    def _say(self, message: Message) -> None:
        self._out.put(None, pack(message))
        self._over = self._over or isinstance(message, Over)

    def _pace(self) -> None:
        """Waits for a slow connection; reads no more from the ranks while too much is pending."""
        if self._crew and not self._over:
            self._crew.pause(self._paused or self._out.pending_bytes > MAX_PENDING_BYTES)
        waiting = self._out.fd in self._selector.get_map()
        if self._out.pending_bytes and not waiting:
            self._selector.register(self._out.fd, selectors.EVENT_WRITE, self._out.flush)
        elif waiting and not self._out.pending_bytes:
            self._selector.unregister(self._out.fd)

    def _listen(self) -> None:
        chunk = os.read(0, READ_BYTES)
        if not chunk and not self._crew:
            print("the input of lightcc's agent ended before the job came: what started it must pass its input on, "
                  "as docker exec does with -i", file=sys.stderr)
        self._alone = not chunk
        for message in self._unpacker.feed(chunk):
            self._obey(message)

    def _obey(self, message: Message) -> None:
        if isinstance(message, Load):
            self._load(message.chunk)
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Pause):
            self._paused = message.on
        elif isinstance(message, Signal) and self._crew:
            self._crew.send(message.rank, message.signum)
            for ended in self._outbox.drop_value(message.rank) if self._outbox else ():
                self._say(ended)
        elif isinstance(message, End) and self._crew and not self._over:
            self._outbox = None
            for last in self._crew.end():
                self._say(last)

    def _load(self, chunk: bytes) -> None:
        if self._exchange is None:
            self._exchange = self._stack.enter_context(Exchange(()))
        with open(self._exchange.function, "ab", closefd=False) as memory:
            memory.write(chunk)

    def _begin(self, job: Begin) -> None:
        try:
            os.chdir(job.folder)
        except OSError as error:
            self._say(Remark(f"cannot work in {job.folder}: {error.strerror}; its ranks work in {os.getcwd()}"))
        try:
            places = [Place(*place)._replace(here=True) for place in job.places]
            for place in places if self._exchange else ():
                self._exchange.add(place.rank)
            ranks = self._stack.enter_context(started(Job(
                places, lambda rank: job.command, exchange=self._exchange, settings=job.environment,
                bind_at_fork=True)))
        except StartError as error:
            self._say(Failed(str(error), error.exit_code))
            return
        if self._exchange:
            self._exchange.forget_function()
            self._outbox = Outbox(self._exchange, job.environment["LIGHTCC_SECRET"])
        self._crew = Here(job.host, ranks, self._selector, self._pipes)
        for message in self._crew.started():
            self._say(message)


if __name__ == "__main__":
    sys.exit(main())

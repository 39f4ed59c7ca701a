"""python -m lightcc.launch.agent: starts the ranks of a host that lightccrun is not on. It is started by ssh or another
command, reads the launcher's messages from stdin, and writes to stdout (messages.py) what the ranks print and how they
end.

It ends when the launcher does: at the end of stdin, and when nobody reads stdout, it says so on stderr, ends its ranks
and itself. If it is killed, its watcher ends them (local.py).
"""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Optional

from lightcc.launch import messages, network
from lightcc.launch.host_ranks import READ_BYTES, HostRanks
from lightcc.launch.hosts import Place
from lightcc.launch.local import Job, Rank, StartError, rank_starter, with_threads
from lightcc.launch.output import MAX_PENDING_BYTES, Sink
from lightcc.launch.rank_outputs import wait_for
from lightcc.launch.result_transfer import PART_BYTES, ResultSender
from lightcc.launch.run_files import RunFiles
from lightcc.launch.termination import FAILURE_GRACE_S

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
        self._unpacker = messages.Unpacker()
        self._host_ranks: Optional[HostRanks] = None
        self._start: Callable[[Place], Rank]  # once the job has begun
        self._run_files: Optional[RunFiles] = None  # if the ranks are run()'s
        self._result_sender: Optional[ResultSender] = None
        self._is_elastic = False    # ranks come and go
        self._paused = False        # by the launcher
        self._over = False          # the last message has been sent
        self._disconnected = False  # the launcher has closed our input

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, self._receive)
        self._out.put(None, messages.greeting())
        alive_at = time.monotonic() + ALIVE_S
        while not (self._disconnected or self._out.error or (self._over and not self._out.pending_bytes)):
            wait_s = 0.0 if self._result_sender and self._has_room() else max(0.0, alive_at - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                for message in key.data() or ():
                    self._report(message)
            if self._result_sender and self._has_room():  # one part at a time: commands and output are heard between
                self._send(self._result_sender.take())
            if time.monotonic() >= alive_at:
                alive_at = time.monotonic() + ALIVE_S
                if not self._out.pending_bytes:
                    self._send(messages.Alive())
            self._pace()
        if self._host_ranks and not self._over:
            self._abandoned(self._host_ranks)

    def _abandoned(self, host_ranks: HostRanks) -> None:
        """The launcher is gone. Workers of an elastic job are given a moment to say so in logs of their own."""
        with contextlib.suppress(OSError):  # it may be the launcher's
            os.write(2, f"lightcc's agent on host {host_ranks.host}: the launcher is gone; ending its ranks\n".encode())
        if host_ranks.hang_up() and self._is_elastic:
            time.sleep(FAILURE_GRACE_S)

    def _has_room(self) -> bool:
        return self._out.pending_bytes <= PART_BYTES

    def _report(self, message: messages.Message) -> None:
        """Sends an event of the ranks. Ended is sent after the rank's result."""
        if isinstance(message, messages.Ended) and self._result_sender is not None:
            self._result_sender.put(message)
        else:
            self._send(message)

    def _send(self, message: messages.Message) -> None:
        self._out.put(None, messages.pack(message))
        self._over = self._over or isinstance(message, messages.Over)

    def _pace(self) -> None:
        """Waits for a slow connection; reads no more from the ranks while too much is pending."""
        if self._host_ranks and not self._over:
            self._host_ranks.flush()
            self._host_ranks.pause(self._paused or self._out.pending_bytes > MAX_PENDING_BYTES)
        wait_for([self._out], self._selector)

    def _receive(self) -> None:
        chunk = os.read(0, READ_BYTES)
        if not chunk and not self._host_ranks:
            print("the input of lightcc's agent ended before the job came: what started it must pass its input on, "
                  "as docker exec does with -i", file=sys.stderr)
        self._disconnected = not chunk
        for message in self._unpacker.feed(chunk):
            self._handle(message)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.Load):
            self._load(message.chunk)
        elif isinstance(message, messages.HoldPort):
            self._hold_port(message.ports)
        elif isinstance(message, messages.Begin):
            self._begin(message)
        elif isinstance(message, messages.Pause):
            self._paused = message.on
        elif isinstance(message, messages.Signal) and self._host_ranks:
            self._host_ranks.send(message.rank, message.signum)
            for ended in self._result_sender.drop_value(message.rank) if self._result_sender else ():
                self._send(ended)
        elif isinstance(message, messages.StartRank) and self._host_ranks:
            self._start_rank(self._host_ranks, Place(*message.place)._replace(here=True))
        elif isinstance(message, messages.Tell) and self._host_ranks:
            self._host_ranks.tell(message.rank, message.chunk)
        elif isinstance(message, messages.Input) and self._host_ranks:
            self._host_ranks.give(message.chunk)
        elif isinstance(message, messages.End) and self._host_ranks and not self._over:
            self._result_sender = None
            for last in self._host_ranks.end():
                self._send(last)

    def _load(self, chunk: bytes) -> None:
        if self._run_files is None:
            self._run_files = self._stack.enter_context(RunFiles(()))
        with open(self._run_files.function, "ab", closefd=False) as memory:
            memory.write(chunk)

    def _hold_port(self, ports: str) -> None:
        holder = network.hold_port(ports)
        self._send(messages.PortHeld(self._stack.enter_context(holder).getsockname()[1] if holder else 0))

    def _begin(self, job: messages.Begin) -> None:
        self._is_elastic = job.slots > 0
        try:
            os.chdir(job.folder)
        except OSError as error:
            self._send(messages.Remark(
                f"cannot work in {job.folder}: {error.strerror}; its ranks work in {os.getcwd()}"))
        try:
            places = [Place(*place)._replace(here=True) for place in job.places]
            for place in places:
                if self._run_files:
                    self._run_files.add(place.rank)
            here, remarks = with_threads(Job(places, lambda rank: job.command, run_files=self._run_files,
                                             settings=job.environment, bind_at_fork=True,
                                             stdin=subprocess.DEVNULL if self._run_files else subprocess.PIPE,
                                             talk_variable=job.talk_variable, slots=job.slots))
            self._start = self._stack.enter_context(rank_starter(here))
            ranks = [self._start(place) for place in places]
        except StartError as error:
            self._send(messages.Failed(str(error), error.exit_code))
            return
        if self._run_files:
            if not self._is_elastic:  # else more ranks may come
                self._run_files.close_function()
            self._result_sender = ResultSender(self._run_files, job.environment["LIGHTCC_SECRET"])
        self._host_ranks = HostRanks(job.host, ranks, self._selector, self._pipes)
        for message in [*remarks, *self._host_ranks.started()]:
            self._send(message)

    def _start_rank(self, host_ranks: HostRanks, place: Place) -> None:
        if self._run_files:
            self._run_files.add(place.rank)
        try:
            rank = self._start(place)
        except StartError as error:
            self._send(messages.NotStarted(place.rank, str(error), error.exit_code))
            return
        host_ranks.add(rank)
        self._send(messages.Started(rank.number, rank.pid))


if __name__ == "__main__":
    sys.exit(main())

"""Carries a job from its first process to its last byte: one loop over what its ranks say and how they end, on this
host (crew.py) and others (remote.py), our own signals and our way out. It decides nothing itself: life.py says which
signal is sent when, output.py what is printed.
"""

import contextlib
import os
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional, Union

from lightcc.runner.crew import Here
from lightcc.runner.exchange import chunks
from lightcc.runner.life import FAILURE_GRACE_S, FAR_GRACE_S, Cause, Life, signal_name
from lightcc.runner.local import Job, StartError, job_environment, started
from lightcc.runner.messages import Ended, Failed, Output, Over, Remark, Started
from lightcc.runner.output import MAX_PENDING_BYTES, Sink, Tagger, same_file
from lightcc.runner.pieces import PIECE_BYTES, Inbox
from lightcc.runner.remote import Agent, Event, Lost, agents, forwarded

FLUSH_S = 1.0   # after a failure, a reader that does not read for this long misses the rest
CHECK_S = 1.0   # how often the agents' silence is measured
LOST_CODE = 1   # of ranks that are lost with their host


@dataclass
class Outcome:
    cause: Optional[Cause]
    text: str  # one line an event: why the job ended and what was lost; "" if all went well
    failed_at: float = 0.0  # when the cause was seen, time.monotonic()

    @property
    def exit_code(self) -> int:
        return self.cause.exit_code if self.cause else 0


def supervise(job: Job, stdout: int, stderr: int, signals: Sequence[int] = ()) -> Outcome:
    """Runs the job; returns when all its processes have ended. stdout and stderr are descriptors for the tagged
    output. These signals end the job (main thread only); one that is ignored stays ignored, as under nohup. Raises
    StartError, or OSError when the output directory cannot be written."""
    with contextlib.ExitStack() as stack:
        job = replace(job, settings={**job.settings, **job_environment()})
        files = _open_files(job, stack)
        signal_bytes = stack.enter_context(_signals_as_bytes(signals))
        return _Supervisor(job, [stdout, stderr], files, signal_bytes, stack).run()


@dataclass
class _Stream:
    """One of a rank's on its way to a sink and perhaps a file."""

    tag: bytes
    tagger: Tagger
    sink: Sink
    file: Optional[Sink]

    def put(self, chunk: bytes) -> None:
        """An empty chunk ends it."""
        if self.file:
            self.file.put(self.tag, chunk)
        self.sink.put(self.tag, self.tagger.feed(chunk) if chunk else self.tagger.finish())


class _Lost(NamedTuple):
    why: str
    ranks: list[int]  # that still ran


class _Supervisor:
    def __init__(self, job: Job, outputs: Sequence[int], files: dict[tuple[int, int], Sink], signals: socket.socket,
                 stack: contextlib.ExitStack) -> None:
        self.job = job
        self.stack = stack
        self.signals = signals
        self.life = Life(0)  # until ranks are started
        self.failed_at = 0.0
        self.host = {p.rank: socket.gethostname() if p.here else p.host for p in job.places}
        self.pid: dict[int, int] = {}
        self.lost: dict[str, _Lost] = {}  # by host
        self.stuck: list[str] = []
        out = Sink(outputs[0], "standard output")
        err = out if same_file(*outputs) else Sink(outputs[1], "standard error")
        self.sinks = [out] if err is out else [out, err]
        self.files = list(files.values())
        stamp = (lambda: time.strftime("%a %b %d %H:%M:%S %Y").encode()) if job.timestamps else None
        self.streams: dict[tuple[int, int], _Stream] = {}
        for place in job.places:
            for number, name, sink in ((1, "stdout", out), (2, "stderr", err)):
                tag = f"[{place.rank}]<{name}>:".encode()
                self.streams[place.rank, number] = _Stream(tag, Tagger(tag, stamp), sink,
                                                           files.get((place.rank, number)))
        # Who is ready is called, and returns what happened.
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.selector.register(signals, selectors.EVENT_READ, self._take_signals)
        self.agents: list[Agent] = []
        self.crews: dict[int, Union[Here, Agent]] = {}  # by rank

    def run(self) -> Outcome:
        self._reach_hosts()
        if not self.life.cause:
            self._start()
        while self.life.running and not self.stuck:
            self._step(self.life.wait_s(time.monotonic()))
        self._end()
        self._flush()
        return Outcome(self.life.cause, "\n".join(self._report()), self.failed_at)

    def _reach_hosts(self) -> None:
        """Nothing is started before every host has answered, and has the function if there is one."""
        if all(place.here for place in self.job.places):
            return
        deadline = time.monotonic() + self.job.start_timeout_s
        exchange = self.job.exchange
        inbox = Inbox(exchange, self.job.settings["LIGHTCC_SECRET"]) if exchange else None
        self.agents = self.stack.enter_context(agents(self.job.places, self.job.agent_command, self.selector, inbox))
        for agent in self.agents if self.job.verbose else ():
            self._say(f"host {agent.host}: {shlex.join(agent.command)}")
        while not self.life.cause and (missing := [agent for agent in self.agents if not agent.ready]):
            left = deadline - time.monotonic()
            if left <= 0:
                words = "".join(f"; {agent.host}: {agent.last_words()}" for agent in missing if agent.last_words())
                raise StartError(f"no answer within {self.job.start_timeout_s:g} s (--start-timeout) from lightcc's "
                                 f"agent on {', '.join(agent.host for agent in missing)}{words}", 1)
            self._step(left)
        for agent in self.agents if exchange else ():
            agent.load(chunks(exchange.function, PIECE_BYTES))
        while not self.life.cause and any(agent.loading for agent in self.agents):
            self._step(0 if any(agent.can_load() for agent in self.agents) else None)
            for agent in self.agents:
                if agent.can_load():
                    agent.load_more()
            self._pace()

    def _start(self) -> None:
        self.life = Life(len(self.job.places), FAR_GRACE_S if self.agents else FAILURE_GRACE_S)
        for agent in self.agents:
            self.crews.update(dict.fromkeys(agent.ranks, agent))
            agent.begin(self.job.command(agent.ranks[0]), {**forwarded(os.environ), **self.job.settings})
        if any(place.here for place in self.job.places):
            ranks = self.stack.enter_context(started(self.job))
            pipes = self.stack.enter_context(selectors.DefaultSelector())
            here = Here(socket.gethostname(), ranks, self.selector, pipes)
            self.crews.update({rank.number: here for rank in ranks})
            self._handle(here.started())
        if self.job.exchange:
            self.job.exchange.forget_function()

    def _step(self, timeout: Optional[float]) -> None:
        if self.agents:
            timeout = CHECK_S if timeout is None else min(timeout, CHECK_S)
        events: list[Event] = []
        for key, _ in self.selector.select(timeout):
            events += key.data() or ()
        now = time.monotonic()
        for agent in self.agents:
            events += agent.check(now)
        self._handle(events)
        if any(isinstance(sink.error, BrokenPipeError) for sink in self.sinks) and not self.life.cause:
            self.life.interrupted(signal.SIGPIPE, now)
        for signum in self.life.due(now):
            for number in self.life.running:
                if signum is None:
                    self.stuck.append(self._process(number))
                else:
                    self.crews[number].send(number, signum)
        self._pace()

    def _handle(self, events: Iterable[Event]) -> None:
        ended: dict[int, int] = {}
        for event in events:
            if isinstance(event, Output):
                self.streams[event.rank, event.stream].put(event.chunk)
            elif isinstance(event, Ended):
                ended[event.rank] = event.code
            elif isinstance(event, Started):
                self.pid[event.rank] = event.pid
                if self.job.verbose:
                    self._say(f"rank {event.rank} is {self._process(event.rank)}")
            elif isinstance(event, Lost):
                if not self.crews:
                    raise StartError(f"cannot start lightcc's agent on host {event.host}: {event.text}", 1)
                ended.update(dict.fromkeys(self._lose(event.host, event.text), LOST_CODE))
            elif isinstance(event, Failed):
                raise StartError(event.text, event.exit_code)
            elif isinstance(event, Remark):
                self._say(event.text)
            elif isinstance(event, Over):
                self.stuck = [f"pid {pid} on host {event.host}" for pid in event.stuck] + self.stuck
        now = time.monotonic()
        self.life.exited(ended, now)
        if self.life.cause and not self.failed_at:
            self.failed_at = now

    def _take_signals(self) -> None:
        for signum in self.signals.recv(4096):
            self.life.interrupted(signum, time.monotonic())

    def _pace(self) -> None:
        """Waits for slow sinks; has no more read from the ranks while too much is pending."""
        for sink in self.sinks + [agent.commands for agent in self.agents if not agent.over]:
            waiting = sink.fd in self.selector.get_map()
            if bool(sink.pending_bytes) != waiting:
                if waiting:
                    self.selector.unregister(sink.fd)
                else:
                    self.selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush)
        full = any(sink.pending_bytes > MAX_PENDING_BYTES for sink in self.sinks)
        for crew in set(self.crews.values()):
            crew.pause(full)

    def _end(self) -> None:
        """What ranks left behind ends, everywhere; then the last of what they printed comes."""
        for crew in sorted(set(self.crews.values()), key=lambda crew: isinstance(crew, Here)):  # ours takes its time
            self._handle(crew.end())
        while self.crews and not all(agent.over for agent in self.agents):  # one that falls silent is lost, and over
            self._step(CHECK_S)
        for stream in self.streams.values():
            stream.put(b"")

    def _flush(self) -> None:
        """Waits for our readers, but not for ever once the job has failed or Ctrl-C was pressed."""
        self._pace()
        while any(sink.pending_bytes for sink in self.sinks):
            before = [sink.pending_bytes for sink in self.sinks]
            self._step(FLUSH_S)
            if self.life.cause and before == [sink.pending_bytes for sink in self.sinks]:
                return

    def _lose(self, host: str, why: str) -> list[int]:
        ranks = [p.rank for p in self.job.places if p.host == host and not p.here and p.rank in self.life.running]
        self.lost[host] = _Lost(why, ranks)
        return ranks

    def _process(self, rank: int) -> str:
        return f"pid {self.pid.get(rank, 'unknown')} on host {self.host[rank]}"

    def _say(self, text: str) -> None:
        self.sinks[-1].put(b"", f"lightccrun: {text}\n".encode())

    def _report(self) -> Iterator[str]:
        cause = self.life.cause
        if cause and cause.rank is None:
            how = ("nobody reads our output any more" if cause.code == -signal.SIGPIPE
                   else f"interrupted by {signal_name(-cause.code)}")
            yield how + (f"; ended {_ranks(cause.others)}" if cause.others else "")
        elif cause:
            host = self.host[cause.rank]
            lost = self.lost.pop(host) if host in self.lost and cause.rank in self.lost[host].ranks else None
            if lost:
                yield _lost(host, lost) + _ended(cause.others + 1 - len(lost.ranks))
            else:
                how = (f"exited with code {cause.code}" if cause.code > 0
                       else f"was killed by {signal_name(-cause.code)}")
                yield f"rank {cause.rank} (pid {self.pid[cause.rank]}, host {host}) {how}{_ended(cause.others)}"
        for host, lost in self.lost.items():
            yield _lost(host, lost)
        if self.stuck:
            yield f"did not end after SIGKILL, stuck in the kernel: {', '.join(dict.fromkeys(self.stuck))}"
        for sink in self.sinks + self.files:
            if sink.error and not isinstance(sink.error, BrokenPipeError):
                yield f"could not write {sink.name}: {sink.error.strerror}; what followed was dropped"


def _lost(host: str, lost: _Lost) -> str:
    ranks = ", ".join(map(str, lost.ranks))
    whose = f" with {'rank' if len(lost.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
    return f"lost host {host}{whose}: {lost.why}"


def _ended(others: int) -> str:
    return {0: "", 1: "; ended the other rank"}.get(others, f"; ended the other {others} ranks")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _open_files(job: Job, stack: contextlib.ExitStack) -> dict[tuple[int, int], Sink]:
    """DIR/rank.<n>/stdout and stderr, n as wide as the largest rank: the bytes of the rank, without tags."""
    files = {}
    size = len(job.places)
    for rank in range(size if job.output_dir else 0):
        folder = os.path.join(job.output_dir, f"rank.{rank:0{len(str(size - 1))}}")
        os.makedirs(folder, exist_ok=True)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            path = os.path.join(folder, name)
            file = stack.enter_context(open(path, "wb", buffering=0))
            files[rank, stream] = Sink(file.fileno(), path)
    return files


@contextlib.contextmanager
def _signals_as_bytes(signums: Sequence[int]) -> Iterator[socket.socket]:
    """Makes these signals bytes on a socket instead of interruptions, so that they come one at a time."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        ours = [s for s in signums if signal.getsignal(s) not in (signal.SIG_IGN, None)]
        if not ours:
            yield reader
            return
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = {s: signal.signal(s, lambda *_: None) for s in ours}
        try:
            yield reader
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            signal.set_wakeup_fd(before)

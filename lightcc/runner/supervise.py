"""Carries a job from its first process to its last byte: one loop over the ranks' pipes and ends, our own signals and
our way out. It decides nothing itself: life.py says which signal is sent when, output.py what is printed.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from lightcc.runner import groups
from lightcc.runner.life import Cause, Life, signal_name
from lightcc.runner.local import Job, Rank, started
from lightcc.runner.output import MAX_PENDING_BYTES, Sink, Tagger, same_file

READ_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20  # what a pipe can still hold after its writer has ended
FLUSH_S = 1.0             # after a failure, a reader that does not read for this long misses the rest


@dataclass
class Outcome:
    cause: Optional[Cause]
    text: str  # one line an event: why the job ended and what was lost; "" if all went well

    @property
    def exit_code(self) -> int:
        return self.cause.exit_code if self.cause else 0


def supervise(job: Job, stdout: int, stderr: int, forwarded: Sequence[int] = ()) -> Outcome:
    """Runs the job; returns when all its processes have ended. stdout and stderr are descriptors for the tagged
    output. The signals in `forwarded` end the job (main thread only); one that is ignored stays ignored, as under
    nohup. Raises StartError, or OSError when the output directory cannot be written."""
    with contextlib.ExitStack() as stack:
        files = _open_files(job, stack)
        signals = stack.enter_context(_signals_as_bytes(forwarded))
        selector = stack.enter_context(selectors.DefaultSelector())
        pipes = stack.enter_context(selectors.DefaultSelector())
        ranks = stack.enter_context(started(job))
        return _Supervisor(job, ranks, [stdout, stderr], files, signals, selector, pipes).run()


@dataclass
class _Source:
    """One stream of one rank on its way to a sink and perhaps a file."""

    fd: int
    tag: bytes
    tagger: Tagger
    sink: Sink
    file: Optional[Sink]

    def read(self) -> int:
        """Passes on one chunk; returns its size, 0 at the end or when there is nothing now."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if self.file:
            self.file.put(self.tag, chunk)
        self.sink.put(self.tag, self.tagger.feed(chunk) if chunk else self.tagger.finish())
        return len(chunk)


class _Supervisor:
    def __init__(self, job: Job, ranks: list[Rank], outputs: Sequence[int], files: dict[tuple[int, str], Sink],
                 signals: socket.socket, selector: selectors.BaseSelector, pipes: selectors.BaseSelector) -> None:
        self.ranks = ranks
        self.signals = signals
        self.life = Life(len(ranks))
        self.stuck: list[int] = []
        out = Sink(outputs[0], "standard output")
        err = out if same_file(*outputs) else Sink(outputs[1], "standard error")
        self.sinks = [out] if err is out else [out, err]
        self.files = list(files.values())
        self.selector = selector
        self.pipes = pipes  # its own descriptor is in selector, so one call pauses all reading
        self.paused = True
        stamp = (lambda: time.strftime("%a %b %d %H:%M:%S %Y").encode()) if job.timestamps else None
        for rank in ranks:
            selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            for name, pipe, sink in (("stdout", rank.process.stdout, out), ("stderr", rank.process.stderr, err)):
                tag = f"[{rank.number}]<{name}>:".encode()
                source = _Source(pipe.fileno(), tag, Tagger(tag, stamp), sink, files.get((rank.number, name)))
                pipes.register(source.fd, selectors.EVENT_READ, source)
            if job.verbose:
                err.put(b"", f"lightccrun: rank {rank.number} is pid {rank.pid}\n".encode())
        selector.register(signals, selectors.EVENT_READ)
        self._pace()

    def run(self) -> Outcome:
        while self.life.running and not self.stuck:
            self._step(self.life.wait_s(time.monotonic()))
        # What a rank leaves in its group ends with the job; only then its pipes say all they have to say.
        self.stuck = groups.end([rank.pid for rank in self.ranks])
        self._drain()
        return Outcome(self.life.cause, "\n".join(self._report()))

    def _step(self, timeout: Optional[float]) -> None:
        ended = {}
        ready = self.selector.select(timeout)
        now = time.monotonic()
        for key, _ in ready:
            if isinstance(key.data, Rank):
                ended[key.data.number] = key.data.exit_code()
                self.selector.unregister(key.fd)
            elif isinstance(key.data, Sink):
                key.data.flush()
            elif key.fileobj is self.signals:
                for signum in self.signals.recv(4096):
                    self.life.interrupted(signum, now)
            else:
                self._read_pipes()
        self.life.exited(ended, now)
        if any(isinstance(sink.error, BrokenPipeError) for sink in self.sinks) and not self.life.cause:
            self.life.interrupted(signal.SIGPIPE, now)
        for signum in self.life.due(now):
            if signum is None:
                self.stuck = [self.ranks[number].pid for number in self.life.running]
            else:
                for number in self.life.running:
                    self.ranks[number].send(signum)
        self._pace()

    def _read_pipes(self) -> None:
        for key, _ in self.pipes.select(0):
            if not key.data.read():
                self.pipes.unregister(key.fd)

    def _pace(self) -> None:
        """Waits for slow sinks; reads no more from the ranks while too much is pending."""
        for sink in self.sinks:
            waiting = sink.fd in self.selector.get_map()
            if bool(sink.pending_bytes) != waiting:
                if waiting:
                    self.selector.unregister(sink.fd)
                else:
                    self.selector.register(sink.fd, selectors.EVENT_WRITE, sink)
        full = any(sink.pending_bytes > MAX_PENDING_BYTES for sink in self.sinks)
        if full == self.paused or not self.pipes.get_map():
            return
        if full:
            self.selector.unregister(self.pipes.fileno())
        else:
            self.selector.register(self.pipes.fileno(), selectors.EVENT_READ)
        self.paused = full

    def _drain(self) -> None:
        """Passes on what is left in the pipes and waits for our readers, but not for ever once the job has failed
        or Ctrl-C was pressed."""
        for key in list(self.pipes.get_map().values()):
            left = MAX_PIPE_BYTES  # a process that left the group may still be writing
            while left > 0:
                size = key.data.read()
                left = left - size if size else 0
            key.data.sink.put(key.data.tag, key.data.tagger.finish())
            self.pipes.unregister(key.fd)
        while any(sink.pending_bytes for sink in self.sinks):
            before = [sink.pending_bytes for sink in self.sinks]
            self._step(FLUSH_S)
            if self.life.cause and before == [sink.pending_bytes for sink in self.sinks]:
                return

    def _report(self) -> Iterator[str]:
        cause = self.life.cause
        if cause and cause.rank is None:
            how = ("nobody reads our output any more" if cause.code == -signal.SIGPIPE
                   else f"interrupted by {signal_name(-cause.code)}")
            yield how + (f"; ended {_ranks(cause.others)}" if cause.others else "")
        elif cause:
            rank = self.ranks[cause.rank]
            how = f"exited with code {cause.code}" if cause.code > 0 else f"was killed by {signal_name(-cause.code)}"
            others = {0: "", 1: "; ended the other rank"}.get(cause.others, f"; ended the other {cause.others} ranks")
            yield f"rank {rank.number} (pid {rank.pid}, host {socket.gethostname()}) {how}{others}"
        if self.stuck:
            yield f"did not end after SIGKILL, stuck in the kernel: pid {', '.join(map(str, self.stuck))}"
        for sink in self.sinks + self.files:
            if sink.error and not isinstance(sink.error, BrokenPipeError):
                yield f"could not write {sink.name}: {sink.error.strerror}; what followed was dropped"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _open_files(job: Job, stack: contextlib.ExitStack) -> dict[tuple[int, str], Sink]:
    """DIR/rank.<n>/stdout and stderr, n as wide as the largest rank: the bytes of the rank, without tags."""
    files = {}
    for number in range(job.num_proc if job.output_dir else 0):
        folder = os.path.join(job.output_dir, f"rank.{number:0{len(str(job.num_proc - 1))}}")
        os.makedirs(folder, exist_ok=True)
        for name in ("stdout", "stderr"):
            path = os.path.join(folder, name)
            file = stack.enter_context(open(path, "wb", buffering=0))
            files[number, name] = Sink(file.fileno(), path)
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

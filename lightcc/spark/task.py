"""The Spark task of a rank. All tasks of the barrier stage run at the same time, and allGather carries between them
what their ranks must know. The user's function runs in a child of the task's Python, which ends with the task."""
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional

from lightcc.launch import placed
from lightcc.launch.local import pythonpath_setting
from lightcc.launch.offers import Invitation, offer
from lightcc.launch.output import Tagger
from lightcc.launch.placed_child import FAILED, Failed, Start

_OTHERS_S = 20.0         # for which a rank that another one's failure has ended leaves the word to that one
_DRAIN_S = 10.0          # for the rest of what a rank has printed; a daemon of the user's may hold its output open
_PART_BYTES = 16 << 20   # of a result in a row
_MOST_OUTPUT = 4 << 20   # bytes of a rank's output that go to the driver, the last ones; the executor's log has all
_SHOWN = 2000            # characters of the errors of a rank that has died
RESULT, STDOUT, STDERR = "result", "stdout", "stderr"
BEGIN, END = "run: ", "\n-- the end of what the rank says --"  # by which the driver finds it in Spark's own message


class Call(NamedTuple):
    """What the driver sends to all tasks."""

    function: bytes
    env: Dict[str, str]
    executable: Optional[str]  # Python
    stamped: bool              # lines of output begin with the time


class Part(NamedTuple):
    """A row of the stage's result."""

    rank: int
    kind: str
    data: bytes


def run_rank(call: Call) -> Iterator[Part]:
    """Inside a task of a barrier stage. Raises RuntimeError, which names rank and host, if the function fails."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    resources = context.resources()
    rank = _Rank(call, context.partitionId(), list(resources["gpu"].addresses) if "gpu" in resources else [])
    try:
        yield from rank.run(lambda mine: [json.loads(text) for text in context.allGather(json.dumps(mine))])
    finally:
        rank.end()


def run_offer(invitation: Invitation) -> None:
    """Inside a task without barrier: it is a host of an elastic job while the driver wants it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = context.resources() if context else {}  # type: ignore[no-untyped-call]
    environment = {"PYSPARK_PYTHON": sys.executable}
    if "gpu" in resources:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(resources["gpu"].addresses)
    offer(invitation, environment)


class _Rank:
    """The child, and what it prints."""

    def __init__(self, call: Call, number: int, gpus: List[str]) -> None:
        self._function, self._number, self._gpus = call.function, number, gpus
        self._who = f"rank {number} on host {socket.gethostname()}"
        ours, theirs = socket.socketpair()
        with theirs:
            words = map(str, (os.getpid(), theirs.fileno(), number))
            self._process = subprocess.Popen(
                [call.executable or sys.executable, "-m", "lightcc.launch.placed_child", *words],
                env={**os.environ, **pythonpath_setting(), **call.env}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self._connection = Connection(ours.detach())
        self._outputs = [_Output(pipe, f"[{number}]<{kind}>:", kind, call.stamped)
                         for pipe, kind in ((self._process.stdout, STDOUT), (self._process.stderr, STDERR))]

    def run(self, all_gather: Callable[[Any], List[Any]]) -> Iterator[Part]:
        said = all_gather([*self._talk(self._connection.recv), self._gpus])
        processes = [placed.Process(*process) for process, _, _ in said]
        mine = processes[self._number]
        gpus = sorted({gpu for process, (_, _, others) in zip(processes, said) if process.machine == mine.machine
                       for gpu in others})
        start = tuple(Start(processes, placed.Meeting(*said[0][1]), gpus, self._function))
        self._talk(lambda: self._connection.send(start))
        answer = self._talk(self._connection.recv_bytes)
        self._finish()
        if answer[:1] == FAILED:
            self._fail(Failed(*pickle.loads(answer[1:])))
        for output in self._outputs:
            yield Part(self._number, output.kind, output.last())
        for begin in range(1, len(answer), _PART_BYTES):
            yield Part(self._number, RESULT, answer[begin:begin + _PART_BYTES])

    def end(self) -> None:
        """Whatever is left of it, its own children too. Once it is reaped, its number may be another group's."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def _finish(self) -> int:
        """Waits for its end, and for all that it has printed. Returns its exit code."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.end()  # its children would keep the pipes open
        deadline = time.monotonic() + _DRAIN_S
        for output in self._outputs:
            output.finish(deadline)
        return self._process.returncode

    def _talk(self, what: Callable[[], Any]) -> Any:
        """Sends to the child or receives from it. RuntimeError if it has ended."""
        try:
            return what()
        except (EOFError, ConnectionError):
            code = self._finish()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            last = self._outputs[1].last()[-_SHOWN:].decode(errors="replace")
            raise RuntimeError(f"{BEGIN}{self._who} {how} before its function returned\n{last}{END}") from None

    def _fail(self, failed: Failed) -> NoReturn:
        if failed.follows:  # the first failure ends this task meanwhile
            time.sleep(_OTHERS_S)
        raise RuntimeError(f"{BEGIN}{self._who} raised an exception\n\n{failed.traceback}{END}")


class _Output:
    """Tags the lines of a pipe, for the executor's log and the driver."""

    def __init__(self, pipe: Any, tag: str, kind: str, stamped: bool) -> None:
        self.kind = kind
        self._pipe = pipe
        self._tagger = Tagger(tag.encode(), _stamp if stamped else None)
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def last(self) -> bytes:
        return bytes(self._kept)

    def _read(self) -> None:
        while chunk := os.read(self._pipe.fileno(), 1 << 16):
            self._keep(self._tagger.feed(chunk))
        self._keep(self._tagger.finish())

    def _keep(self, lines: bytes) -> None:
        self._kept += lines
        if len(self._kept) > _MOST_OUTPUT:
            del self._kept[:self._kept.find(b"\n", len(self._kept) - _MOST_OUTPUT) + 1]
        sys.stderr.write(lines.decode(errors="replace"))
        sys.stderr.flush()


def _stamp() -> bytes:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S} ".encode()

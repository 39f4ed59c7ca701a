"""The ranks of one library under one setting: started, spoken to line by line, and ended. See driver/driver.c."""
import contextlib
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import List

from peers.peer import Job, Peer, Setting

DRIVER = Path(__file__).parent / "driver"
START_S, QUIT_S = 200, 15
BARRIER_BYTES = 8192
CPUCLOCK_SCHED = 2  # of Linux: user and system time together


class Failed(Exception):
    """These ranks cannot be measured; the text has the cause."""


def build_driver(folder: Path) -> Path:
    """Compiles driver/*.c, which takes a second, with the system's C compiler or $CC."""
    folder.mkdir(parents=True, exist_ok=True)
    program, sources = folder / "driver", sorted(DRIVER.glob("*.c"))
    newest = max(file.stat().st_mtime for file in [*sources, *DRIVER.glob("*.h")])
    if not program.exists() or program.stat().st_mtime < newest:
        subprocess.run([os.environ.get("CC", "cc"), "-O3", "-march=native", "-std=c11", "-o", str(program),
                        *map(str, sources), "-ldl"], check=True)
    return program


class Group:
    """Between two questions its processes sleep in read(), so that they do not disturb other groups."""

    def __init__(self, peer: Peer, setting: Setting, job: Job):
        """Only starts the processes; meet() waits for them, so that many groups can start at once."""
        self.peer, self.setting, self._job = peer, setting, job
        self._connections: List[socket.socket] = []
        self._pending: List[bytes] = []
        self._log = (job.folder / "log").open("w+b")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(job.folder / "socket"))
        self._listener.listen(job.ranks)
        (job.folder / "barrier").write_bytes(bytes(BARRIER_BYTES))
        # All in one session, as under a launcher: the kernel schedules each session as a group of its own (autogroup),
        # and sched_yield() gives way to the same group only.
        starts = peer.starts(job, setting)
        script = "".join(shlex.join(["env", "-i", *[f"{name}={value}" for name, value in start.environment.items()],
                                     *start.command]) + " & " for start in starts)
        self._session = subprocess.Popen(
            ["/bin/sh", "-c", script + "wait"], pass_fds=[fd for start in starts for fd in start.keep], cwd=job.folder,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def meet(self) -> str:
        """Waits until all ranks are there, and returns the library's version."""
        deadline = time.monotonic() + START_S
        self._listener.settimeout(0.2)
        while len(self._connections) < self._job.ranks:
            try:
                self._connections.append(self._listener.accept()[0])
            except socket.timeout:
                if self._session.poll() is not None:
                    raise self._failed("ended while it started") from None
                if time.monotonic() > deadline:
                    raise self._failed(f"{len(self._connections)} of {self._job.ranks} ranks came "
                                       f"within {START_S} s") from None
        self._pending = [b""] * self._job.ranks
        hellos = self._answers("start", START_S)
        if any(words[:1] != ["hello"] for words in hellos):
            raise self._failed(" ".join(next(words for words in hellos if words[:1] != ["hello"])))
        if sorted(int(words[1]) for words in hellos) != list(range(self._job.ranks)):
            raise self._failed(f"the ranks do not know each other: {[words[1:3] for words in hellos]}")
        return " ".join(hellos[0][3:])

    def ask(self, question: str, timeout_s: float = 120) -> List[List[str]]:
        """The words of each rank's answer, without its "ok"."""
        try:
            for connection in self._connections:
                connection.sendall(question.encode() + b"\n")
        except OSError as error:
            raise self._failed(f"{question[:60]}: {error}") from None
        answers = self._answers(question, timeout_s)
        for words in answers:
            if words[:1] != ["ok"]:
                raise self._failed(" ".join(words))
        return [words[1:] for words in answers]

    def _answers(self, question: str, timeout_s: float) -> List[List[str]]:
        deadline = time.monotonic() + timeout_s
        while any(b"\n" not in text and not text.startswith(b"error") for text in self._pending):
            waiting = [c for c, text in zip(self._connections, self._pending) if b"\n" not in text]
            ready, _, _ = select.select(waiting, [], [], max(0, deadline - time.monotonic()))
            if not ready:
                silent = [i for i, text in enumerate(self._pending) if b"\n" not in text]
                raise self._failed(f"{question[:60]}: no answer from {len(silent)} of {len(self._pending)} ranks "
                                   f"within {timeout_s:g} s")
            for connection in ready:
                piece = connection.recv(1 << 16)
                if not piece:
                    told = [t.decode().strip() for t in self._pending if t.startswith(b"error")]
                    raise self._failed("; ".join(told) or f"{question[:60]}: a rank ended")
                self._pending[self._connections.index(connection)] += piece
            if any(text.startswith(b"error") and b"\n" in text for text in self._pending):
                told = [text.decode().strip() for text in self._pending if text.startswith(b"error")]
                raise self._failed("; ".join(told))
        lines = [text.split(b"\n", 1) for text in self._pending]
        self._pending = [rest for _, rest in lines]
        return [line.decode().split() for line, _ in lines]

    def _failed(self, what: str) -> Failed:
        self.kill()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        last = [line.strip() for line in said if line.strip()][-3:]
        return Failed(what + (f" (it said: {' | '.join(last)})"[:600] if last else ""))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._session.pid, signal.SIGKILL)
        self._session.wait()
        self._close()

    def cpu_seconds(self) -> float:
        """What all threads of all ranks have used since they began, user and system. Their processes' CPU clocks,
        which the kernel names by pid (clock_getcpuclockid), tell it while they sleep."""
        def pid(connection: socket.socket) -> int:
            return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

        return sum(time.clock_gettime((~pid(connection) << 3) | CPUCLOCK_SCHED) for connection in self._connections)

    def quit(self) -> None:
        """Ends the ranks as their library would have it, or after a while with force."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(b"quit\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._session.wait(QUIT_S)
        self.kill()

    def _close(self) -> None:
        for connection in [*self._connections, self._listener]:
            connection.close()

"""Starts the ranks of one host and the watcher that outlives the launcher. Owns the processes, not their output."""

import contextlib
import ctypes
import errno
import os
import secrets
import shlex
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

from lightcc.launch import groups, nccl_plugin
from lightcc.launch.cores import VARIABLE, threads_each, usable_cores
from lightcc.launch.hosts import Place
from lightcc.launch.messages import Message, Threads
from lightcc.launch.pipes import piped
from lightcc.launch.run_files import RunFiles
from lightcc.launch.termination import TERM_GRACE_S
from lightcc.launch.watcher import Watcher

_PR_SET_PDEATHSIG = 1
# A process group a rank, but one session for all: the kernel schedules each session as one (sched_autogroup), and then
# a rank that offers its core with sched_yield would not offer it to the others. Older Pythons know sessions only.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
_libc = ctypes.CDLL(None)
# Variables that say which rank of which job a process is. Where they are in our own environment, this launcher is a
# rank of another job, and its ranks are none.
OF_A_JOB = ("HOROVOD_ELASTIC", "LIGHTCC_STORE_ADDR", "LIGHTCC_DRIVER_FD", "LIGHTCC_LAUNCHER_FD", "TORCHELASTIC_RUN_ID",
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            "PMI_RANK", "PMI_SIZE")


class StartError(RuntimeError):
    """A rank could not be started. exit_code is the shell's: 127 not found, 126 not executable."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass
class Job:
    """What to start. command is a function of the rank."""

    places: Sequence[Place]  # of all ranks, in their order
    command: Callable[[int], Sequence[str]]
    run_files: Optional[RunFiles] = None  # of run(); the command, task.py, is also given its arguments
    settings: Mapping[str, str] = field(default_factory=dict)  # on top of our environment
    set_on_hosts: Sequence[str] = ()  # variables that a scheduler sets on other hosts, in place of ours
    output_dir: Optional[str] = None
    timestamps: bool = False
    verbose: bool = False
    # Bind the ranks' lifetime to ours between fork and exec. Only for a launcher without threads: code between fork and
    # exec may meet a lock that another thread held. A rank of run() binds itself.
    bind_at_fork: bool = False
    # What subprocess takes for the standard input of rank 0. The others have none.
    stdin: int = subprocess.DEVNULL
    # Each rank has a socket to talk to its launcher by; this variable tells it which, as "descriptor:inode".
    talk_variable: str = ""
    slots: int = 0  # of this host, in an elastic job, whose ranks come and go; else there are as many as places
    # What starts an agent on another host, and how long those may take to answer.
    agent_command: Optional[Callable[[str], Sequence[str]]] = None
    start_timeout_s: float = 30
    term_grace_s: float = TERM_GRACE_S

    def agent_on(self, host: str) -> Sequence[str]:
        """The command that starts the agent on a host that is not this one."""
        assert self.agent_command is not None  # whoever names other hosts says how they are reached
        return self.agent_command(host)


@dataclass
class Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    talk: Optional[socket.socket] = None  # our end

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, signum: int) -> None:
        """To the whole process group. The leader is reaped last, so its number cannot belong to another process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def exit_code(self) -> Optional[int]:
        """None while it runs; minus the signal that killed it. Leaves the zombie where it is."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def unwatch(self) -> None:
        """It has ended: nobody asks its pidfd any more."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def close(self) -> None:
        self.unwatch()
        for file in (self.process.stdin, self.process.stdout, self.process.stderr, self.talk):
            if file:
                file.close()


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def job_environment() -> dict[str, str]:
    """The same for all ranks of one job. The secret is for their handshakes; never print it."""
    return {"LIGHTCC_JOB_ID": secrets.token_hex(16), "LIGHTCC_SECRET": secrets.token_hex(32)}


def pythonpath_setting() -> dict[str, str]:
    """PYTHONPATH with this package's home if Python would not find it there by itself (a source tree)."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if home in [*site.getsitepackages(), site.getusersitepackages()]:
        return {}
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", home)]
    return {"PYTHONPATH": os.pathsep.join([home, *others])}


def with_threads(job: Job) -> tuple[Job, list[Message]]:
    """The job with OMP_NUM_THREADS for its ranks here, if nobody has set it, and a message if that changes anything."""
    ranks, cores = job.slots or sum(place.here for place in job.places), usable_cores()
    each = threads_each({**os.environ, **job.settings}, cores, ranks)
    if each is None:
        return job, []
    changes = each != len(os.sched_getaffinity(0))  # which is what a rank would take by itself
    return (replace(job, settings={**job.settings, VARIABLE: str(each)}),
            [Threads(each, cores, ranks)] if changes else [])


@contextlib.contextmanager
def started(job: Job) -> Iterator[list[Rank]]:
    """The ranks of the job that are here, as rank_starter() starts them."""
    with rank_starter(job) as start:
        yield [start(place) for place in job.places if place.here]


@contextlib.contextmanager
def rank_starter(job: Job) -> Iterator[Callable[[Place], Rank]]:
    """A function that starts a rank of the job here, the leader of a process group of its own. However the block ends,
    the ranks and all in their groups are gone after it, and so is the watcher.

    None is reaped before, as its number is also that of its group, which we and the watcher signal, and must not become
    another process's. So a worker that an elastic job has lost costs a zombie until the end, and no more."""
    watcher = Watcher()
    ranks: list[Rank] = []
    others = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    environment = {"PYTHONUNBUFFERED": "1", **others, **job.settings}

    def start(place: Place) -> Rank:
        rank = _start(job, place.rank, {**environment, **place.environment(is_elastic=job.slots > 0)})
        ranks.append(rank)
        watcher.add(rank.pid)
        return rank

    try:
        try:
            environment = nccl_plugin.with_path(environment)
        except FileNotFoundError as error:
            raise StartError(str(error), 1) from None
        yield start
    finally:
        stuck = groups.end([rank.pid for rank in ranks]) if ranks else []
        watcher.close()
        for rank in ranks:
            rank.close()
            if rank.pid not in stuck:
                rank.process.wait()


def _start(job: Job, number: int, environment: dict[str, str]) -> Rank:
    command = [*job.command(number), *(job.run_files.arguments(number) if job.run_files else ())]
    launcher = os.getpid()
    descriptors = list(job.run_files.descriptors(number)) if job.run_files else []
    ours, theirs = socket.socketpair() if job.talk_variable else (None, None)
    if theirs:
        descriptors.append(theirs.fileno())
        environment = {**environment,
                       job.talk_variable: f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}"}
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL if number else job.stdin, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0, pass_fds=descriptors,
            preexec_fn=(lambda: die_with(launcher)) if job.bind_at_fork else None, **_OWN_GROUP)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        advice = "; is it on PATH, and does the interpreter in its first line exist?" if missing else ""
        if ours:
            ours.close()
        if command[0].endswith(".py"):  # a script without the right to be run, or without #! in its first line
            advice = f"; did you mean: python {shlex.join(command)}"
        raise StartError(f"rank {number}: cannot start '{command[0]}': {error.strerror}{advice}",
                         127 if missing else 126) from error
    finally:
        if theirs:
            theirs.close()
    for pipe in (process.stdout, process.stderr):
        os.set_blocking(piped(pipe).fileno(), False)
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        process.kill()
        process.wait()
        raise StartError(f"rank {number}: cannot watch pid {process.pid}: {error.strerror}; lightccrun needs "
                         "pidfd_open (Linux 5.3), and a container's seccomp profile must allow it", 126) from error
    return Rank(number, process, pidfd, ours)

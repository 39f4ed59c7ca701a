"""Processes that somebody else has started: actors of Ray, tasks of Spark, pods. The scheduler that placed them carries
what they must know of each other; afterwards a plain hvd.init() in the user's function finds the others.

    processes = all_gather(placed.here())                                          # by the scheduler's own calls
    meeting = broadcast(placed.open_meeting() if rank == 0 else None)
    placed.place(rank, processes, meeting)

No port is guessed and no interface probed. The secret travels as the scheduler's own data does.
"""
import os
import platform
import socket
from collections.abc import Sequence
from typing import NamedTuple

from lightcc._version import __version__
from lightcc.core import meeting as _meeting
from lightcc.core.meeting import Meeting, open_meeting  # noqa: F401
from lightcc.launch import cores, hosts, inits


class Process(NamedTuple):
    """What a process says about itself; strings, so that any scheduler can carry it."""

    host: str     # its name, for people
    machine: str  # equal for processes that share memory, as in csrc/net/bootstrap/bootstrap.cc
    lightcc: str  # version
    python: str


def here() -> Process:
    """This one.

    >>> here().python.count(".")
    1
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    machine = os.environ.get("LIGHTCC_HOST_ID") or f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"
    return Process(socket.gethostname(), machine, __version__, ".".join(platform.python_version_tuple()[:2]))


def place(rank: int, processes: Sequence[Process], meeting: Meeting) -> None:
    """Keeps this process's place for the next init(), and sets Horovod's variables, torchrun's, and OMP_NUM_THREADS if
    that is not set.

    processes: those of all ranks, by rank. meeting: what open_meeting() of rank 0's process has returned. It serves one
    init(); for another one after shutdown() all ranks need a new meeting.

    Errors: ValueError for a rank that there is not, and if ranks have other versions of lightcc or Python than rank 0.
    """
    processes = [Process(*one) for one in processes]
    if not 0 <= rank < len(processes):
        raise ValueError(f"there is no rank {rank} among {len(processes)}")
    _check_versions(processes)
    found = hosts.of_ranks([hosts.Machine(one.machine, one.host, False) for one in processes])[rank]
    os.environ.update(found.environment())
    threads = cores.threads_each(os.environ, cores.usable_cores(), found.local_size)
    if threads is not None:
        os.environ[cores.VARIABLE] = str(threads)
    os.environ.pop(inits.VARIABLE, None)  # a launcher's connection, which belongs to the process that we come from
    _meeting.keep(_meeting.Place(rank, len(processes), Meeting(*meeting)))


def _check_versions(processes: Sequence[Process]) -> None:
    def versions(process: Process) -> str:
        return f"lightcc {process.lightcc} with Python {process.python}"

    others = [f"rank {rank} on host {one.host} has {versions(one)}" for rank, one in enumerate(processes)
              if versions(one) != versions(processes[0])]
    if others:
        raise ValueError(f"{'; '.join(others)}; but rank 0 on host {processes[0].host} has {versions(processes[0])}. "
                         "Install the same on all")

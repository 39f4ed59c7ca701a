"""What membership.py decides about, the workers of an elastic job, and what it decides: the actions for the driver."""
import enum
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

NO_UPDATE, REMOVED, ADDED = 0, 1, 2  # bits of Horovod's HostUpdateResult


class State(enum.Enum):
    STARTING = "starting"  # until it waits for the first time
    WAITING = "waiting"    # in init, for an epoch
    MEMBER = "member"      # of the present epoch
    ENDED = "ended"


@dataclass
class Worker:
    number: int  # in the order of starts
    host: str
    slot: int        # of the host
    local_rank: int  # of the machine, which may be several hosts by name
    discovery: int   # for whose hosts it was started
    state: State = State.STARTING
    joined: bool = False      # the epoch that it is a member of: its init has returned
    synced: bool = False      # and it has the state of rank 0
    timed_out: bool = False   # not all met for it in time
    apart: bool = False       # and this worker could not reach rank 0
    has_state: bool = False   # since some epoch: rule 2
    dismissed: bool = False   # its end is our wish


class Exit(NamedTuple):
    worker: Worker
    code: int


# What is to be done.
class Start(NamedTuple):
    worker: Worker


class Dismiss(NamedTuple):
    """The worker is not wanted any more: it ends with 0 if it waits, else by a signal."""

    worker: Worker


class Form(NamedTuple):
    """These, in the order of their ranks, are the world of the epoch."""

    epoch: int
    members: list[Worker]


class Cancel(NamedTuple):
    """A member ended before all had met: those who are about to meet need not go on."""

    epoch: int
    members: list[Worker]
    cause: str


class Notify(NamedTuple):
    """Hosts were added or removed; whom to tell is rank 0. leaving: the ranks whose hosts are used no more."""

    worker: Worker
    result: int
    leaving: tuple[int, ...] = ()


class End(NamedTuple):
    """The job is over. failure: of the worker that ended it, if it was one; text: why, "" if all went well."""

    failure: Optional[Exit]
    text: str


Action = Union[Start, Dismiss, Form, Cancel, Notify, End]

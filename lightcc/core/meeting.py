"""Meetings of processes that can already talk to each other, by mpi4py or by a scheduler's calls: the process that
becomes rank 0 opens a meeting and tells the others what it is.

Where somebody else has placed this process (lightcc/launch/placed.py), its place is kept here until init() takes it.
"""
import secrets
from typing import NamedTuple, Optional

from lightcc.core import lib


class Meeting(NamedTuple):
    """Serves one init of each rank."""

    job: str
    secret: str
    where: str  # "10.0.0.1:4711,[fd00::1]:4711"

    def __repr__(self) -> str:
        return f"Meeting(job={self.job!r}, where={self.where!r})"  # the secret is for no log


class Place(NamedTuple):
    rank: int
    size: int
    meeting: Optional[Meeting]  # None: init() has taken it


_place: Optional[Place] = None


def open_meeting() -> Meeting:
    """In the process that becomes rank 0; an earlier meeting to which it has not gone is over.

    >>> open_meeting().where.count(":") > 0
    True
    """
    return Meeting(secrets.token_hex(16), secrets.token_hex(32), lib.open_meeting())


def join(rank: int, size: int, meeting: Meeting) -> None:
    """Forms the world of these ranks. HorovodInternalError if they do not all come before HOROVOD_START_TIMEOUT."""
    lib.init_at(rank, size, *meeting)


def keep(place: Place) -> None:
    """For the next init()."""
    global _place
    _place = place


def is_placed() -> bool:
    return _place is not None


def is_over() -> bool:
    """Whether init() has taken the meeting of this place, which serves one init()."""
    return _place is not None and _place.meeting is None


def join_as_placed() -> None:
    """Goes to the meeting that was kept. ValueError if init() has taken it already."""
    global _place
    assert _place is not None
    rank, size, meeting = _place
    if meeting is None:
        raise ValueError(f"init(): a scheduler has placed this process, rank {rank} of {size}, and its meeting serves "
                         "one init(). To call init() again after shutdown(), begin another run, such as "
                         "RayExecutor.run(), or give all ranks the meeting that rank 0 opens anew "
                         "(lightcc.launch.placed).")
    _place = Place(rank, size, None)
    join(rank, size, meeting)


def placed_size() -> int:
    assert _place is not None
    return _place.size

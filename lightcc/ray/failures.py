"""Which of several failures of ranks is the cause. Pure."""
from typing import NamedTuple, Sequence

from lightcc.core.exceptions import HorovodInternalError


class Failure(NamedTuple):
    """Of a rank, as the driver has seen it."""

    rank: int
    where: str        # "host h1 (node 5c0f...)"
    died: bool        # the whole process, not only its function
    error: Exception


def cause(failures: Sequence[Failure]) -> Failure:
    """failures: in the order of their arrival. A rank that has lost another one arrives sooner at times than that one.
    """
    first_hand = [one for one in failures if one.died or not isinstance(one.error, HorovodInternalError)]
    return (first_hand or failures)[0]


def described(failures: Sequence[Failure]) -> RuntimeError:
    """What run() raises."""
    first = cause(failures)
    what = "has ended" if first.died else "raised an exception"
    others = sorted(one.rank for one in failures if one is not first)
    then = f" (then rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} failed)" if others else ""
    return RuntimeError(f"run: rank {first.rank} on {first.where} {what}{then}\n\n{first.error}")

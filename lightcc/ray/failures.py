"""Which of several failures of ranks is the cause. Pure."""
from typing import List, NamedTuple, Optional, Sequence

from ray.exceptions import RayActorError

from lightcc.core.exceptions import HorovodInternalError

_OTHERS_S = 2.0  # the cause is known; the message also names the ranks that follow it
_CAUSE_S = 30.0  # on a loaded machine, Ray says seconds later that a process has ended than its neighbours fail


class Failure(NamedTuple):
    """Of a rank, as the driver has seen it."""

    rank: int
    where: str        # "host h1 (node 5c0f...)"
    died: bool        # the whole process, not only its function
    error: Exception


def first_hand(failures: Sequence[Failure]) -> List[Failure]:
    """Without those of ranks that live and have an error because another one has failed."""
    return [one for one in failures if one.died or not isinstance(one.error, (HorovodInternalError, RayActorError))]


def wait_s(failures: Sequence[Failure]) -> Optional[float]:
    """How long the driver waits for what further ranks say; None: until they have ended."""
    if not failures:
        return None
    return _OTHERS_S if first_hand(failures) else _CAUSE_S


def cause(failures: Sequence[Failure]) -> Failure:
    """failures: in the order of their arrival. A rank that has lost another one arrives sooner at times than that one.
    """
    return (first_hand(failures) or failures)[0]


def described(failures: Sequence[Failure]) -> RuntimeError:
    """What run() raises."""
    first = cause(failures)
    what = "has ended" if first.died else "raised an exception"
    others = sorted(one.rank for one in failures if one is not first)
    then = f" (then rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} failed)" if others else ""
    return RuntimeError(f"run: rank {first.rank} on {first.where} {what}{then}\n\n{first.error}")

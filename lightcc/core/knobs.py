"""The settings that are in force (docs/knobs.md)."""
import functools
from typing import Dict

from lightcc.core import lib


def knob(name: str) -> str:
    """The value of a knob that is in force on all ranks. ValueError before init.

    >>> knob("HOROVOD_STALL_CHECK_DISABLE")
    '0'
    """
    if not lib.initialized():
        raise lib.not_initialised()
    return _knobs(lib.epoch)[name]


@functools.lru_cache(maxsize=1)  # scripts wrap a tape in every step
def _knobs(epoch: int) -> Dict[str, str]:
    return dict(line.split("=", 1) for line in lib.describe("knobs").splitlines())

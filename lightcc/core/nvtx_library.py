"""NVTX, by which Nsight Systems sees named ranges of a program: the library that is there at run time, if any.

Tools say in NVTX_INJECTION64_PATH where they are before they start a program; without one a range would cost and show
nothing, so there is none.
"""
import ctypes
import os
from typing import Any, Callable, NamedTuple, Optional

from lightcc.core.knobs import knob

TOOL = "NVTX_INJECTION64_PATH"
_LIBRARIES = ("libnvToolsExt.so.1", "libnvToolsExt.so")  # of the CUDA toolkit up to 12


class Nvtx(NamedTuple):
    """Begins and ends a range of the calling thread."""

    push: Callable[[bytes], Any]
    pop: Callable[[], Any]


def is_asked() -> bool:
    """Whether a tool has started this program.

    >>> is_asked()
    False
    """
    return TOOL in os.environ


def is_disabled() -> bool:
    """Whether HOROVOD_DISABLE_NVTX_RANGES turns ranges off. ValueError before init.

    >>> is_disabled()
    False
    """
    return knob("HOROVOD_DISABLE_NVTX_RANGES") == "1"


def find() -> Optional[Nvtx]:
    """None: no such library can be loaded."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            push, pop = library.nvtxRangePushA, library.nvtxRangePop
        except (OSError, AttributeError):
            continue
        push.argtypes = [ctypes.c_char_p]
        return Nvtx(push, pop)
    return None

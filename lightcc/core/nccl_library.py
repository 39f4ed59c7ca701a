"""NCCL's library: where it is on this host, and which version it is. Nothing of NCCL runs here."""
import contextlib
import ctypes
import functools
import importlib.util
import os
from typing import Optional

LEAST_VERSION = 21800  # that lightcc uses


def path() -> Optional[str]:
    """What LIGHTCC_NCCL_LIBRARY names; or else as wheels bring it (PyTorch's), or the system. None: there is none.

    >>> path() is None or "nccl" in path()
    True
    """
    if given := os.environ.get("LIGHTCC_NCCL_LIBRARY"):
        return given
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    for folder in (found.submodule_search_locations or []) if found else []:
        library = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.exists(library):
            return library
    from ctypes.util import find_library  # here, so that an import of lightcc does not pay for it

    return find_library("nccl")


@functools.lru_cache(maxsize=None)
def load() -> None:
    """Loads it once, as PyTorch does, so that the core finds it in the process: the system knows nothing of wheels.
    Where it cannot be loaded, the core says why. Not with LIGHTCC_NCCL=0.

    >>> load()
    """
    library = path() if os.environ.get("LIGHTCC_NCCL") != "0" else None
    if library:
        with contextlib.suppress(OSError):
            ctypes.CDLL(library)


def version(library: str) -> int:
    """NCCL's version code: 22703 is 2.27.3. Raises OSError if the library cannot be loaded, or is none of NCCL's.

    >>> version("/nowhere/libnccl.so.2")
    Traceback (most recent call last):
    OSError: /nowhere/libnccl.so.2: cannot open shared object file: No such file or directory
    """
    code = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
    except AttributeError as error:
        raise OSError(str(error)) from None
    return code.value

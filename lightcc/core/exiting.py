"""What is called when this process ends, whichever way Python ends it.

atexit is not enough: a child of multiprocessing that was forked ends with os._exit, and runs only multiprocessing's own
finalizers. These in turn come before the threads that are not daemons have ended, which may still train.
"""
import atexit
import os
import sys
import threading
from typing import Callable, Dict

_LAST = -100  # multiprocessing's priorities: those below 0 run when children have been joined, the lowest last

_registered: Dict[Callable[[], None], int] = {}  # function: the process in which it is to be called


def at_exit(function: Callable[[], None]) -> None:
    """Calls it once at the end of this process, when no thread is left that is not a daemon; the latest given first.

    Giving a function again does nothing. A process forked from this one does not call it, unless it gives it itself.
    """
    process = os.getpid()
    if _registered.get(function) == process:
        return
    _registered[function] = process
    if _is_multiprocessing_child():
        from multiprocessing.util import Finalize
        Finalize(None, _call_in_child, (function, process), exitpriority=_LAST)
    else:
        atexit.register(_call, function, process)


def _is_multiprocessing_child() -> bool:
    """Whether multiprocessing started this process: then it has been imported here."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _call(function: Callable[[], None], process: int) -> None:
    if os.getpid() == process and _registered.pop(function, None) is not None:
        function()


def _call_in_child(function: Callable[[], None], process: int) -> None:
    # What multiprocessing itself would do next: waits for the threads that are not daemons. Only the first call does.
    threading._shutdown()  # type: ignore[attr-defined]
    _call(function, process)

"""Threads, for scripts that import them from Horovod's launcher."""
import contextlib
import threading
from typing import Any, Callable, Optional


def in_thread(target: Callable[..., Any], args: tuple = (), name: Optional[str] = None, daemon: bool = True,
              silent: bool = False) -> threading.Thread:
    """Starts a thread that calls target(*args); returns it.

    daemon: the interpreter does not wait for it at its end. silent: what it raises is dropped; otherwise
    threading.excepthook prints it. Raises ValueError if args is not a tuple. Source: horovod.runner.util.threads.

    >>> found = []
    >>> in_thread(found.append, (1,)).join(); found
    [1]
    """
    if not isinstance(args, tuple):
        raise ValueError(f"in_thread: args must be a tuple, not {type(args).__name__}; for one argument write (value,)")

    def silenced() -> None:
        with contextlib.suppress(Exception):
            target(*args)

    thread = threading.Thread(target=silenced, name=name, daemon=daemon) if silent else \
        threading.Thread(target=target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread

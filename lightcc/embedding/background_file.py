"""Files that a thread writes while training goes on: what is to be written is queued, a little of it at a time."""
import logging
import queue
import threading
from typing import Any, Callable, Optional

_logger = logging.getLogger("lightcc")
_MOST_WAITING = 8


class Writer:
    """Runs functions one after the other in a thread, which ends with finish() or abandon().

    If one raises, the rest is left out, and a warning says so. what: for the warning.

    >>> done = []; writer = Writer("a test"); writer.put(lambda: done.append(1)); writer.finish(); done
    [1]
    """

    def __init__(self, what: str):
        self._what = what
        self._waiting: "queue.Queue[Optional[Callable[[], Any]]]" = queue.Queue(_MOST_WAITING)
        self.failed = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="lightcc.embedding.writer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether put() would wait."""
        return self._waiting.full()

    def put(self, work: Callable[[], Any]) -> None:
        """Waits while there is much to do."""
        self._waiting.put(work)

    def end(self) -> None:
        """There is no more to do."""
        self._waiting.put(None)

    def finish(self) -> None:
        """Waits until all is done."""
        self.end()
        self.join()

    def join(self) -> None:
        self._thread.join()

    def abandon(self) -> None:
        """Leaves out what has not been done."""
        self._abandoned = True
        self.finish()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            if self.failed or self._abandoned:
                continue
            try:
                work()
            except Exception as error:  # training goes on
                self.failed = True
                _logger.warning("%s was not written: %s. Training goes on; the one before it is kept.", self._what,
                                error)

"""Standard input on its way to rank 0; the other ranks have none.

Source is the launcher's end: it reads no further than WINDOW_BYTES ahead of what rank 0 has taken, and a terminal only
while this job is in its foreground. Feed is the end at rank 0, in the launcher or in an agent. Where rank 0 is on this
host and our input is no terminal, neither is needed: the rank inherits it (local.py).
"""

import os
import selectors
from typing import IO, Callable

from lightcc.launch.messages import Message, Taken

WINDOW_BYTES = 64 << 10


class Source:
    def __init__(self, fd: int, selector: selectors.BaseSelector, give: Callable[[bytes], None]) -> None:
        """give: takes what was read; b"" at the end."""
        self.is_terminal = os.isatty(fd)
        self._fd = fd
        self._selector = selector
        self._give = give
        self._room = WINDOW_BYTES
        self._over = False

    @property
    def in_background(self) -> bool:
        """Then reading would stop this process, and what is typed is for the shell."""
        if not self.is_terminal or self._over:
            return False
        try:
            return os.tcgetpgrp(self._fd) != os.getpgrp()
        except OSError:  # not our controlling terminal: nobody is stopped
            return False

    def taken(self, size: int, over: bool) -> None:
        self._room += size
        self._over = self._over or over

    def pace(self) -> None:
        """Is to be called after each step: listens as long as there is room."""
        wanted = not self._over and self._room > 0 and not self.in_background
        if wanted != (self._fd in self._selector.get_map()):
            if not wanted:
                self._selector.unregister(self._fd)
                return
            try:
                self._selector.register(self._fd, selectors.EVENT_READ, self._read)
            except PermissionError:  # a file, which is always ready
                while not self._over and self._room > 0:
                    self._read()

    def close(self) -> None:
        self._over = True
        self.pace()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, self._room)
        except BlockingIOError:
            return
        except OSError:  # the terminal is gone, or it cannot be read at all
            chunk = b""
        self._over = self._over or not chunk
        self._room -= len(chunk)
        self._give(chunk)


class Feed:
    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector) -> None:
        """pipe: to rank 0; it is closed here."""
        self._pipe = pipe
        self._selector = selector
        self._pending = bytearray()
        self._ends = False  # after what is pending
        os.set_blocking(pipe.fileno(), False)

    def put(self, chunk: bytes) -> None:
        """b"" ends it."""
        if self._pipe.closed:
            return
        self._pending += chunk
        self._ends = self._ends or not chunk
        if self._pipe.fileno() not in self._selector.get_map():
            self._selector.register(self._pipe.fileno(), selectors.EVENT_WRITE, self._write)

    def _write(self) -> list[Message]:
        fd = self._pipe.fileno()
        try:
            size = os.write(fd, self._pending) if self._pending else 0
        except BlockingIOError:
            return []
        except OSError:  # rank 0 has closed it, or has ended
            self.close()
            return [Taken(len(self._pending), True)]
        del self._pending[:size]
        if not self._pending:
            self._selector.unregister(fd)
            if self._ends:
                self.close()
        return [Taken(size, False)] if size else []

    def close(self) -> None:
        if not self._pipe.closed:
            if self._pipe.fileno() in self._selector.get_map():
                self._selector.unregister(self._pipe.fileno())
            self._pipe.close()

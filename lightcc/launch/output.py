"""What ranks print: cut into whole lines, tagged with the rank, written without waiting for a slow reader.

Tagger turns bytes of one pipe into tagged lines and does no I/O. Sink owns the way out. A line is written in one
piece; nothing of another rank comes between. Bytes are passed on as they are, whatever their encoding.
"""

import os
import re
import select
import stat
from typing import Callable, Optional

MAX_LINE_BYTES = 64 << 20  # a longer "line" is binary data; it is cut so that memory stays bounded
MAX_PENDING_BYTES = 1 << 20  # a sink with more than this is slow: stop reading from the ranks until it catches up

# Ends of lines inside a block. A lone \r ends a state of a progress bar; \r\n is one end.
_LINE_END = re.compile(rb"(?:\n|\r(?![\r\n]))(?!\Z)")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """What others have said, for a terminal: the control characters, which it would obey, are spelled out.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\\x1b[2J
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Tagger:
    """Tags the lines of one stream of one rank: b"text" -> b"[1]<stdout>:text"."""

    def __init__(self, tag: bytes, stamp: Optional[Callable[[], bytes]] = None) -> None:
        self._tag = tag
        self._stamp = stamp or (lambda: b"")
        self._parts: list[bytes] = []  # the line that has not ended yet
        self._held = 0
        self._is_open = False  # the beginning of a line was shown

    def feed(self, chunk: bytes) -> bytes:
        """Returns the lines that ended, tagged; keeps the rest."""
        if self._is_open:
            end = chunk.find(b"\n") + 1
            if not end:
                return chunk
            self._is_open = False
            return chunk[:end] + self.feed(chunk[end:])
        if self._parts and self._parts[-1].endswith(b"\r"):  # only now it shows whether a \n follows
            last = self._parts.pop()
            self._held -= len(last)
            chunk = last + chunk
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, len(chunk) - 1)) + 1
        block = b"".join(self._parts) + chunk[:cut] if cut else b""
        if cut:
            self._parts, self._held = [], 0
        if cut < len(chunk):
            self._parts.append(chunk[cut:])
            self._held += len(chunk) - cut
        if self._held > MAX_LINE_BYTES:
            return self._tagged(block) + self.finish()
        return self._tagged(block)

    @property
    def has_partial(self) -> bool:
        return bool(self._parts)

    def show_partial(self) -> bytes:
        """Returns the beginning of the line that has not ended, tagged; the rest of it is returned as it comes."""
        rest = b"".join(self._parts)
        self._parts, self._held, self._is_open = [], 0, True
        return self._stamp() + self._tag + rest

    def line_over(self) -> None:
        """Its reader has begun a new line by other means."""
        self._is_open = False

    def finish(self) -> bytes:
        """Returns the last line if it has no end, with one."""
        if self._is_open:
            self._is_open = False
            return b"\n"
        rest = b"".join(self._parts).rstrip(b"\r")
        self._parts, self._held = [], 0
        return self._tagged(rest + b"\n") if rest else b""

    def _tagged(self, block: bytes) -> bytes:
        prefix = self._stamp() + self._tag
        if b"\r" not in block:
            return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if block else b""
        block = block.lstrip(b"\r")  # progress bars start with \r; an empty state before it is nothing to show
        return prefix + _LINE_END.sub(lambda end: end.group() + prefix, block) if block else b""


class Sink:
    """A descriptor of ours that takes tagged lines. Writes never wait for the reader of a pipe, socket or terminal."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.error: Optional[OSError] = None  # after it everything is dropped
        mode = os.fstat(fd).st_mode
        self.can_wait = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)  # others are always ready
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._bar: Optional[object] = None  # whose progress bar or prompt the last line is

    @property
    def pending_bytes(self) -> int:
        return len(self._pending)

    def put(self, owner: object, block: bytes) -> None:
        """Takes whole lines and prompts. A progress bar may be overwritten by its owner only; others start below it."""
        if not block or self.error:
            return
        if self._bar not in (None, owner):
            self._pending += b"\n"
        self._bar = None if block.endswith(b"\n") else owner
        self._pending += block
        self.flush()

    def line_over(self, owner: object) -> None:
        """The terminal has begun a new line, since the answer to its prompt was typed."""
        if self._bar == owner:
            self._bar = None

    def flush(self) -> None:
        """Writes what can be written now. A pipe that is ready takes PIPE_BUF bytes without blocking."""
        try:
            while self._pending and (not self.can_wait or self._poll.poll(0)):
                size = select.PIPE_BUF if self.can_wait else len(self._pending)
                del self._pending[:os.write(self.fd, self._pending[:size])]
        except OSError as error:  # nobody reads any more, the terminal is gone, the disk is full
            self.error = error
            self._pending.clear()


def same_file(a: int, b: int) -> bool:
    """Whether two descriptors lead to one place; then they need one Sink, or lines would be torn."""
    one, two = os.fstat(a), os.fstat(b)
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)

"""The way of the ranks' output to ours: the lines of each stream of a rank are tagged and go to a sink, and untagged to
a file of its own if the user wants that.
"""

import contextlib
import os
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from lightcc.launch.output import MAX_PENDING_BYTES, Sink, Tagger, printable, same_file

NAMES = {1: "stdout", 2: "stderr"}


@dataclass
class Stream:
    """An output stream of a rank, which goes to a sink and perhaps to a file."""

    tag: bytes
    tagger: Tagger
    sink: Sink
    file: Optional[Sink]
    to_print: Callable[[bytes], bytes]  # selects the lines to print now
    partial_at: Optional[float] = None  # since when there is a line that has not ended

    def put(self, chunk: bytes) -> None:
        """An empty chunk ends it."""
        if self.file:
            self.file.put(self.tag, chunk)
        self.sink.put(self.tag, self.to_print(self.tagger.feed(chunk) if chunk else self.tagger.finish()))
        self.partial_at = time.monotonic() if self.tagger.has_partial else None

    def show_partial(self) -> None:
        """A prompt, after which somebody is to type."""
        self.sink.put(self.tag, self.tagger.show_partial())
        self.partial_at = None

    def entered(self) -> None:
        """Somebody has typed an answer, and the terminal has begun a new line."""
        self.tagger.line_over()
        self.sink.line_over(self.tag)


class RankOutputs:
    def __init__(self, outputs: Sequence[int], timestamps: bool, folder: Optional[str], most_ranks: int,
                 stack: contextlib.ExitStack) -> None:
        """outputs: our descriptors for the tagged lines. folder: for a file of each stream, rank.<n>/stdout and stderr,
        n as wide as that many ranks need."""
        out = Sink(outputs[0], "standard output")
        err = out if same_file(*outputs) else Sink(outputs[1], "standard error")
        self.sinks = [out] if err is out else [out, err]
        self.files: list[Sink] = []
        self._said: set[str] = set()
        self.streams: dict[tuple[int, int], Stream] = {}
        self._stamp = (lambda: time.strftime("%a %b %d %H:%M:%S %Y").encode()) if timestamps else None
        self._folder, self._width, self._stack = folder, len(str(most_ranks - 1)), stack

    def add(self, rank: int, errors_to_print: Callable[[bytes], bytes] = lambda lines: lines) -> None:
        """Makes the streams of a rank. Raises OSError if its files cannot be written. errors_to_print: which lines of
        its standard error are printed as they come; whoever holds others prints them with print_errors."""
        files = self._open(rank, self._folder) if self._folder else {}
        for number, name in NAMES.items():
            tag = f"[{rank}]<{name}>:".encode()
            self.streams[rank, number] = Stream(
                tag, Tagger(tag, self._stamp), self.sinks[0 if number == 1 else -1], files.get(number),
                errors_to_print if number == 2 else lambda lines: lines)

    def _open(self, rank: int, parent: str) -> dict[int, Sink]:
        folder = os.path.join(parent, f"rank.{rank:0{self._width}}")
        os.makedirs(folder, exist_ok=True)
        files = {}
        for number, name in NAMES.items():
            path = os.path.join(folder, name)
            files[number] = Sink(self._stack.enter_context(open(path, "wb", buffering=0)).fileno(), path)
        self.files += files.values()
        return files

    def put(self, rank: int, stream: int, chunk: bytes) -> None:
        self.streams[rank, stream].put(chunk)

    def print_errors(self, rank: int, lines: bytes) -> None:
        stream = self.streams[rank, 2]
        stream.sink.put(stream.tag, lines)

    def say(self, text: str) -> None:
        """A line of our own, which may quote others."""
        self.sinks[-1].put(b"", f"lightccrun: {printable(text)}\n".encode())

    def say_once(self, text: str) -> None:
        """The same, however many hosts say it."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.put(b"")

    @property
    def pending(self) -> list[int]:
        return [sink.pending_bytes for sink in self.sinks]

    @property
    def too_much_pending(self) -> bool:
        return any(count > MAX_PENDING_BYTES for count in self.pending)

    @property
    def unread(self) -> bool:
        """Nobody reads our output any more."""
        return any(isinstance(sink.error, BrokenPipeError) for sink in self.sinks)

    def errors(self) -> list[str]:
        """What could not be written, a line each."""
        return [f"could not write {sink.name}: {sink.error.strerror}; what followed was dropped"
                for sink in self.sinks + self.files if sink.error and not isinstance(sink.error, BrokenPipeError)]


def wait_for(sinks: Sequence[Sink], selector: selectors.BaseSelector) -> None:
    """Has the selector flush those that are slow."""
    for sink in sinks:
        waiting = sink.fd in selector.get_map()
        if bool(sink.pending_bytes) != waiting:
            if waiting:
                selector.unregister(sink.fd)
            else:
                selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush)

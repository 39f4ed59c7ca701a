"""The signals that this process itself gets, as bytes on a socket, for a loop that waits for descriptors."""
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Signals(NamedTuple):
    """Those that came and were not taken yet."""

    received: socket.socket
    ours: frozenset[int]

    def fileno(self) -> int:
        return self.received.fileno()

    def take(self) -> list[int]:
        """Python sends every signal there that has a handler in this process; torch's DataLoader has one of SIGCHLD."""
        return [signum for signum in self.received.recv(4096) if signum in self.ours]


@contextlib.contextmanager
def signals_as_bytes(signums: Sequence[int]) -> Iterator[Signals]:
    """Makes these signals bytes on a socket instead of interruptions, so that they come one at a time. One that is
    ignored stays ignored, as under nohup."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        ours = [s for s in signums if signal.getsignal(s) not in (signal.SIG_IGN, None)]
        signals = Signals(reader, frozenset(ours))
        if not ours:
            yield signals
            return
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handlers = {s: signal.signal(s, lambda *_: None) for s in ours}
        try:
            yield signals
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            signal.set_wakeup_fd(before)

"""What a worker and the driver of an elastic job say to each other: one JSON object a line, over a socket pair that the
worker inherits. Its number is in LIGHTCC_DRIVER_FD.

To a worker: form (an epoch: its number, the worker's rank, size, job, secret), meet (where rank 0 waits), cancel (an
epoch that somebody will not come to, and why), hosts_updated (timestamp, result; leaving: the ranks whose hosts are
used no more), dismiss, ping.
To the driver: waiting (in init), meeting (where), joined, timed_out (an epoch's members have not all met; apart: it
was rank 0 that this one could not reach), synced, pong, leaving (its program has ended; it will answer no more).
"""
import json
from collections.abc import Iterator
from typing import Any

VARIABLE = "LIGHTCC_DRIVER_FD"
MAX_BYTES = 1 << 20  # a longer line is none

_FIELDS: dict[str, dict[str, type]] = {
    "form": {"epoch": int, "rank": int, "size": int, "job": str, "secret": str},
    "meet": {"epoch": int, "where": str},
    "cancel": {"epoch": int, "cause": str},
    "hosts_updated": {"timestamp": int, "result": int, "leaving": list},
    "dismiss": {},
    "ping": {},
    "waiting": {},
    "meeting": {"epoch": int, "where": str},
    "joined": {"epoch": int},
    "timed_out": {"epoch": int, "apart": bool},
    "synced": {"epoch": int},
    "pong": {},
    "leaving": {},
}


def pack(what: str, **fields: Any) -> bytes:
    return json.dumps({"what": what, **fields}).encode() + b"\n"


class Unpacker:
    """Cuts what comes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Gives the messages that are whole, each with "what". Raises ValueError on what is none."""
        self._buffer += chunk
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[:end + 1]
            yield _unpack(line)
        if len(self._buffer) > MAX_BYTES:
            raise ValueError(f"a message of more than {MAX_BYTES} bytes")


def _unpack(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        what = message.get("what")
        expected = _FIELDS.get(what) if isinstance(what, str) else None
        if expected is not None and {k: type(v) for k, v in message.items() if k != "what"} == expected:
            return message
    raise ValueError(f"no message: {line[:80]!r}")

"""What a rank of run() leaves in its result memory: a header, then a pickle (the value) or UTF-8 text (the traceback).
The header is written last, so a record that is there is whole.
"""

import mmap
import os
import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, Optional

_HEADER = struct.Struct("<4sdQ")  # kind, time, bytes that follow
_VALUE, _ERROR = b"valu", b"erro"
BODY_AT = _HEADER.size


class Record(NamedTuple):
    is_error: bool
    time_s: float  # CLOCK_MONOTONIC, one clock for all ranks of a host
    size: int      # bytes of its body


def begin(file: BinaryIO) -> None:
    """The body is written to the file after this, and commit after the body. It may begin once more."""
    file.seek(BODY_AT)
    file.truncate()


def commit(file: BinaryIO, is_error: bool, time_s: float) -> None:
    size = file.tell() - BODY_AT
    file.flush()
    seal(file.fileno(), Record(is_error, time_s, size))


def seal(fd: int, record: Record) -> None:
    """The body is there; now it counts."""
    os.pwrite(fd, _HEADER.pack(_ERROR if record.is_error else _VALUE, record.time_s, record.size), 0)


def find(fd: int) -> Optional[Record]:
    """None if the rank left no whole record."""
    head = os.pread(fd, BODY_AT, 0)
    if len(head) < BODY_AT:
        return None
    kind, time_s, size = _HEADER.unpack(head)
    return Record(kind == _ERROR, time_s, size) if kind in (_VALUE, _ERROR) else None


def text(fd: int, record: Record) -> str:
    return os.pread(fd, record.size, BODY_AT).decode(errors="replace")


def value(fd: int, record: Record) -> Any:
    """Unpickled from the memory itself: a large one is not copied first."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as whole, \
            whole[BODY_AT:BODY_AT + record.size] as body:
        return pickle.loads(body)

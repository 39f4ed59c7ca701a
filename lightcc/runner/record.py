"""What a rank of run() leaves in its result memory: a header, then a pickle (the value) or UTF-8 text (the traceback).
The header is written last, so a record that is there is whole.
"""

import mmap
import os
import struct
from typing import BinaryIO, NamedTuple, Optional

_HEADER = struct.Struct("<4sdQ")  # kind, time, bytes that follow
_VALUE, _ERROR = b"valu", b"erro"


class Record(NamedTuple):
    is_error: bool
    time_s: float  # CLOCK_MONOTONIC, one clock for all ranks of a host
    body: bytes


def begin(file: BinaryIO) -> None:
    """The body is written to the file after this, and commit after the body."""
    file.seek(_HEADER.size)


def commit(file: BinaryIO, is_error: bool, time_s: float) -> None:
    size = file.tell() - _HEADER.size
    file.flush()
    file.seek(0)
    file.write(_HEADER.pack(_ERROR if is_error else _VALUE, time_s, size))
    file.flush()


def read(fd: int) -> Optional[Record]:
    """None if the rank left no whole record."""
    if os.fstat(fd).st_size < _HEADER.size:
        return None
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        kind, time_s, size = _HEADER.unpack_from(memory)
        if kind not in (_VALUE, _ERROR):
            return None
        return Record(kind == _ERROR, time_s, memory[_HEADER.size:_HEADER.size + size])

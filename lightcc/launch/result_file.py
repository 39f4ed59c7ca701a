"""The file in memory (run_files.py) in which a rank of run() leaves its result: a header, then a pickle (the value) or
UTF-8 text (the traceback). The header is written last, so where there is one the file is whole.
"""

import mmap
import os
import pickle
import struct
from typing import Any, BinaryIO, NamedTuple, Optional

_HEADER = struct.Struct("<4sdQ")  # kind, time, bytes that follow
_VALUE, _ERROR = b"valu", b"erro"
BODY_AT = _HEADER.size


class Header(NamedTuple):
    is_error: bool
    time_s: float  # CLOCK_MONOTONIC, one clock for all ranks of a host
    size: int      # bytes of the body


def begin(file: BinaryIO) -> None:
    """The body is written to the file after this, and commit after the body. It may begin once more."""
    file.seek(BODY_AT)
    file.truncate()


def commit(file: BinaryIO, is_error: bool, time_s: float) -> None:
    size = file.tell() - BODY_AT
    file.flush()
    write_header(file.fileno(), Header(is_error, time_s, size))


def write_header(fd: int, header: Header) -> None:
    """To be called when the body is written; from now on the result is valid."""
    os.pwrite(fd, _HEADER.pack(_ERROR if header.is_error else _VALUE, header.time_s, header.size), 0)


def read_header(fd: int) -> Optional[Header]:
    """None if the rank left no whole result."""
    head = os.pread(fd, BODY_AT, 0)
    if len(head) < BODY_AT:
        return None
    kind, time_s, size = _HEADER.unpack(head)
    return Header(kind == _ERROR, time_s, size) if kind in (_VALUE, _ERROR) else None


def read_text(fd: int, header: Header) -> str:
    return os.pread(fd, header.size, BODY_AT).decode(errors="replace")


def read_value(fd: int, header: Header) -> Any:
    """Unpickled from the mapped file: a large one is not copied first."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as whole, \
            whole[BODY_AT:BODY_AT + header.size] as body:
        return pickle.loads(body)

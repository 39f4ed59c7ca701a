"""Files of safetensors, written and read in slices: a shard is never in memory twice.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name: dtype, shape, data_offsets; and
__metadata__, strings by name), and the tensors' bytes without holes. The package safetensors reads what is written.
Source: https://huggingface.co/docs/safetensors, "Format".
"""
import json
import os
import struct
from typing import Any, Dict, Mapping, NamedTuple, Tuple

import numpy

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000  # as the package safetensors has it
_ALIGNMENT = 64
_METADATA = "__metadata__"
_DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8", "U64": "<u8", "F32": "<f4", "F64": "<f8"}
_NAMES = {numpy.dtype(code): name for name, code in _DTYPES.items()}


class Column(NamedTuple):
    """A tensor of a file: its dtype and shape; offset: of its first byte in the file."""

    dtype: numpy.dtype
    shape: Tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0."""
        return int(numpy.prod(self.shape[1:], dtype=numpy.int64)) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes


class ShardWriter:
    """Writes a new file. columns: name to (dtype, shape), all with at least one dimension; metadata: strings by name.

    write(name, first, rows) puts rows at index `first` of dimension 0; close() has all bytes on the disk. The file is
    of its full size from the beginning, so a full disk is noticed before anything is written.
    Errors: OSError with the file's name.

    >>> import numpy; writer = ShardWriter("shard", {"key": (numpy.uint64, (3,))}, {"save": "1"})
    >>> writer.write("key", 1, numpy.array([7, 8], numpy.uint64)); writer.close()
    >>> ShardReader("shard").read("key", 0, 3)
    array([0, 7, 8], dtype=uint64)
    """

    def __init__(self, path: str, columns: Mapping[str, Tuple[Any, Tuple[int, ...]]], metadata: Mapping[str, str]):
        described: Dict[str, Any] = {_METADATA: dict(metadata)}
        at = 0
        for name, (dtype, shape) in columns.items():
            size = int(numpy.prod(shape, dtype=numpy.int64)) * numpy.dtype(dtype).itemsize
            described[name] = {"dtype": _NAMES[numpy.dtype(dtype)], "shape": list(shape),
                               "data_offsets": [at, at + size]}
            at += size
        header = json.dumps(described).encode()
        header += b" " * (-(len(header) + _LENGTH.size) % _ALIGNMENT)
        self.columns, _ = _columns(path, described, _LENGTH.size + len(header))
        self.bytes = _LENGTH.size + len(header) + at
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self.path = path
        try:
            os.posix_fallocate(self._file, 0, self.bytes)
            _write(self._file, _LENGTH.pack(len(header)) + header, 0)
        except OSError as error:
            self.abandon()
            raise _of(error, path) from error

    def write(self, name: str, first: int, rows: numpy.ndarray) -> None:
        column = self.columns[name]
        data = numpy.ascontiguousarray(rows, column.dtype)
        assert data.shape[1:] == column.shape[1:] and first + len(data) <= column.shape[0], (name, first, data.shape)
        try:
            _write(self._file, data.reshape(-1).view(numpy.uint8).data, column.offset + first * column.row_bytes)
        except OSError as error:
            raise _of(error, self.path) from error

    def close(self) -> None:
        """The file is whole, and on the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _of(error, self.path) from error
        finally:
            os.close(self._file)
            self._file = -1

    def abandon(self) -> None:
        """Closes and removes a file that is not whole. Does nothing after close."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            os.unlink(self.path)


class ShardReader:
    """Reads a file in slices. Attributes: columns, by name; metadata; bytes, of the file.

    Errors: FileNotFoundError; ValueError with the file's name for one that is no safetensors file, or is truncated.

    >>> import numpy; ShardWriter("shard", {"last": (numpy.uint32, (2, 2))}, {"save": "1"}).close()
    >>> reader = ShardReader("shard"); reader.metadata, reader.columns["last"].shape
    ({'save': '1'}, (2, 2))
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "rb") as file:
            size = self.bytes = os.fstat(file.fileno()).st_size
            length = _LENGTH.unpack(file.read(_LENGTH.size))[0] if size >= _LENGTH.size else _MOST_HEADER_BYTES + 1
            if length > min(_MOST_HEADER_BYTES, size - _LENGTH.size):
                raise ValueError(f"{path} is no safetensors file, or only the beginning of one ({size} bytes).")
            try:
                described = json.loads(file.read(length).decode())
                self.columns, end = _columns(path, described, _LENGTH.size + length)
                self.metadata: Dict[str, str] = dict(described.get(_METADATA, {}))
            except (UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error}).") from error
        if end != size:
            raise ValueError(f"{path} is truncated: its header says {end} bytes and it has {size}."
                             if size < end else f"{path} has {size - end} bytes more than its header says.")

    def read(self, name: str, first: int, count: int) -> numpy.ndarray:
        """`count` rows of a column from index `first`. ValueError if it has ended before, or has no such column."""
        if name not in self.columns:
            raise ValueError(f"{self.path} has no {name!r}: it has {sorted(self.columns)}.")
        column = self.columns[name]
        rows = numpy.empty((count, *column.shape[1:]), column.dtype)
        if first + count > column.shape[0]:
            raise ValueError(f"{self.path}: {name} has {column.shape[0]} rows, not {first + count}.")
        with open(self.path, "rb") as file:
            file.seek(column.offset + first * column.row_bytes)
            if file.readinto(rows.reshape(-1).view(numpy.uint8).data) != rows.nbytes:  # type: ignore[arg-type]
                raise ValueError(f"{self.path} was truncated while it was read.")
        return rows

    def all(self, name: str) -> numpy.ndarray:
        """A column's rows. ValueError if it is not there."""
        return self.read(name, 0, self.columns[name].shape[0] if name in self.columns else 0)


def _columns(path: str, described: Mapping[str, Any], start: int) -> Tuple[Dict[str, Column], int]:
    """The tensors of a header and where the last one ends. start: of the first byte behind the header."""
    columns: Dict[str, Column] = {}
    ranges = []
    for name, of in described.items():
        if name == _METADATA:
            continue
        first, last = of["data_offsets"]
        column = Column(numpy.dtype(_DTYPES[of["dtype"]]), tuple(int(n) for n in of["shape"]), start + first)
        if not column.shape or min(column.shape) < 0 or last - first != column.bytes:
            raise ValueError(f"{name} is {of}")
        columns[name] = column
        ranges.append((column.offset, column.offset + column.bytes))
    end = start
    for first, last in sorted(ranges):
        if first != end:
            raise ValueError("its tensors have holes between them or overlap")
        end = last
    return columns, end


def _write(file: int, data: Any, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


def _of(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror, path)

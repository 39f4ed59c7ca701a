"""The floor of a lookup: random reads of as many rows, of that width, out of memory as large as the table's rows.

embedding_floor.c is compiled by cc when it is needed.
"""
import ctypes
import subprocess
import time

import numpy as np
from where import RESULTS

HEADER_BYTES = 16


class Floor:
    """Rows of record_bytes, of which the weights behind a header are read."""

    def __init__(self, rows: int, record_bytes: int, weight_bytes: int):
        library = RESULTS / "embedding_floor.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        source = __file__[:-3] + ".c"
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), source], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.floor_memory.restype = ctypes.c_void_p
        self._library.floor_memory.argtypes = [ctypes.c_size_t]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.floor_read.argtypes = [pointer, size, size, size, pointer, size, pointer]
        self._record_bytes, self._weight_bytes = record_bytes, weight_bytes
        self._memory = self._library.floor_memory(rows * record_bytes)
        if not self._memory:
            raise MemoryError(f"no {rows * record_bytes} bytes for the floor")

    def read(self, row_numbers: np.ndarray, out: np.ndarray) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self._library.floor_read(self._memory, self._record_bytes, HEADER_BYTES, self._weight_bytes,
                                 row_numbers.ctypes.data, len(row_numbers), out.ctypes.data)
        return time.perf_counter() - begin

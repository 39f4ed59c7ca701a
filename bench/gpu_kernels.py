"""lightcc's kernels on a GPU, beside copies by the driver, which read and write as many bytes: scale, and copy_all,
that one also beside what PyTorch has for many tensors. bench/gpu.py starts it.

    python bench/gpu_kernels.py TABLE.so LIBRARY.so OUTPUT.json [BEFORE.so]

TABLE.so: of gpu_table/table.cc. LIBRARY.so: lightcc's core. BEFORE.so: that of another build, by turns with it.
"""
import ctypes
import functools
import json
import random
import statistics
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
import torch

from lightcc.core import lib

BEFORE = "before"            # the same by the other build
GOAL = 0.85                  # of the bandwidth of a copy
MIB = 1 << 20
MEMORY = 512 * MIB           # read in turn, and as much written, so that no cache holds it
TENSORS = 1000
LEAST, MOST = 4 << 10, MIB   # bytes of each of them
ROUNDS, CALLS = 15, 10       # a round measures each side once, so many calls one after the other
HELD_CYCLES = 20_000_000     # of the GPU, in which these calls are queued: it shall not wait for the host
DTYPES = {torch.float32: lib.FLOAT32, torch.float16: lib.FLOAT16, torch.bfloat16: lib.BFLOAT16,
          torch.float64: lib.FLOAT64, torch.int32: lib.INT32}

Calls = Dict[str, Callable[[int], Any]]  # name: a call, which gets how many there were before it


class Table:
    """Functions of a library, on the current stream of device 0."""

    def __init__(self, table: str, library: str):
        self._functions = ctypes.CDLL(table)
        for name, arguments in (("load_kernels", []), ("copy", [*[c_void_p] * 3, c_size_t]),
                                ("scale", [c_void_p, c_int, c_void_p, c_void_p, c_size_t, c_double]),
                                ("copy_all", [c_void_p, c_void_p, c_size_t])):
            function = getattr(self._functions, f"gpu_table_{name}")
            function.restype, function.argtypes = c_char_p, [c_void_p, c_int, *arguments]
        open_ = self._functions.gpu_table_open
        open_.restype, open_.argtypes = c_void_p, [c_char_p, POINTER(c_char_p)]
        failure = c_char_p()
        self._table = open_(library.encode(), byref(failure))
        self._check(failure.value)

    def load_kernels(self) -> None:
        self._check(self._functions.gpu_table_load_kernels(self._table, 0))

    def copy(self, to: int, from_: int, count: int) -> None:
        self._check(self._functions.gpu_table_copy(self._table, 0, self._stream(), to, from_, count))

    def scale(self, dtype: int, to: int, from_: int, count: int, factor: float) -> None:
        self._check(self._functions.gpu_table_scale(self._table, 0, self._stream(), dtype, to, from_, count, factor))

    def copy_all(self, copies: np.ndarray) -> None:
        """copies: rows of three uint64, CudaCopy."""
        self._check(self._functions.gpu_table_copy_all(self._table, 0, self._stream(), copies.ctypes.data,
                                                       len(copies)))

    @staticmethod
    def _stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    @staticmethod
    def _check(failure: Optional[bytes]) -> None:
        if failure:
            raise RuntimeError(failure.decode())


class Took(NamedTuple):
    """Seconds of a call."""
    gpu: float
    host: float  # until it has returned


def measure(calls: Calls) -> Dict[str, Took]:
    """Medians, taken by turns."""
    samples: Dict[str, List[Took]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(HELD_CYCLES)
            begin.record()
            began = time.perf_counter()
            for i in range(CALLS):
                call(turn * CALLS + i)
            host = time.perf_counter() - began
            end.record()
            end.synchronize()
            if turn >= 2:  # it is warm
                samples[name].append(Took(begin.elapsed_time(end) / 1e3 / CALLS, host / CALLS))
    return {name: Took(*map(statistics.median, zip(*took))) for name, took in samples.items()}


def rows_of(case: str, bytes_: int, sides: Dict[str, Took], held: str) -> List[Dict[str, Any]]:
    """held: which of them has a goal."""
    rows = []
    for name, took in sides.items():
        ratio = sides["copy"].gpu / took.gpu
        rows.append({"case": case, "side": name, "bytes": bytes_, "us": 1e6 * took.gpu, "host_us": 1e6 * took.host,
                     "gb_per_s": 2 * bytes_ / took.gpu / 1e9, "of_copy": ratio, "goal": GOAL if name == held else None,
                     "met": ratio >= GOAL if name == held else None})
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Dict[str, Any]) -> str:
    verdict = "" if row["goal"] is None else f"  >= {row['goal']}  {'ok' if row['met'] else 'MISSED'}"
    return (f"{row['case']:<36}{row['side']:<21}{row['us']:>8.1f} µs{row['gb_per_s']:>7.0f} GB/s"
            f"{row['of_copy']:>7.3f} of copy, host {row['host_us']:.1f} µs{verdict}")


def scale_rows(table: Table, before: Optional[Table]) -> List[Dict[str, Any]]:
    from_, to = (torch.empty(MEMORY, dtype=torch.uint8, device="cuda") for _ in range(2))
    rows = []
    for dtype, code in DTYPES.items():
        numbers = from_.view(dtype)
        numbers.copy_(torch.randint(-100, 100, (len(numbers),), device="cuda"))
        expected = (numbers[:1000].double() * 0.5).to(dtype)
        table.scale(code, to.data_ptr(), from_.data_ptr(), 1000, 0.5)
        assert torch.equal(to.view(dtype)[:1000], expected), f"{dtype} is not scaled"
        for bytes_ in (256 * MIB, 16 * MIB) if dtype == torch.float32 else (256 * MIB,):
            count = bytes_ // dtype.itemsize

            def at(tensor: torch.Tensor, i: int, bytes_: int = bytes_) -> int:
                return tensor.data_ptr() + i * bytes_ % MEMORY

            def scale(i: int, by: Table = table, code: int = code, count: int = count, at: Callable = at) -> None:
                by.scale(code, at(to, i), at(from_, i), count, 0.5)

            def in_place(i: int, by: Table = table, code: int = code, count: int = count, at: Callable = at) -> None:
                by.scale(code, at(to, i), at(to, i), count, 1.0 - 2.0 ** -20)

            def copy(i: int, bytes_: int = bytes_, at: Callable = at) -> None:
                table.copy(at(to, i), at(from_, i), bytes_)

            case = f"{bytes_ // MIB} MiB of {str(dtype).split('.')[1]}"
            for name, call in {"scale": scale, **({"scale in place": in_place} if code == lib.FLOAT32 else {})}.items():
                calls: Calls = {"copy": copy, "scale": call}
                if before:
                    calls[BEFORE] = functools.partial(call, by=before)
                rows += rows_of(f"{name}, {case}", bytes_, measure(calls), "scale")
    return rows


def copies_of(to: List[torch.Tensor], from_: List[torch.Tensor]) -> np.ndarray:
    return np.array([(x.data_ptr(), y.data_ptr(), x.nbytes) for x, y in zip(to, from_)], np.uint64)


def pack_rows(table: Table, before: Optional[Table], aligned: bool) -> List[Dict[str, Any]]:
    """Many tensors into one buffer and back. aligned: to 64 bytes there; else one right behind the other."""
    draw = random.Random(1)
    counts = [round(LEAST * (MOST / LEAST) ** draw.random()) // 4 for _ in range(TENSORS)]
    tensors = [torch.randn(count, device="cuda") for count in counts]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + (-(-count // 16) * 16 if aligned else count))
    buffer, other = (torch.zeros(offsets[-1], device="cuda") for _ in range(2))
    views = [buffer[offset:offset + count] for offset, count in zip(offsets, counts)]
    bytes_ = 4 * sum(counts)
    into, back = copies_of(views, tensors), copies_of(tensors, views)
    expected = [tensor.clone() for tensor in tensors]
    table.copy_all(into)
    for tensor in tensors:
        tensor.zero_()
    table.copy_all(back)
    assert all(map(torch.equal, tensors, expected)), "what comes back is not what was sent"

    def copy(_: int) -> None:
        table.copy(other.data_ptr(), buffer.data_ptr(), bytes_)

    calls: Calls = {"copy": copy, "copy_all": lambda _: table.copy_all(into),
                    **({BEFORE: lambda _: before.copy_all(into)} if before else {}),
                    "torch._foreach_copy_": lambda _: torch._foreach_copy_(views, tensors)}
    if not aligned:
        calls["torch.cat"] = lambda _: torch.cat(tensors, out=buffer)
    case = f"{TENSORS} tensors, {'aligned' if aligned else 'tight'}"
    rows = rows_of(f"into a buffer: {case}", bytes_, measure(calls), "copy_all")
    calls = {"copy": copy, "copy_all": lambda _: table.copy_all(back),
             **({BEFORE: lambda _: before.copy_all(back)} if before else {}),
             "torch._foreach_copy_": lambda _: torch._foreach_copy_(tensors, views)}
    return rows + rows_of(f"out of it: {case}", bytes_, measure(calls), "copy_all")


def main() -> None:
    table, library, output, *others = sys.argv[1:]
    functions = Table(table, library)
    before = Table(table, others[0]) if others else None
    functions.load_kernels()
    rows = [*scale_rows(functions, before), *pack_rows(functions, before, aligned=True),
            *pack_rows(functions, before, aligned=False)]
    Path(output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

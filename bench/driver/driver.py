"""One rank of a library that is called from Python: the same arguments, commands and answers as driver.c.

    python driver.py SOCKET BARRIER CORES MODULE

MODULE is a file in bench/peers with the functions of gloo.py. Its hot loop is Python's, as it is for its users.
"""
import ctypes
import importlib
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
RANK, SIZE = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
ARRIVAL_BYTES, DECISION, MEET_S = 64, 4096, 60  # DECISION: where it lies in the page
PR_SET_PDEATHSIG = 1


class Together:
    """The page that ranks map to begin together; see driver.c."""

    def __init__(self, path: str):
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), DECISION + 16)
        self._turn = self._measurement = 0

    def __call__(self) -> None:
        self._turn += 1
        struct.pack_into("<Q", self._page, RANK * ARRIVAL_BYTES, self._turn)
        deadline = time.monotonic() + MEET_S
        for rank in range(SIZE):
            while struct.unpack_from("<Q", self._page, rank * ARRIVAL_BYTES)[0] < self._turn:
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank} did not come to the start of a measurement for {MEET_S} s")

    def begin(self, limit_ms: int) -> None:
        """A measurement with a time limit."""
        self._measurement += 1
        self._deadline = time.monotonic() + limit_ms / 1e3
        if RANK == 0:
            struct.pack_into("<Q", self._page, DECISION + 8, 0)
        self()

    def time_is_up(self, batch: int) -> bool:
        """Rank 0's word on it, the same for all."""
        decision = self._measurement * 1000 + batch
        if RANK == 0:
            if time.monotonic() > self._deadline:
                struct.pack_into("<Q", self._page, DECISION + 8, batch)
            struct.pack_into("<Q", self._page, DECISION, decision)
        while struct.unpack_from("<Q", self._page, DECISION)[0] < decision:
            os.sched_yield()
        return struct.unpack_from("<Q", self._page, DECISION + 8)[0] == batch


class Rank:
    """Answers one command with each method."""

    def __init__(self, side: Any, together: Together):
        self._side, self._together = side, together
        self._tensors: List[torch.Tensor] = []
        self._ways: Dict[str, Callable[[], None]] = {"each": self._each, "async": self._async, "fused": self._fused}

    def prepare(self, memory: str, place: str, *counts: str) -> str:
        if (memory, place) != ("private", "in"):
            raise ValueError(f"{self._side.NAME} sums in place, in private memory")
        self._tensors = [torch.zeros(int(count)) for count in counts]
        self._bucket = torch.zeros(sum(map(int, counts))) if len(counts) > 1 else None
        return "ok"

    def check(self, how: str, seed: str) -> str:
        for i, tensor in enumerate(self._tensors):
            tensor.copy_(numbers(RANK, int(seed) + i, len(tensor)))
        self._together()
        self._ways[how]()
        for i, tensor in enumerate(self._tensors):
            expected = sum(numbers(rank, int(seed) + i, len(tensor)) for rank in range(SIZE))
            if not torch.equal(tensor, expected):
                raise ValueError(f"WRONG RESULT: tensor {i} of {len(tensor)} floats (seed {seed})")
            tensor.zero_()
        self._together()
        return "ok"

    def time(self, how: str, warm: str, calls: str, batches: str, limit_ms: str) -> str:
        run = self._ways[how]
        times: List[int] = []
        self._together.begin(int(limit_ms))
        for _ in range(int(warm)):
            run()
        while not times or (len(times) < int(batches) and not self._together.time_is_up(len(times))):
            begin = time.perf_counter_ns()
            for _ in range(int(calls)):
                run()
            times.append(time.perf_counter_ns() - begin)
        return " ".join(["ok", *map(str, times)])

    def release(self) -> str:
        self._tensors, self._bucket = [], None
        return "ok"

    def _each(self) -> None:
        for tensor in self._tensors:
            self._side.allreduce_in_place(tensor)

    def _async(self) -> None:
        for handle in [self._side.start(tensor) for tensor in self._tensors]:
            self._side.finish(handle)

    def _fused(self) -> None:
        torch.cat(self._tensors, out=self._bucket)
        self._side.allreduce_in_place(self._bucket)
        for tensor, piece in zip(self._tensors, self._bucket.split([len(tensor) for tensor in self._tensors])):
            tensor.copy_(piece)


def numbers(rank: int, seed: int, count: int) -> torch.Tensor:
    """Whole numbers of at most 10 bits, so that every sum is exact in whichever order it is made."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(-511, 513, (count,), generator=generator, dtype=torch.int32).float()


def main() -> None:
    path, barrier, cores, module = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    stream = connection.makefile("rw")

    def say(text: str) -> None:
        stream.write(text + "\n")
        stream.flush()

    try:
        if cores != "any":
            bound = [int(core) for core in cores.split(",")]
            os.sched_setaffinity(0, {bound[RANK % len(bound)]})
        torch.set_num_threads(1)
        side = importlib.import_module(f"peers.{module}")
        side.init(RANK, SIZE, str(Path(path).parent / "meeting"))
        rank = Rank(side, Together(barrier))
        say(f"hello {RANK} {SIZE} {side.VERSION}")
        for line in stream:
            command, *words = line.split()
            if command == "quit":
                break
            say(getattr(rank, command)(*words))
    except Exception as error:
        say(f"error rank {RANK}: {type(error).__name__}: {error}".replace("\n", " | "))
        raise
    signal.alarm(20)  # a library whose end hangs must not keep the benchmark's own end waiting
    side.shutdown()


if __name__ == "__main__":
    main()

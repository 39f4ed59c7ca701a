"""Random collectives of random tensors on random streams, several at a time, some behind kernels that take long; each
result is compared with what all inputs, which every rank can make, come to: bit by bit, as all sums are of small
integers. On a machine without a GPU it runs with tensors of the CPU and no streams.

    python -m lightcc.runner -np 2 python tests/gpu/random_operations.py SECONDS [SEED]
"""
import contextlib
import os
import random
import sys
import time

import torch
from two_hosts import become_own_host

become_own_host()
import lightcc.torch as hvd  # noqa: E402  it is its own host now

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_AT_A_TIME, STREAMS = 6, 3
MOST_COUNTS = (1, 50, 3_000, 200_000, 3_000_000)  # elements in a rank's tensor
MOST_CYCLES = 2_000_000                           # of a kernel that delays a tensor


class Operation:
    """One, drawn alike on all ranks: `draw` gives the same numbers everywhere."""

    def __init__(self, draw, number):
        size = hvd.size()
        self.kind = draw.choice(("allreduce", "allreduce_", "broadcast", "broadcast_", "allgather", "alltoall",
                                 "reducescatter", "grouped_allreduce"))
        self.name = f"{self.kind}.{number}"
        dtype = draw.choice(DTYPES)
        most = max(1, draw.choice(MOST_COUNTS) // 4)
        rows = [draw.randint(0, most) for _ in range(size)]
        columns = draw.choice((1, 1, 3, 4))
        if self.kind not in ("allgather", "alltoall"):
            rows = rows[:1] * size
        self.root, seed = draw.randrange(size), draw.getrandbits(40)
        self.splits = [self._parts(draw, count) for count in rows]  # by sender
        self.inputs = []
        for rank in range(size):
            generator = torch.Generator().manual_seed(seed + rank)
            self.inputs.append(torch.randint(0, 9, (rows[rank], columns), generator=generator).to(dtype))

    @staticmethod
    def _parts(draw, count):
        borders = sorted(draw.randint(0, count) for _ in range(hvd.size() - 1))
        return [end - begin for begin, end in zip([0, *borders], [*borders, count])]

    def start(self, stream):
        """On this rank, on the stream."""
        with stream:
            self.x = self.inputs[hvd.rank()].to(DEVICE, copy=True)
            if self.kind == "allreduce":
                return hvd.allreduce_async(self.x, op=hvd.Sum, name=self.name)
            if self.kind == "allreduce_":
                return hvd.allreduce_async_(self.x, op=hvd.Sum, name=self.name)
            if self.kind == "broadcast":
                return hvd.broadcast_async(self.x, self.root, name=self.name)
            if self.kind == "broadcast_":
                return hvd.broadcast_async_(self.x, self.root, name=self.name)
            if self.kind == "allgather":
                return hvd.allgather_async(self.x, name=self.name)
            if self.kind == "alltoall":
                splits = torch.tensor(self.splits[hvd.rank()], dtype=torch.int32)
                return hvd.alltoall_async(self.x, splits, name=self.name)
            if self.kind == "reducescatter":
                return hvd.reducescatter_async(self.x, op=hvd.Sum, name=self.name)
            return hvd.grouped_allreduce_async([self.x, self.x[:1].clone()], op=hvd.Sum, name=self.name)

    def expected(self):
        me, size = hvd.rank(), hvd.size()
        dtype = self.inputs[0].dtype
        if self.kind.startswith("broadcast"):
            return [self.inputs[self.root]]
        if self.kind == "allgather":
            return [torch.cat(self.inputs)]
        if self.kind == "alltoall":
            parts = [x.split(splits)[me] for x, splits in zip(self.inputs, self.splits)]
            return [torch.cat(parts), torch.tensor([splits[me] for splits in self.splits], dtype=torch.int32)]
        total = sum(x.long() for x in self.inputs).to(dtype)
        if self.kind == "reducescatter":
            least, more = divmod(len(total), size)
            return [total.split([least + (rank < more) for rank in range(size)])[me]]
        return [total, total[:1]] if self.kind == "grouped_allreduce" else [total]

    def check(self, result):
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for found, expected in zip(results, self.expected()):
            found = found.cpu()
            assert found.dtype == expected.dtype and torch.equal(found, expected), \
                f"{self.name} of {expected.dtype} {tuple(expected.shape)} is wrong on rank {hvd.rank()}"


def streams():
    """Functions that give the context in which work goes to a stream."""
    if not ON_GPU:
        return [contextlib.nullcontext]
    made = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    return [lambda stream=stream: torch.cuda.stream(stream) for stream in made]


def main() -> None:
    until = time.monotonic() + float(sys.argv[1])
    hvd.init()
    seed = hvd.broadcast_object(int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4), "big"))
    draw, own = random.Random(seed), random.Random(f"{seed} {hvd.rank()}")  # alike on all ranks; and each its own
    places, done = streams(), 0
    if hvd.rank() == 0:
        print(f"seed {seed}", flush=True)
    while hvd.broadcast_object(time.monotonic() < until):
        operations = [Operation(draw, done + i) for i in range(draw.randint(1, MOST_AT_A_TIME))]
        handles = []
        for one in own.sample(operations, len(operations)):  # names, not the order, say which are the same
            place = own.choice(places)
            if ON_GPU and own.random() < 0.3:
                with place():
                    torch.cuda._sleep(own.randrange(MOST_CYCLES))
            handles.append((one, one.start(place())))
        for one, handle in own.sample(handles, len(handles)):
            with own.choice(places)():
                one.check(hvd.synchronize(handle))
        if ON_GPU:
            torch.cuda.synchronize()  # tensors of one stream have been read by another; until now they are kept
        done += len(operations)
    hvd.shutdown()
    print(f"{done} random operations on rank {os.environ['HOROVOD_RANK']}: ok", flush=True)


if __name__ == "__main__":
    main()

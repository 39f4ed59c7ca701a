"""How long each kind of collective takes two ranks through the host, and that none of them is far behind allreduce_:
  large  at most 1.3 times as long for each byte that enters or leaves the GPU, and broadcast_ no longer than allreduce_
  small  at most 100 µs a call
On a machine without a GPU it runs with tensors of the CPU, and expects nothing of them.

    LIGHTCC_NCCL=0 python -m lightcc.runner -np 2 python tests/gpu/staged_times.py
"""
import statistics
import sys
import time

import torch

import lightcc.torch as hvd

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
LARGE, SMALL = 64 << 20, 1 << 10  # bytes
MOST_RATIO, MOST_SMALL_S = 1.3, 100e-6
ROUNDS = 7
CALLS = {LARGE: 4, SMALL: 200}  # a round
WARM = 3

KINDS = {  # each with the bytes that cross the bus, by those of the tensor, on the rank that has most
    "allreduce_": (lambda x: hvd.allreduce_(x, op=hvd.Sum, name="x"), lambda n: 2 * n),
    "broadcast_": (lambda x: hvd.broadcast_(x, 0, name="x"), lambda n: n),
    "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum, name="x"), lambda n: n + n // hvd.size()),
    "alltoall": (lambda x: hvd.alltoall(x, name="x"), lambda n: 2 * n),
    "allgather": (lambda x: hvd.allgather(x, name="x"), lambda n: n + n * hvd.size()),
}


def seconds(call, tensor, calls):
    """Of one call, to the end of what it has put on the GPU: the median of the rounds, each that of the slower rank."""
    rounds = []
    for turn in range(WARM + ROUNDS):
        hvd.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call(tensor)
        if ON_GPU:
            torch.cuda.synchronize()
        took = torch.tensor((time.perf_counter() - begin) / calls, dtype=torch.float64)
        if turn >= WARM:
            rounds.append(hvd.allreduce(took, op=hvd.Max).item())
    return statistics.median(rounds)


def main() -> None:
    hvd.init()
    missed = []
    took = {}
    for size in (LARGE, SMALL):
        tensor = torch.zeros(size // 4, device=DEVICE)
        for kind, (call, crossing) in KINDS.items():
            took[kind] = seconds(call, tensor, CALLS[size])
            ratio = took[kind] / crossing(size) / (took["allreduce_"] / KINDS["allreduce_"][1](size))
            if hvd.rank() == 0:
                print(f"{kind:<14}{size >> 10:>6} KiB{1e6 * took[kind]:>11.0f} µs   {ratio:.2f} of allreduce_ a byte",
                      flush=True)
            if size == SMALL and took[kind] > MOST_SMALL_S:
                missed.append(f"{kind} of {size} bytes takes {1e6 * took[kind]:.0f} µs")
            if size == LARGE and kind != "broadcast_" and ratio > MOST_RATIO:
                missed.append(f"{kind} takes {ratio:.2f} of allreduce_'s time for a byte")
        if size == LARGE and took["broadcast_"] > took["allreduce_"]:
            missed.append("broadcast_ takes longer than allreduce_")
    hvd.shutdown()
    if ON_GPU and missed:
        sys.exit("\n".join(f"MISSED: {one}" for one in missed))
    print("times: ok", flush=True)


if __name__ == "__main__":
    main()

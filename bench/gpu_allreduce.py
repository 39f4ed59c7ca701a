"""All-reduces of GPU tensors by two ranks that share a GPU, as two hosts (tests/gpu/two_hosts.py): lightcc beside
torch.distributed with the same NCCL, where lightcc uses NCCL. A rank of bench/gpu.py.

    python bench/gpu_allreduce.py OUTPUT.json MEETING     MEETING: a file that does not exist, for torch.distributed

What these times say is how lightcc compares, and what HARP adds: kernels of two processes have the GPU by turns.
"""
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "tests" / "gpu"))
from two_hosts import become_own_host  # noqa: E402  where the tests of GPUs are

import lightcc.torch as hvd  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
ROUNDS = 7
ROUND_S = 0.15  # of a side, about
MOST_CALLS = 1000


def main() -> None:
    output, meeting = sys.argv[1:]
    become_own_host()
    hvd.init()
    torch.cuda.set_device(0)
    sides: Dict[str, Callable] = {"lightcc": lambda x: hvd.allreduce_(x, op=hvd.Sum, name="measured")}
    if os.environ.get("LIGHTCC_NCCL") == "1":
        dist.init_process_group("nccl", store=dist.FileStore(meeting, hvd.size()), rank=hvd.rank(),
                                world_size=hvd.size(), device_id=torch.device("cuda", 0))
        sides["torch.distributed"] = dist.all_reduce
    rows = []
    for bytes_ in SIZES:
        tensor = torch.empty(bytes_ // 4, device="cuda")
        for name, allreduce in sides.items():
            tensor.fill_(1.0 + hvd.rank())
            allreduce(tensor)
            assert (tensor == hvd.size() * (hvd.size() + 1) / 2).all(), f"{name}: {bytes_} bytes are wrong"
        tensor.zero_()
        rows.append({"bytes": bytes_, "seconds": rounds(tensor, sides)})
        if hvd.rank() == 0:
            print(line(rows[-1]), flush=True)
    if hvd.rank() == 0:
        Path(output).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()


def line(row: Dict[str, Any]) -> str:
    seconds = row["seconds"]
    times = "".join(f"{name:>20}{1e6 * took:>11.1f} µs" for name, took in seconds.items())
    peer = seconds.get("torch.distributed")
    return f"{row['bytes'] // KIB:>6} KiB{times}" + (f"   ratio {seconds['lightcc'] / peer:.3f}" if peer else "")


def rounds(tensor: torch.Tensor, sides: Dict[str, Callable]) -> Dict[str, float]:
    """Seconds of a call until its result is there: the median of the rounds, each that of the slower rank."""
    samples: Dict[str, List[float]] = {name: [] for name in sides}
    calls = dict.fromkeys(sides, 1)
    for turn in range(ROUNDS + 2):
        for name, allreduce in sides.items():
            torch.cuda.synchronize()
            hvd.barrier()
            begin = time.perf_counter()
            for _ in range(calls[name]):
                allreduce(tensor)
                torch.cuda.synchronize()
            took = (time.perf_counter() - begin) / calls[name]
            took = hvd.allreduce(torch.tensor([took], dtype=torch.float64), op=hvd.Max, name="slower").item()
            if turn == 1:  # warm; the ranks must agree on this
                calls[name] = max(1, min(MOST_CALLS, int(ROUND_S / took)))
            elif turn > 1:
                samples[name].append(took)
    return {name: statistics.median(times) for name, times in samples.items()}


if __name__ == "__main__":
    main()

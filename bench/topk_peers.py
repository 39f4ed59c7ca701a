"""What else finds the largest elements of a gradient, beside lightcc's selection (bench/topk.cc), in one run, by turns.

    python bench/topk_peers.py build/topk_bench        # 2^24 floats, 1 %, one core

torch.topk and numpy.argpartition only find them: neither adds what was left behind, nor leaves anything. lightcc's
times are those that topk_bench prints, of selection with error feedback; it runs once before each of the rounds.
"""
import argparse
import statistics
import subprocess
import time
from typing import Callable

import numpy as np
import torch
from where import heading, surroundings


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="topk_bench, which the target of that name builds")
    parser.add_argument("--log2", type=int, default=24, help="of the number of floats; default %(default)s")
    parser.add_argument("--share", type=int, default=100, help="one element in so many; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = 1 << args.log2
    k = count // args.share
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(1))
    array = numbers.numpy()
    peers = {"torch.topk": lambda: torch.topk(numbers.abs(), k),
             "numpy.argpartition": lambda: np.argpartition(np.abs(array), count - k)[count - k:]}
    print(heading(surroundings(1, [f"torch {torch.__version__}", f"numpy {np.__version__}"])), flush=True)
    samples = {name: [] for name in peers}
    for _ in range(args.rounds):
        subprocess.run([args.binary, str(count >> 20), str(args.share), "5"], check=True)
        for name, call in peers.items():
            samples[name].append(seconds(call))
    for name, some in samples.items():
        print(f"{name:<20} {1e3 * statistics.median(some):8.1f} ms")


if __name__ == "__main__":
    main()

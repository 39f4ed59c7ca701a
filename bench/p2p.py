"""Sends and receives of torch.distributed over lightcc, beside gloo's, in the same two processes, by turns.

    python bench/p2p.py [--repeats 9]

A round is forth and back: rank 0 sends what rank 1 receives and sends back, so that half of it is one way. The other
rows are both ways at a time, by batch_isend_irecv. Each repeat measures every row with lightcc and right after with
gloo; a repeat takes as long as its slower rank, and medians and their ratio are printed. Every row is checked first.
"""
import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
import torch.distributed as dist
from where import RESULTS, heading, leave_checkout, surroundings

import lightcc

KIB, MIB = 1 << 10, 1 << 20


class Case(NamedTuple):
    name: str
    bytes: int
    rounds: int
    both_ways: bool = False
    goal: float = 0  # of gloo's time; 0: none


CASES = (Case("1 float, one way", 4, 500, goal=1.0), Case("4 KiB, one way", 4 * KIB, 500),
         Case("64 KiB, one way", 64 * KIB, 300), Case("1 MiB, one way", MIB, 50),
         Case("64 MiB, one way", 64 * MIB, 2, goal=0.6), Case("1 MiB both ways", MIB, 50, True),
         Case("64 MiB both ways", 64 * MIB, 2, True))
Samples = Dict[str, Dict[str, List[float]]]  # case: side: seconds a message, of each repeat


def forth_and_back(group: Any, out: torch.Tensor, into: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(out, 1, group=group)
        dist.recv(into, 1, group=group)
    else:
        dist.recv(into, 0, group=group)
        dist.send(out, 0, group=group)


def both_ways(group: Any, out: torch.Tensor, into: torch.Tensor, rank: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank, group),
                                        dist.P2POp(dist.irecv, into, 1 - rank, group)]):
        work.wait()


def measure(repeats: int) -> Samples:
    """The samples of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("lightcc")
    rank = dist.get_rank()
    sides = {"lightcc": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    samples: Samples = {case.name: {side: [] for side in sides} for case in CASES}
    for repeat in range(-1, repeats):  # the first one warms up and checks
        for case in CASES:
            out, into = torch.full((case.bytes // 4,), float(rank + 1)), torch.zeros(case.bytes // 4)
            exchange = both_ways if case.both_ways else forth_and_back
            for side, group in sides.items():
                seconds = _timed(partial(exchange, group, out, into, rank), case.rounds)
                if repeat < 0:
                    assert (into == 2 - rank).all(), (case.name, side)
                    into.zero_()
                else:
                    samples[case.name][side].append(seconds / case.rounds / (1 if case.both_ways else 2))
    dist.barrier()
    dist.destroy_process_group()
    return samples


def _timed(function: Callable[[], None], rounds: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(rounds):
        function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each row; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "p2p.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    where = surroundings(2, [f"lightcc {lightcc.__version__}", f"gloo of torch {torch.__version__}"])
    print(heading(where), flush=True)
    output = args.output.resolve()
    leave_checkout()
    of_ranks = lightcc.run(measure, (args.repeats,), num_proc=2)
    rows = []
    for case in CASES:
        slower = {side: [max(pair) for pair in zip(*(samples[case.name][side] for samples in of_ranks))]
                  for side in of_ranks[0][case.name]}
        ours, theirs = (1e6 * statistics.median(slower[side]) for side in ("lightcc", "gloo"))
        verdict = "" if not case.goal else f"  <= {case.goal:g}: {'ok' if ours <= case.goal * theirs else 'MISSED'}"
        print(f"{case.name:20} lightcc {ours:12,.1f} µs   gloo {theirs:12,.1f} µs   ratio {ours / theirs:.3f}{verdict}")
        rows.append({"case": case.name, "samples": slower, "ratio": ours / theirs})
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**where, "rows": rows}, indent=1, ensure_ascii=False))
    print(f"All samples: {output}")


if __name__ == "__main__":
    main()

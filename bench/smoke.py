"""A short benchmark of lightcc beside torch.distributed's gloo, in the same processes, by turns.

    python bench/smoke.py [--np 2]

Every size is first checked on random numbers. Then each repeat measures every case with lightcc and right after with
gloo; a repeat takes as long as its slowest rank, and the median of the repeats is reported. A goal that is missed is
printed as such, and the exit code is 0 all the same: a test must not depend on how busy the machine is.
"""
import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from peers import gloo, own
from where import RESULTS, heading, leave_checkout, surroundings

import lightcc
import lightcc.torch as hvd
from lightcc.core import lib

BIG = 64 << 20  # bytes
COMPUTE_S = 0.1


class Case(NamedTuple):
    """A row of the table: a time or a count, and what it may be at most."""
    name: str
    unit: str
    goal: Optional[float] = None        # in this unit
    goal_ratio: Optional[float] = None  # of the peer's value


CASES = {
    "one": Case("1 float: allreduce", "µs", goal=15),
    "one_async": Case("1 float: allreduce_async_, synchronize", "µs", goal=20),
    "big": Case("64 MiB: allreduce_", "ms", goal_ratio=0.35),
    "big_shared": Case("64 MiB of lightcc's memory: allreduce_", "ms", goal_ratio=0.35),
    "overlap": Case("64 MiB: synchronize after 100 ms of compute", "ms", goal=1),
    "compute": Case("  what that compute took", "ms"),
    "idle_cpu": Case("idle: CPU time of a rank", "ms", goal=10),
    "idle_switches": Case("idle: voluntary context switches", "", goal=50),
}
PER_SECOND = {"µs": 1e6, "ms": 1e3, "": 1}
Samples = Dict[str, Dict[str, List[float]]]  # case: side: seconds, or a count, of each repeat


# What runs on every rank

def measure(repeats: int, calls: int, idle_s: float, meeting_point: str) -> Samples:
    """The samples of this rank."""
    torch.set_num_threads(1)
    hvd.init()
    hvd.barrier()
    samples: Samples = {case: {own.NAME: [value]} for case, value in idle(idle_s).items()}  # before gloo has threads
    gloo.init(hvd.rank(), hvd.size(), meeting_point)
    private, source = torch.empty(BIG // 4), random_numbers(BIG // 4, hvd.rank())
    shared = torch.frombuffer(lib.alloc(BIG), dtype=torch.float32, count=BIG // 4)
    for side in (own, gloo):
        for tensor in (torch.empty(1), private, shared):
            check(side, tensor)
    compute = Compute(COMPUTE_S)
    for _ in range(repeats):
        for side in (own, gloo):
            for case, seconds in measure_once(side, calls, private, shared, source, compute).items():
                samples.setdefault(case, {}).setdefault(side.NAME, []).append(seconds)
    gloo.shutdown()
    hvd.shutdown()
    return samples


def measure_once(side: Any, calls: int, private: torch.Tensor, shared: torch.Tensor, source: torch.Tensor,
                 compute: "Compute") -> Dict[str, float]:
    """Seconds that each case takes with this side."""
    one = torch.zeros(1)

    def blocking() -> None:
        for _ in range(calls):
            side.allreduce(one)

    def asynchronous() -> None:
        for _ in range(calls):
            side.finish(side.start(one))

    seconds = {"one": timed(blocking) / calls, "one_async": timed(asynchronous) / calls}
    for case, tensor in (("big", private), ("big_shared", shared)):
        tensor.copy_(source)
        seconds[case] = timed(lambda tensor=tensor: side.allreduce_in_place(tensor))
    private.copy_(source)
    hvd.barrier()
    handle = side.start(private)
    seconds["compute"] = time_of(compute.run)
    seconds["overlap"] = time_of(lambda: side.finish(handle))
    return seconds


def timed(function: Callable[[], Any]) -> float:
    """Seconds that it takes when all ranks begin together."""
    hvd.barrier()
    return time_of(function)


def time_of(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def idle(seconds: float) -> Dict[str, float]:
    """What it costs to do nothing: CPU time and voluntary context switches of all threads of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"idle_cpu": cpu_s, "idle_switches": after.ru_nvcsw - before.ru_nvcsw}


class Compute:
    """A fixed piece of work that keeps one core busy and calls neither side."""

    def __init__(self, seconds: float):
        self._matrix = torch.eye(192)
        self._rounds = 1
        hvd.barrier()
        self._rounds = max(1, round(seconds / min(time_of(self.run) for _ in range(100))))

    def run(self) -> None:
        for _ in range(self._rounds):
            self._matrix = self._matrix @ self._matrix


def random_numbers(count: int, rank: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 + rank))


def check(side: Any, tensor: torch.Tensor) -> None:
    """Raises AssertionError unless all three ways to allreduce on this side add up the ranks' random numbers."""
    mine = random_numbers(tensor.numel(), hvd.rank())
    expected = sum(random_numbers(tensor.numel(), rank) for rank in range(hvd.size()))

    def asynchronous(tensor: torch.Tensor) -> torch.Tensor:
        side.finish(side.start(tensor))
        return tensor

    for way in (side.allreduce, side.allreduce_in_place, asynchronous):
        torch.testing.assert_close(way(tensor.copy_(mine)), expected,
                                   msg=lambda text, way=way: f"{side.NAME}, {way.__name__}, rank {hvd.rank()}: {text}")


# What the ranks' samples amount to

def row_of(case: Case, sides: Dict[str, List[float]]) -> Dict[str, Any]:
    scaled = {side: statistics.median(values) * PER_SECOND[case.unit] for side, values in sides.items()}
    value, peer = scaled[own.NAME], scaled.get(gloo.NAME)
    ratio = value / peer if peer else None
    goal, met = "", None
    if case.goal is not None:
        goal, met = f"<= {case.goal:g} {case.unit}".strip(), value <= case.goal
    elif case.goal_ratio is not None:
        goal, met = f"<= {case.goal_ratio:g} x {gloo.NAME}", ratio <= case.goal_ratio
    return {"case": case.name, "unit": case.unit, "lightcc": value, "peer": peer, "ratio": ratio, "goal": goal,
            "met": met, "samples": {side: [x * PER_SECOND[case.unit] for x in xs] for side, xs in sides.items()}}


def slowest(of_ranks: List[Samples]) -> Samples:
    """For each repeat the value of the rank that was slowest or used most."""
    return {case: {side: [max(values) for values in zip(*(samples[case][side] for samples in of_ranks))]
                   for side in of_ranks[0][case]} for case in CASES}


def table(rows: List[Dict[str, Any]]) -> str:
    def number(value: Optional[float], unit: str) -> str:
        return "" if value is None else f"{value:,.{0 if unit == '' else 1 if value >= 10 else 2}f} {unit}"

    lines = [("", own.NAME, gloo.NAME, "ratio", "goal", "")]
    for row in rows:
        verdict = {True: "ok", False: "MISSED", None: ""}[row["met"]]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append((row["case"], number(row["lightcc"], row["unit"]), number(row["peer"], row["unit"]), ratio,
                      row["goal"], verdict))
    return "\n".join(f"{a:<44} {b:>12} {c:>12} {d:>7}  {e:<15} {f}".rstrip() for a, b, c, d, e, f in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks, 2 or more; default %(default)s")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each case; default %(default)s")
    parser.add_argument("--calls", type=int, default=1000, help="calls a measurement of 1 float; default %(default)s")
    parser.add_argument("--idle", type=float, default=10, metavar="SECONDS", help="idle time; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "smoke.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if args.np < 2:
        parser.error("--np: one rank alone has nobody to send to")
    output = args.output.resolve()
    leave_checkout()
    where = surroundings(args.np, [own.VERSION, gloo.VERSION])
    print(heading(where), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = lightcc.run(measure, (args.repeats, args.calls, args.idle, f"{folder}/gloo"), num_proc=args.np)
    merged = slowest(of_ranks)
    rows = [row_of(case, merged[key]) for key, case in CASES.items()]
    print(table(rows))
    print(f"Median of {args.repeats} repeats, slowest rank; idle for {args.idle:g} s after init; results were checked.")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**where, "rows": rows}, indent=1, ensure_ascii=False))
    print(f"All samples: {output}")


if __name__ == "__main__":
    main()

"""Rows of bench/harp.py for HARP as NCCL's network: its plugin against nccl_socket/plugin.cc, which does what NCCL's
own socket transport does, both called as NCCL calls them."""
from typing import Any, Callable, Dict, List

from harp_rows import Bench, Goal, Row, Samples, cpu_per_byte, goodput, median, p50, ratio

SOCKET, SOCKET_4 = "socket", "socket 4"
# ns a byte of both sides that NCCL's socket transport itself took on a machine like the one of docs/harp.md.
SOCKET_NS = {1500: 1.02 + 1.02, 9000: 0.75 + 0.82}


def plugin(bench: Bench, name: str, *words: str) -> List[str]:
    path = (bench.args.build / name).resolve()
    if not path.exists():
        raise RuntimeError(f"no {path}: cmake --build {bench.args.build} --target nccl-net-harp nccl-socket-baseline")
    return ["--transport", f"plugin={path}", *words]


def sides(bench: Bench, run: Callable[..., Any], words: List[str]) -> Dict[str, Callable[[], Any]]:
    baseline = "libnccl-socket-baseline.so"
    return {"harp": lambda: run(*plugin(bench, "libnccl-net-harp.so", "--engine-mode", bench.args.engine_mode), *words),
            SOCKET: lambda: run(*plugin(bench, baseline), *words),
            SOCKET_4: lambda: run(*plugin(bench, baseline, "--flows", "4"), *words)}


def measured(mtu: int, offloads: bool, *words: str) -> Callable[[Bench], Samples]:
    def measure(bench: Bench) -> Samples:
        with bench.cable(mtu=mtu, offloads=offloads) as (_, run):
            return bench.rounds(sides(bench, run, list(words)))
    return measure


def throughput_goals(mtu: int, least: float) -> Callable[[Samples], List[Goal]]:
    def goals(samples: Samples) -> List[Goal]:
        off = abs(median(cpu_per_byte, samples[SOCKET]) / SOCKET_NS[mtu] - 1)
        harp, socket = samples["harp"], samples[SOCKET]
        return [Goal("baseline's CPU a byte, off NCCL's socket transport by", off, 0.1, None, False),
                Goal("throughput by the baseline's", ratio(goodput, harp, socket), least, None, True),
                Goal("CPU a byte by the baseline's", ratio(cpu_per_byte, harp, socket), 0.75, None, False)]
    return goals


def ping_goals(samples: Samples) -> List[Goal]:
    return [Goal("round trip p50 by the baseline's", ratio(p50, samples["harp"], samples[SOCKET]), 0.8, None, False)]


def no_goals(_: Samples) -> List[Goal]:
    return []


PING = ("--mode", "latency", "--message", "4K")
NCCL_ROWS = [
    Row("nccl-1500-off", measured(1500, False), throughput_goals(1500, 1.3)),
    Row("nccl-9000-off", measured(9000, False), throughput_goals(9000, 1.8)),
    Row("nccl-1500-on", measured(1500, True), no_goals),
    Row("nccl-9000-on", measured(9000, True), no_goals),
    *(Row(f"nccl-ping-{mtu}-off", measured(mtu, False, *PING), ping_goals) for mtu in (1500, 9000)),
]

"""The rows of bench/harp.py: what each measures, side by side, and what is asked of it."""
import argparse
import contextlib
import fnmatch
import json
import os
import statistics
import subprocess
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from harp_network import Cable

PORT = 4720
TIMEOUT_S = 120
TCP, TCP_LARGE, TCP_4 = "tcp", "tcp large buffers", "tcp 4 flows"
RAW = "raw AF_XDP"
Sample = Dict[str, Any]
Samples = Dict[str, List[Sample]]


class Goal(NamedTuple):
    what: str
    value: float
    bar: float
    stretch: Optional[float]
    at_least: bool

    def met(self, bound: float) -> bool:
        return self.value >= bound if self.at_least else self.value <= bound

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "MISSED" if not self.met(self.bar) else "ok" if self.stretch is None or not self.met(
            self.stretch) else "ok, and the stretch"
        stretch = "" if self.stretch is None else f" (stretch {self.stretch:g})"
        return f"    {self.what}: {self.value:.3g}, target {sign} {self.bar:g}{stretch}: {verdict}"


class Row(NamedTuple):
    name: str
    measure: Callable[["Bench"], Samples]
    goals: Callable[[Samples], List[Goal]]
    needs_root: bool = True


class Bench:
    """What rows are measured with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        cores = sorted(os.sched_getaffinity(0))
        self.cores = [str(cores[0]), str(cores[1 % len(cores)])]
        self.program = str((args.build / "harp-bench").resolve())
        self.raw_program = str((args.build / "harp_xsk_bench").resolve())

    def rounds(self, sides: Dict[str, Callable[[], Sample]]) -> Samples:
        names = [name for name in sides if fnmatch.fnmatch(name, self.args.sides)]
        samples: Samples = {name: [] for name in names}
        for turn in range(self.args.rounds):
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                samples[name].append(sides[name]())
        return samples

    def alone(self, *words: str) -> Sample:
        """Client and server, which it starts, on this host."""
        return self._sample([self.program, *words, "--cores", self.cores[0], "--server-cores", self.cores[1],
                             *self._times()])

    def engines(self, *words: str) -> Sample:
        return self._sample([self.program, *words, "--cores", ",".join(self.cores), *self._times()])

    @contextlib.contextmanager
    def cable(self, **properties: Any) -> Iterator[Tuple[Cable, Callable[..., Sample]]]:
        """Two hosts, and how to measure from one to the other."""
        with Cable(**properties) as cable:
            server = cable.popen(0, [self.program, "--listen", f"{cable.address(0)}:{PORT}", "--cores", self.cores[1],
                                     "--interface", "eth0"])
            try:
                def measure(*words: str) -> Sample:
                    return self._sample(cable.command(1, [
                        self.program, "--connect", f"{cable.address(0)}:{PORT}", "--interface", "eth0", *words,
                        "--cores", self.cores[0], *self._times()]))
                yield cable, measure
            finally:
                server.kill()
                server.wait()

    def raw_xsk(self, cable: Cable) -> Sample:
        return self._sample([self.raw_program, *cable.names[::-1], cable.address(0), str(self.args.seconds),
                             *self.cores])

    def _times(self) -> List[str]:
        return ["--seconds", str(self.args.seconds), "--warm-up", str(self.args.warm_up)]

    def _sample(self, command: List[str]) -> Sample:
        done = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)


# ---- what samples say

def goodput(sample: Sample) -> float:
    return sample["server"]["bytes_per_s"] if "server" in sample else sample["bytes_per_s"]


def cpu_per_byte(sample: Sample) -> float:
    return sum(sample[side]["ns_per_byte"] for side in ("client", "server"))


def p50(sample: Sample) -> float:
    return sample["round_trip"]["p50_us"]


def median(of: Callable[[Sample], float], samples: List[Sample]) -> float:
    return statistics.median(map(of, samples))


def ratio(of: Callable[[Sample], float], ours: List[Sample], theirs: List[Sample]) -> float:
    return statistics.median(of(a) / of(b) for a, b in zip(ours, theirs))


def best_tcp(samples: Samples) -> List[Sample]:
    """Of one connection."""
    return max((samples[name] for name in (TCP, TCP_LARGE)), key=lambda some: median(goodput, some))


def line_of(name: str, some: List[Sample]) -> str:
    if "round_trip" in some[0]:
        trips = {key: statistics.median(s["round_trip"][key] for s in some) for key in ("p50_us", "p99_us", "p999_us")}
        return f"  {name:<18} p50 {trips['p50_us']:8.2f} µs  p99 {trips['p99_us']:8.2f}  p99.9 {trips['p999_us']:8.2f}"
    if some[0]["mode"] == "idle":
        cores = {side: statistics.median(s[side]["cores"] for s in some) for side in ("client", "server")}
        return f"  {name:<18} " + ", ".join(f"{side} {share:.5f} of a core" for side, share in cores.items())
    line = f"  {name:<18} {median(goodput, some) * 8e-9:7.2f} Gbit/s"
    if "server" not in some[0]:
        return line
    halves = [statistics.median(s[side]["ns_per_byte"] for s in some) for side in ("client", "server")]
    machine = statistics.median(s["server"]["machine_ns_per_byte"] for s in some)
    return f"{line}  CPU {halves[0]:.3f} + {halves[1]:.3f} ns/B, machine {machine:.3f}"


# ---- rows

def tcp_words(bench: Bench, *words: str) -> List[str]:
    return ["--transport", "tcp", "--congestion", bench.args.congestion, *words]


def udp_words(bench: Bench) -> List[str]:
    return ["--port", "udp", "--engine-mode", bench.args.engine_mode, *bench.args.harp.split()]


def udp_throughput(mtu: int, offloads: bool) -> Callable[[Bench], Samples]:
    def measure(bench: Bench) -> Samples:
        with bench.cable(mtu=mtu, offloads=offloads) as (_, run):
            return bench.rounds({
                "harp": lambda: run(*udp_words(bench)),
                TCP: lambda: run(*tcp_words(bench)),
                TCP_LARGE: lambda: run(*tcp_words(bench, "--socket-buffer", "4M")),
                TCP_4: lambda: run(*tcp_words(bench, "--flows", "4"))})
    return measure


def xdp_throughput(mtu: int) -> Callable[[Bench], Samples]:
    """Beside what AF_XDP carries with nothing around it (harp_xsk.cc). All of them pass the same cable in turn."""
    def measure(bench: Bench) -> Samples:
        with bench.cable(mtu=mtu, offloads=False) as (cable, run):
            return bench.rounds({
                "harp over AF_XDP": lambda: run("--port", "xdp", "--engine-mode", bench.args.engine_mode),
                RAW: lambda: bench.raw_xsk(cable),
                "harp over UDP": lambda: run(*udp_words(bench)),
                TCP: lambda: run(*tcp_words(bench))})
    return measure


def xdp_goals(samples: Samples) -> List[Goal]:
    ours = samples["harp over AF_XDP"]
    udp = samples["harp over UDP"]
    print(f"    by TCP: {ratio(goodput, ours, samples[TCP]):.2f}, by UDP: {ratio(goodput, ours, udp):.2f}; "
          f"CPU a byte by TCP's: {ratio(cpu_per_byte, ours, samples[TCP]):.2f}")
    return [Goal("throughput by raw AF_XDP's", ratio(goodput, ours, samples[RAW]), 0.85, 0.95, True)]


def throughput_goals(least: float, stretch: float, cpu: Tuple[float, float]) -> Callable[[Samples], List[Goal]]:
    def goals(samples: Samples) -> List[Goal]:
        tcp = best_tcp(samples)
        return [Goal("throughput by TCP's", ratio(goodput, samples["harp"], tcp), least, stretch, True),
                Goal("CPU a byte by TCP's", ratio(cpu_per_byte, samples["harp"], tcp), cpu[0], cpu[1], False)]
    return goals


def udp_ping(mtu: int, offloads: bool) -> Callable[[Bench], Samples]:
    words = ["--mode", "latency", "--message", "4K"]

    def measure(bench: Bench) -> Samples:
        with bench.cable(mtu=mtu, offloads=offloads) as (_, run):
            return bench.rounds({"harp": lambda: run(*udp_words(bench), *words),
                                 TCP: lambda: run(*tcp_words(bench), *words)})
    return measure


def ping_goals(samples: Samples) -> List[Goal]:
    return [Goal("round trip p50 by TCP's", ratio(p50, samples["harp"], samples[TCP]), 0.8, 0.6, False)]


def shm(*words: str) -> Callable[[Bench], Samples]:
    def measure(bench: Bench) -> Samples:
        sides = {"harp": lambda: bench.alone("--port", "shm", *words),
                 TCP: lambda: bench.alone(*tcp_words(bench), *words),
                 TCP_LARGE: lambda: bench.alone(*tcp_words(bench, "--socket-buffer", "4M"), *words),
                 TCP_4: lambda: bench.alone(*tcp_words(bench, "--flows", "4"), *words)}
        return bench.rounds(sides)
    return measure


def shm_ping_goals(samples: Samples) -> List[Goal]:
    return [Goal("round trip p50 in µs", median(p50, samples["harp"]), 3, 1, False)]


def shm_goals(samples: Samples) -> List[Goal]:
    return [Goal("throughput by TCP's over lo", ratio(goodput, samples["harp"], best_tcp(samples)), 3, 6, True)]


def mem(mtu: int) -> Callable[[Bench], Samples]:
    words = ["--pairs", "1", "--message", "64K", "--depth", "8", "--mtu", str(mtu)]
    return lambda bench: bench.rounds({"warm": lambda: bench.engines(*words),
                                       "cold": lambda: bench.engines(*words, "--footprint", "128M")})


def mem_goals(bar: float, stretch: float) -> Callable[[Samples], List[Goal]]:
    return lambda samples: [Goal("Gbit/s, warm", median(goodput, samples["warm"]) * 8e-9, bar, stretch, True)]


def scaling(bench: Bench) -> Samples:
    words = ["--message", "64K", "--depth", "8", "--mtu", "9000"]
    return bench.rounds({
        "1 engine": lambda: bench.engines("--pairs", "1", *words),
        "2 engines": lambda: bench.engines("--pairs", "2", *words),
        "2 processes": lambda: bench.engines("--pairs", "2", "--pairs-as", "processes", *words)})


def scaling_goals(samples: Samples) -> List[Goal]:
    """Two processes share nothing, so what they reach is what two cores of this machine can."""
    print(f"    2 engines by 1: {ratio(goodput, samples['2 engines'], samples['1 engine']):.2f}; 2 processes by 1: "
          f"{ratio(goodput, samples['2 processes'], samples['1 engine']):.2f}")
    return [Goal("1 -> 2 engines, times 2 by two processes'",
                 2 * ratio(goodput, samples["2 engines"], samples["2 processes"]), 1.9, 1.98, True)]


def loss(share: float) -> Callable[[Bench], Samples]:
    def measure(bench: Bench) -> Samples:
        with bench.cable(mtu=1500, offloads=False) as (cable, run):
            def lossy(protocol: str, *words: str) -> Sample:
                cable.lose(share, protocol, PORT)
                try:
                    return run(*words)
                finally:
                    cable.lose(0)
            return bench.rounds({
                "no loss": lambda: run(*udp_words(bench)),
                "harp": lambda: lossy("udp", *udp_words(bench)),
                TCP: lambda: lossy("tcp", *tcp_words(bench))})
    return measure


def loss_goals(bar: float, stretch: float) -> Callable[[Samples], List[Goal]]:
    return lambda samples: [Goal("goodput by that without loss", ratio(goodput, samples["harp"], samples["no loss"]),
                                 bar, stretch, True)]


def bottleneck(bench: Bench) -> Samples:
    with bench.cable(mtu=1500, rate="1gbit") as (_, run):
        return bench.rounds({"harp": lambda: run(*udp_words(bench)), TCP: lambda: run(*tcp_words(bench))})


def bottleneck_goals(samples: Samples) -> List[Goal]:
    print(f"    of the cable's 1 Gbit/s: {median(goodput, samples['harp']) * 8e-9:.3f}")
    return [Goal("throughput by TCP's", ratio(goodput, samples["harp"], samples[TCP]), 0.95, None, True)]


def idle(bench: Bench) -> Samples:
    words = ["--mode", "idle", "--connections", "64", "--message", "64", "--depth", "1", "--engine-mode", "threads"]
    with contextlib.ExitStack() as stack:
        sides = {"shm": lambda: bench.alone("--port", "shm", *words)}
        if os.geteuid() == 0:
            _, run = stack.enter_context(bench.cable())
            sides["udp"] = lambda: run("--port", "udp", *words)
        return bench.rounds(sides)


def idle_goals(samples: Samples) -> List[Goal]:
    return [Goal(f"cores of the busier side, {name}",
                 statistics.median(max(s["client"]["cores"], s["server"]["cores"]) for s in some), 0.01, None, False)
            for name, some in samples.items()]


UDP_1500 = throughput_goals(1.3, 1.8, (0.75, 0.55))
UDP_9000 = throughput_goals(1.8, 3.0, (0.75, 0.55))
ROWS = [
    *(Row(f"udp-{mtu}-{'on' if on else 'off'}", udp_throughput(mtu, on), UDP_1500 if mtu == 1500 else UDP_9000)
      for mtu in (1500, 9000) for on in (False, True)),
    *(Row(f"ping-{mtu}-{'on' if on else 'off'}", udp_ping(mtu, on), ping_goals)
      for mtu in (1500, 9000) for on in (False, True)),
    *(Row(f"xdp-{mtu}", xdp_throughput(mtu), xdp_goals) for mtu in (1500, 9000)),
    Row("shm", shm(), shm_goals, False),
    Row("shm-ping", shm("--mode", "latency", "--message", "4K"), shm_ping_goals, False),
    Row("mem-1440", mem(1500), mem_goals(20, 40), False), Row("mem-8944", mem(9000), mem_goals(40, 70), False),
    Row("engines", scaling, scaling_goals, False),
    Row("loss-1", loss(0.01), loss_goals(0.7, 0.9)), Row("loss-0.1", loss(0.001), loss_goals(0.95, 0.99)),
    Row("rate", bottleneck, bottleneck_goals),
    Row("idle", idle, idle_goals, False),
]

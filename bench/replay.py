"""A step of a model on several hosts whose computation is replayed: lightcc, its flat ring, and DDP over gloo; and how
much of lightcc's communication is exposed, beside the least that could be.

    python bench/replay.py                         # as root: a ResNet-50, 2 hosts of 4 ranks, 1 Gbit/s each
    python bench/replay.py --ratio 0.5             # half as much communication for the computation
    python bench/replay.py --models resnet50 vgg16 bert_base --hosts 2,2 2,2,2,2 --sides lightcc --rounds 3 --steps 1
    python bench/replay.py --sides lightcc delayed --hosts 1,1 --rounds 5   # DelayedGradients
    python bench/replay.py --loopback --rounds 2   # without root; its times say nothing about cables

Eight ranks on two cores cannot compute as eight GPUs do, so they sleep: a trace (record_trace.py) tells when in a step
each gradient is ready, and backward waits until then. All else is real: autograd calls the hooks of lightcc's
DistributedOptimizer, or of DistributedDataParallel with its buckets of 25 MB, and both reduce the gradients of a
ResNet-50 (161, 102 MB), a VGG-16 (32, 553 MB) or a BERT-base (199, 438 MB).

How much there is to gain depends on the ratio of communication to computation. First a step whose gradients are all
ready at once is timed with DDP over gloo: its communication. Where DDP takes no part it is the bound of the cables
instead. The trace is then stretched so that this is --ratio times the computation; to slow down the computation at a
given rate is the same as to find the rate for a given computation. Then come rounds in which each side takes a sample,
by turns. Gradients are checked on all ranks, on each side.

The floor (floor.py) is what must be exposed: it follows from when gradients are ready, and from the cables' goodput,
which is measured before and after.
"""
import argparse
import contextlib
import json
import secrets
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import cables
import floor
from multihost_sides import FLAT, environment
from peers import gloo, own
from replay_trainer import ALONE, DDP, DELAYED, Trace, Trainer, read_trace
from report import ratio_of, time_text
from shapes import MODELS
from steps import counted
from teams import Team
from where import RESULTS, heading, surroundings

GOAL_SPEED_UP = 1.32        # over both others, as the published run has it over flat rings, on hosts of 25 Gbit/s
GOAL_OF_FLOOR = 1.15        # lightcc's exposed communication
GOAL_OF_DELAYED = 0.05      # what a delay of one step leaves exposed, of the communication
LATE = 0.05                 # of the floor: what the step alone may take beyond its computation
PUBLISHED_GBIT = 25
TRIALS, WARM_UP = 5, 3      # DDP makes its buckets anew after the first step
SIDES = {"lightcc": own.NAME, "flat": FLAT, "ddp": DDP, "delayed": DELAYED}
PROCESS_BYTES = 550 << 20   # a Python with torch, and its connections


class Sides:
    """Two teams: one has its own environment, for lightcc's flat ring."""

    def __init__(self, stack: contextlib.ExitStack, network: cables.Network, trace: Trace, chosen: Sequence[str]):
        self._stack, self._network, self._trace = stack, network, trace
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.names = [*chosen, ALONE]
        self._main = self._team("sides", [name for name in self.names if name != FLAT])
        if FLAT in chosen:
            with environment(LIGHT_2D_ALLREDUCE="0"):
                self._flat = self._team("flat", [own.NAME])

    def prepare(self, name: str, steps: int, computation_s: float) -> None:
        """Trains and then checks, as it will be timed: whoever learns from steps learns from such ones."""
        team, side = self._of(name)
        team.ask("train", side, steps, computation_s)
        team.ask("check", side, computation_s)

    def step_s(self, name: str, steps: int, computation_s: float) -> float:
        team, side = self._of(name)
        return max(team.ask("train", side, steps, computation_s))

    def counters(self, name: str) -> Dict[str, int]:
        return self._of(name)[0].ask("counters")[0]

    def goodput(self) -> float:
        return cables.goodput_of(self._main, self._network)

    def latency(self) -> float:
        return cables.latency_of(self._main, self._network)

    def _of(self, name: str) -> Tuple[Team, str]:
        return (self._flat, own.NAME) if name == FLAT else (self._main, name)

    def _team(self, name: str, sides: Sequence[str]) -> Team:
        home, places = self._folder / name, self._network.places()
        home.mkdir()
        made = Team(name, len(places), Trainer, (places, sides, str(home), secrets.token_hex(16), self._trace))
        self._stack.callback(made.end)
        return made


def communication_of(sides: Sides, bound_s: float) -> Tuple[str, float]:
    """Whose it is, and seconds."""
    if DDP not in sides.names:
        return "the cables' bound", bound_s
    sides.prepare(DDP, WARM_UP, 0.0)
    return f"communication of {DDP}", statistics.median(sides.step_s(DDP, 1, 0.0) for _ in range(TRIALS))


def measure(sides: Sides, computation: float, args: argparse.Namespace) -> Dict[str, Any]:
    samples: Dict[str, List[float]] = {name: [] for name in sides.names}
    collectives: Dict[str, List[float]] = {name: [] for name in sides.names if name in (own.NAME, FLAT)}
    for name in sides.names:
        if name in (own.NAME, FLAT, DELAYED):
            sides.prepare(name, args.warm_up, computation)
    order = list(sides.names)
    for _ in range(args.rounds):
        for name in order:
            before = sides.counters(name)
            samples[name].append(sides.step_s(name, args.steps, computation))
            if name in collectives:
                collectives[name].append(counted(before, sides.counters(name), args.steps)["collectives"])
        order.append(order.pop(0))
    return {"computation_s": computation, "samples_s": samples,
            "collectives_a_step": {name: statistics.median(xs) for name, xs in collectives.items()}}


def summary(found: Dict[str, Any]) -> Dict[str, Any]:
    """Exposed is what a step takes beyond the one alone, the median over the rounds."""
    samples = found["samples_s"]
    exposed = {name: [with_it - without for with_it, without in zip(xs, samples[ALONE])]
               for name, xs in samples.items() if name != ALONE}
    speed_ups = {name: ratio_of(samples[name], samples[own.NAME]) for name in (FLAT, DDP) if name in samples}
    return {**found, "median_s": {name: statistics.median(xs) for name, xs in samples.items()},
            "exposed_samples_s": exposed,
            "exposed_s": {name: statistics.median(xs) for name, xs in exposed.items()},
            "speed_ups": speed_ups, "goal": GOAL_SPEED_UP,
            "met": {name: ratio >= GOAL_SPEED_UP for name, (ratio, _, _) in speed_ups.items()}}


def hold_against_floor(row: Dict[str, Any], trace: Trace, goodput: float, latency: float, rate: str) -> None:
    computation, hosts = row["computation_s"], len(row["hosts"])
    least = floor.exposed_s([share * computation for share in trace.ready], trace.nbytes, hosts, goodput, latency)
    of_floor = {name: ratio_of(xs, [least] * len(xs)) for name, xs in row["exposed_samples_s"].items()}
    late = row["median_s"][ALONE] - computation
    void = ("too little goodput" if cables.share_of_rate(goodput, rate) < cables.LEAST_GOODPUT else
            f"the step alone is late by {time_text(late)}" if late > LATE * least else "")
    row.update(goodput=goodput, latency_s=latency, bound_s=floor.bound_s(hosts, sum(trace.nbytes), goodput),
               floor_s=least, of_floor=of_floor, goal_of_floor=GOAL_OF_FLOOR, void=void,
               floor_met=None if void else of_floor[own.NAME][0] <= GOAL_OF_FLOOR)


def lines_of(row: Dict[str, Any]) -> str:
    lines = [f"{'':<16} {'step':>9} {'largest':>9} {'exposed':>9} {'by the floor':>20} {'collectives':>11}   "
             f"lightcc is faster by"]
    for name, xs in row["samples_s"].items():
        gain = exposed = of_floor = collectives = ""
        if name in row["speed_ups"]:
            gain = "{:.2f} ({:.2f} to {:.2f}), ".format(*row["speed_ups"][name])
            gain += f"goal >= {row['goal']:g}: {'ok' if row['met'][name] else 'MISSED'}"
        if name in row["exposed_s"]:
            exposed = f"{1e3 * row['exposed_s'][name]:.1f} ms"
        if name in row.get("of_floor", ()):
            of_floor = "{:.2f} ({:.2f} to {:.2f})".format(*row["of_floor"][name])
        if name in row["collectives_a_step"]:
            collectives = f"{row['collectives_a_step'][name]:.1f}"
        lines.append(f"{name:<16} {time_text(row['median_s'][name]):>9} {time_text(max(xs)):>9} {exposed:>9} "
                     f"{of_floor:>20} {collectives:>11}   {gain}".rstrip())
    return "\n".join(lines)


def floor_lines(row: Dict[str, Any], rate: str) -> str:
    verdict = {True: "ok", False: "MISSED", None: f"counts for nothing: {row['void']}"}[row["floor_met"]]
    at_published = row["computation_s"] * 8 * row["goodput"] / (PUBLISHED_GBIT * 1e9)
    return (f"{cables.goodput_text(row['goodput'], rate)}; a byte takes {time_text(row['latency_s'])}; the bound is "
            f"{time_text(row['bound_s'])}; at {PUBLISHED_GBIT} Gbit/s the same ratio belongs to a computation of "
            f"{time_text(at_published)}\n"
            f"floor {1e3 * row['floor_s']:.1f} ms; lightcc's exposed time is {row['of_floor'][own.NAME][0]:.2f} of it, "
            f"goal <= {row['goal_of_floor']:g}: {verdict}")


def contest(trace: Trace, hosts: Tuple[int, ...], rate: str, args: argparse.Namespace) -> Dict[str, Any]:
    nbytes = sum(trace.nbytes)
    joined = f"{rate} each" if rate else "joined by loopback" if args.loopback else "as fast as the machine can"
    print(f"\n{trace.model}, {len(trace.ready)} gradients, {nbytes / 1e6:.0f} MB; {cables.host_text(hosts)}, {joined}",
          flush=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(cables.network_of(hosts, args.loopback, rate, nbytes))
        sides = Sides(stack, network, trace, args.sides)
        before = sides.goodput() if rate else 0.0
        whose, communication = communication_of(sides, floor.bound_s(len(hosts), nbytes, before) if rate else 0.0)
        computation = communication / args.ratio
        print(f"{whose}: {time_text(communication)}; computation replayed: {time_text(computation)}, ratio "
              f"{args.ratio:g}", flush=True)
        row = {"model": trace.model, "hosts": hosts, "communication_s": communication, "communication_is": whose,
               **summary(measure(sides, computation, args))}
        if rate:
            goodput = max(before, sides.goodput())
            hold_against_floor(row, trace, goodput, sides.latency(), rate)
    print(lines_of(row), flush=True)
    if DELAYED in row["exposed_s"]:
        share = row["exposed_s"][DELAYED] / row["communication_s"]
        verdict = "ok" if share <= GOAL_OF_DELAYED else "MISSED"
        print(f"{DELAYED}: {share:.3f} of the communication is exposed, goal <= {GOAL_OF_DELAYED:g}: {verdict}",
              flush=True)
    if rate:
        print(floor_lines(row, rate), flush=True)
    return row


def memory_bytes(trace: Trace, ranks: int, chosen: Sequence[str]) -> int:
    """What a contest takes: gradients in lightcc's slots and in DDP's buckets, and in each process the largest one."""
    teams = 1 + (FLAT in chosen)
    return ranks * (len(chosen) * sum(trace.nbytes) + teams * (max(trace.nbytes) + PROCESS_BYTES))


def available_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(fields["MemAvailable"].split()[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"],
                        help="default resnet50; tiny, which only tries the program, needs --trace")
    parser.add_argument("--hosts", type=cables.parse_hosts, nargs="+", default=[(4, 4)], metavar="RANKS,RANKS",
                        help="ranks of each host; default 4,4")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["lightcc", "flat", "ddp"],
                        help="beside the one without communication; default all but delayed. lightcc is always there")
    parser.add_argument("--rate", type=cables.parse_rate, default="1gbit", help="of each host's cable; default 1gbit")
    parser.add_argument("--ratio", type=float, default=1.0,
                        help="communication, by DDP over gloo or else by the cables' bound, to computation; default "
                             "%(default)s: as much of each")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each side; default %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="of a sample; default %(default)s")
    parser.add_argument("--warm-up", type=int, default=4, help="steps from which lightcc learns; default %(default)s")
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="of record_trace.py, of the one model; default MODEL_trace.json beside this file")
    parser.add_argument("--loopback", action="store_true", help="hosts in name only; needs no root")
    parser.add_argument("--json", type=Path, default=RESULTS / "replay.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    args.sides = [name for side, name in SIDES.items() if side in args.sides or name == own.NAME]
    if args.loopback:
        args.rate = ""
    if args.ratio <= 0:
        parser.error("--ratio: above 0")
    if args.trace and len(args.models) > 1:
        parser.error("--trace: of one model")
    if not args.rate and DDP not in args.sides:
        parser.error("--sides: with ddp where there is no rate: the computation follows from it")
    if not args.loopback and cables.emulated.why_not():
        parser.error(f"{cables.emulated.why_not()}; --loopback does without")
    return args


def trace_of(model: str, file: Optional[Path]) -> Trace:
    return read_trace(file or Path(__file__).with_name(f"{model}_trace.json"), model)


def main() -> None:
    args = arguments()
    traces = [trace_of(model, args.trace) for model in args.models]
    needs = max(memory_bytes(trace, sum(hosts), args.sides) for trace in traces for hosts in args.hosts)
    if needs > available_bytes():
        raise SystemExit(f"needs {needs / 2**30:.1f} GiB of memory, there are {available_bytes() / 2**30:.1f}: fewer "
                         f"--sides or ranks")
    where = surroundings(max(map(sum, args.hosts)), [own.VERSION, gloo.VERSION])
    print(heading(where), flush=True)
    rows = [contest(trace, hosts, args.rate, args) for hosts in args.hosts for trace in traces]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**where, "rate": args.rate, "ratio": args.ratio, "rows": rows}, indent=1))
    print(f"\n{args.rounds} samples of {args.steps} steps, slowest rank; gradients were checked.")
    print(f"All samples: {args.json}")


if __name__ == "__main__":
    main()

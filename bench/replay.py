"""A step of a ResNet-50 on several hosts whose computation is replayed: lightcc, its flat ring, and DDP over gloo.

    python bench/replay.py                         # as root: 2 hosts of 4 ranks, 1 Gbit/s each, three minutes
    python bench/replay.py --ratio 0.5             # half as much communication for the computation
    python bench/replay.py --loopback --rounds 2   # without root; its times say nothing about cables

Eight ranks on two cores cannot compute as eight GPUs do, so they sleep: a trace (record_trace.py) tells when in a step
each gradient is ready, and backward waits until then. All else is real: autograd calls the hooks of lightcc's
DistributedOptimizer, or of DistributedDataParallel with its buckets of 25 MB, and both reduce 161 gradients, 102 MB.

How much there is to gain depends on the ratio of communication to computation. First a step whose gradients are all
ready at once is timed with DDP over gloo: its communication. The trace is then stretched so that this is --ratio times
the computation; to slow down the computation at a given rate is the same as to find the rate for a given computation.
Then come rounds in which each side takes a sample, by turns. Gradients are checked on all ranks, on each side.
"""
import argparse
import contextlib
import json
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import cables
import torch
from multihost_sides import FLAT, environment
from peers import gloo, own
from report import ratio_of, time_text
from shapes import resnet50
from teams import Team, become_rank
from where import heading, surroundings

import lightcc.torch as hvd

ALONE, DDP = "alone", "DDP over gloo"
GOAL_SPEED_UP = 1.32        # over both others, as the published run has it over flat rings, on hosts of 25 Gbit/s
PUBLISHED_GBIT = 25
TRIALS, WARM_UP = 5, 3      # DDP makes its buckets anew after the first step
BUCKET_MB = 25              # DDP's default


class Trace(NamedTuple):
    """Shares of a step."""
    forward: float
    ready: List[float]  # of each parameter, in the order of the model's


def read_trace(file: Path) -> Trace:
    found = json.loads(file.read_text())
    trace = Trace(found["forward"], found["ready"])
    if len(trace.ready) != len(resnet50()) or not all(trace.forward <= share <= 1 for share in trace.ready):
        raise SystemExit(f"{file}: not the trace of a ResNet-50's step")
    return trace


# What runs on every rank

class Ready(torch.autograd.Function):
    """Passes its input on; in backward it waits until the weight's gradient is ready in the trace, and makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, model: "Replayed", index: int) -> torch.Tensor:
        ctx.model, ctx.index, ctx.shape = model, index, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Any, ...]:
        ctx.model.wait(ctx.model.trace.ready[ctx.index])
        return gradient, torch.full(ctx.shape, ctx.model.value), None, None


class Replayed(torch.nn.Module):
    """The parameters of a ResNet-50, which nobody reads, so that they take no memory. `step_s` is what a step takes."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace, self.step_s, self.value, self._begin = trace, 0.0, 0.0, 0.0
        self.weights = torch.nn.ParameterList(torch.empty(shape) for shape in resnet50())
        # Backward goes through the chain from its end.
        self._chain = sorted(range(len(self.weights)), key=lambda index: -trace.ready[index])

    def forward(self, value: float) -> torch.Tensor:
        self.value, self._begin = value, time.perf_counter()
        x = torch.zeros((), requires_grad=True)
        for index in self._chain:
            x = Ready.apply(x, self.weights[index], self, index)
        self.wait(self.trace.forward)
        return x

    def wait(self, share: float) -> None:
        time.sleep(max(0.0, self._begin + share * self.step_s - time.perf_counter()))


class NoUpdate(torch.optim.SGD):
    """The update is a part of the computation, which is replayed."""

    def step(self, closure: Any = None) -> None:
        pass


class Trainer:
    """One process: lightcc, and in one of the teams also DDP and a model without communication."""

    def __init__(self, rank: int, size: int, places: Sequence[cables.Place], all_sides: bool, folder: str, secret: str,
                 trace: Trace):
        become_rank(rank, size, folder)
        cables.settle(places[rank], secret)
        torch.set_num_threads(1)
        hvd.init()
        self._rank, self._size, self._all_sides, self._step = rank, size, all_sides, 0
        self._modules = {side: Replayed(trace) for side in ((own.NAME, DDP, ALONE) if all_sides else (own.NAME,))}
        self._models: Dict[str, torch.nn.Module] = dict(self._modules)
        self._optimizers = {side: NoUpdate(model.parameters(), lr=0.1) for side, model in self._modules.items()}
        self._optimizers[own.NAME] = hvd.DistributedOptimizer(self._optimizers[own.NAME],
                                                              self._modules[own.NAME].named_parameters())
        if all_sides:
            gloo.init(rank, size, f"{folder}/gloo")
            self._models[DDP] = torch.nn.parallel.DistributedDataParallel(
                self._modules[DDP], bucket_cap_mb=BUCKET_MB, init_sync=False)

    def train(self, side: str, steps: int, step_s: float) -> float:
        """Seconds a step, of which the computation takes step_s."""
        self._modules[side].step_s = step_s
        begin = time.perf_counter()
        for _ in range(steps):
            self._step += 1
            self._optimizers[side].zero_grad()
            self._models[side](float(1 + self._rank + self._step % 3)).backward()
            self._optimizers[side].step()
        return (time.perf_counter() - begin) / steps

    def check(self, side: str) -> None:
        """AssertionError unless every gradient is the mean over the ranks. Sums of these numbers are exact."""
        self.train(side, 1, 0.0)
        mean = 1 + (self._size - 1) / 2 + self._step % 3
        for index, weight in enumerate(self._modules[side].weights):
            found = weight.grad
            assert found is not None and bool((found == mean).all()), f"{side}: gradient {index} is not {mean}: {found}"

    def stream(self, listens: int, sends: int, address: str) -> Optional[float]:
        return cables.stream(self._rank, listens, sends, address)

    def end(self) -> None:
        if self._all_sides:
            gloo.shutdown()
        hvd.shutdown()


# The run

class Sides:
    """Two teams: one has its own environment, for lightcc's flat ring."""

    def __init__(self, stack: contextlib.ExitStack, network: cables.Network, trace: Trace):
        self._stack, self._network, self._trace = stack, network, trace
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._main = self._team("sides", True)
        with environment(LIGHT_2D_ALLREDUCE="0"):
            self._flat = self._team("flat", False)
        self.names = (own.NAME, FLAT, DDP, ALONE)

    def check(self) -> None:
        for name in self.names:
            team, side = self._of(name)
            if side != ALONE:
                team.ask("check", side)

    def step_s(self, name: str, steps: int, computation_s: float) -> float:
        team, side = self._of(name)
        return max(team.ask("train", side, steps, computation_s))

    def goodput(self) -> float:
        return cables.goodput_of(self._main, self._network)

    def _of(self, name: str) -> Tuple[Team, str]:
        return (self._flat, own.NAME) if name == FLAT else (self._main, name)

    def _team(self, name: str, all_sides: bool) -> Team:
        home, places = self._folder / name, self._network.places()
        home.mkdir()
        made = Team(name, len(places), Trainer, (places, all_sides, str(home), secrets.token_hex(16), self._trace))
        self._stack.callback(made.end)
        return made


def measure(sides: Sides, args: argparse.Namespace) -> Dict[str, Any]:
    sides.check()
    for name in sides.names:
        sides.step_s(name, WARM_UP, 0.0)
    communication = statistics.median(sides.step_s(DDP, 1, 0.0) for _ in range(TRIALS))
    computation = communication / args.ratio
    print(f"communication of {DDP}: {time_text(communication)}; computation replayed: {time_text(computation)}, "
          f"ratio {args.ratio:g}", flush=True)
    samples: Dict[str, List[float]] = {name: [] for name in sides.names}
    order = list(sides.names)
    for _ in range(args.rounds):
        for name in order:
            samples[name].append(sides.step_s(name, args.steps, computation))
        order.append(order.pop(0))
    return {"communication_s": communication, "computation_s": computation, "samples_s": samples}


def summary(found: Dict[str, Any]) -> Dict[str, Any]:
    samples = found["samples_s"]
    median = {name: statistics.median(xs) for name, xs in samples.items()}
    speed_ups = {name: ratio_of(samples[name], samples[own.NAME]) for name in (FLAT, DDP)}
    return {**found, "median_s": median, "exposed_s": {name: s - median[ALONE] for name, s in median.items()},
            "speed_ups": speed_ups, "goal": GOAL_SPEED_UP,
            "met": {name: ratio >= GOAL_SPEED_UP for name, (ratio, _, _) in speed_ups.items()}}


def lines_of(row: Dict[str, Any]) -> str:
    lines = [f"{'':<16} {'step':>9} {'largest':>9} {'exposed':>9}   lightcc is faster by"]
    for name, xs in row["samples_s"].items():
        gain = ""
        if name in row["speed_ups"]:
            gain = "{:.2f} ({:.2f} to {:.2f}), ".format(*row["speed_ups"][name])
            gain += f"goal >= {row['goal']:g}: {'ok' if row['met'][name] else 'MISSED'}"
        exposed = "" if name == ALONE else time_text(max(0.0, row["exposed_s"][name]))
        lines.append(f"{name:<16} {time_text(row['median_s'][name]):>9} {time_text(max(xs)):>9} {exposed:>9}   {gain}"
                     .rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=cables.parse_hosts, default=(4, 4), metavar="RANKS,RANKS", help="default 4,4")
    parser.add_argument("--rate", type=cables.parse_rate, default="1gbit", help="of each host's cable; default 1gbit")
    parser.add_argument("--ratio", type=float, default=1.0,
                        help="communication by DDP over gloo to computation; default %(default)s: as much of each")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each side; default %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="of a sample; default %(default)s")
    parser.add_argument("--trace", type=Path, default=Path(__file__).with_name("resnet50_trace.json"), metavar="FILE",
                        help="of record_trace.py; default %(default)s")
    parser.add_argument("--loopback", action="store_true", help="hosts in name only; needs no root")
    parser.add_argument("--json", type=Path, default=Path("build/bench/replay.json"), metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if args.ratio <= 0:
        parser.error("--ratio: above 0")
    if not args.loopback and cables.emulated.why_not():
        parser.error(f"{cables.emulated.why_not()}; --loopback does without")
    trace, rate = read_trace(args.trace), "" if args.loopback else args.rate
    where = surroundings(sum(args.hosts), [own.VERSION, gloo.VERSION])
    joined = f"{rate} each" if rate else "joined by loopback" if args.loopback else "as fast as the machine can"
    print(f"{heading(where)}\n{cables.host_text(args.hosts)}, {joined}", flush=True)
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in resnet50())
    with contextlib.ExitStack() as stack:
        sides = Sides(stack, stack.enter_context(cables.network_of(args.hosts, args.loopback, rate, nbytes)), trace)
        before = sides.goodput() if rate else 0.0
        row = summary(measure(sides, args))
        goodput = max(before, sides.goodput()) if rate else 0.0
    print(lines_of(row))
    if rate:
        row["goodput"] = goodput
        at_published = row["computation_s"] * 8 * goodput / (PUBLISHED_GBIT * 1e9)
        print(f"{cables.goodput_text(goodput, rate)}; lightcc's bound "
              f"{time_text(cables.bound_s(len(args.hosts), nbytes, goodput))}; at {PUBLISHED_GBIT} Gbit/s the same "
              f"ratio belongs to a computation of {time_text(at_published)}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    run = {**where, "hosts": args.hosts, "rate": rate, "ratio": args.ratio}
    args.json.write_text(json.dumps({**run, **row}, indent=1))
    print(f"{args.rounds} samples of {args.steps} steps, slowest rank; gradients were checked.")
    print(f"All samples: {args.json}")


if __name__ == "__main__":
    main()

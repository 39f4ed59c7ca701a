"""The sides of bench/multihost.py: teams of processes that all-reduce with lightcc, gloo or both, and what they are
asked to do. What is called from C, Open MPI and lightcc beside it, is in multihost_driven.py; it is a side as well.

A side has check(case), which raises unless sums are right, and sample(case, pause_s), which gives a Sample.
"""
import argparse
import contextlib
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cables
import torch
from multihost_compression import DENSE, Steps
from multihost_model import ALGORITHMS, side_name
from peers import gloo, own
from report import KIB, size_text
from shapes import MODELS
from teams import Team, become_rank

import lightcc.torch as hvd
from lightcc.explain import Cluster, measured_cluster

LIBRARIES = {library.NAME: library for library in (own, gloo)}
ALSO, FLAT, CYCLIC = "lightcc, other build", "lightcc, flat", "lightcc, cyclic"
UNCALIBRATED = "lightcc, uncalibrated"
OVER = {"harp": "lightcc over HARP", "xdp": "lightcc over XDP", "plugin": "lightcc over a plugin"}
CHOOSES = {"harp": {"LIGHTCC_NET": "harp"}, "xdp": {"LIGHTCC_NET": "xdp"}, "plugin": {"LIGHTCC_NET_PLUGIN": "harp"}}
GLOO_CYCLIC = "gloo, cyclic"
CALLS = {4 * KIB: 20}  # of one tensor in one sample; 1 of other sizes
GLOO_WAYS = {"gloo, one by one": "each", "gloo, all started": "started", "gloo, fused": "fused"}
FAR_BEHIND = 2.0       # a way of gloo's that takes so many times the best one's time is not measured further
TRIALS = 2             # of each of those ways, before the rounds
STEP = "step"          # an optimizer's, whose gradients are ready (multihost_compression.py)
START_S = 0.002        # until then all ranks have heard what to do


class Case(NamedTuple):
    """What a sample is."""
    label: str
    counts: Tuple[int, ...]  # floats of each tensor
    calls: int = 1
    compute_s: float = 0.0   # all ranks compute so long before, and nobody calls a library meanwhile
    ours: str = "each"       # lightcc's way, see WAYS; or STEP
    model: str = ""          # of STEP: whose gradients (shapes.py)

    @property
    def nbytes(self) -> int:
        return 4 * sum(self.counts)


class Sample(NamedTuple):
    seconds: float      # of a call, of the slowest rank
    cpu_seconds: float  # of a call, user and system, of all threads of all ranks


def one_tensor(nbytes: int) -> Case:
    return Case(size_text(nbytes), (nbytes // 4,), CALLS.get(nbytes, 1))


def gradients(model: str = "resnet50") -> Case:
    return Case("gradients", tuple(torch.Size(shape).numel() for shape in MODELS[model]()), ours="started")


def step(model: str = "resnet50") -> Case:
    return gradients(model)._replace(label=STEP, ours=STEP, model=model)


def small(count: int) -> Case:
    return Case(f"{count} x 4 KiB", (KIB,) * count, ours="started")


def lone_group() -> Case:
    """10 KB after 5 ms of computing: whoever watches the network has fallen asleep."""
    return Case("lone 10 KB", (256,) * 10, compute_s=0.005, ours="group")


# What runs on every rank

def one_by_one(library: Any, tensors: List[torch.Tensor], _: torch.Tensor) -> None:
    for tensor in tensors:
        library.allreduce_in_place(tensor)


def all_started(library: Any, tensors: List[torch.Tensor], _: torch.Tensor) -> None:
    for started in [library.start(tensor) for tensor in tensors]:
        library.finish(started)


def named_started(_: Any, tensors: List[torch.Tensor], __: torch.Tensor) -> None:
    """lightcc as an optimizer calls it: each tensor has the same name in every step."""
    handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{len(tensors)}.{i}") for i, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def fused(library: Any, tensors: List[torch.Tensor], buffer: torch.Tensor) -> None:
    torch.cat(tensors, out=buffer)
    library.allreduce_in_place(buffer)
    for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part)


def grouped(_: Any, tensors: List[torch.Tensor], __: torch.Tensor) -> None:
    hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="lone")


WAYS = {"each": one_by_one, "started": all_started, "fused": fused, "group": grouped}


class Rank:
    """One process, which takes part in lightcc and perhaps in gloo."""

    def __init__(self, rank: int, size: int, places: Sequence[cables.Place], with_gloo: bool, folder: str, secret: str):
        become_rank(rank, size, folder)
        cables.settle(places[rank], secret)
        torch.set_num_threads(1)
        hvd.init()
        self._with_gloo = with_gloo
        if with_gloo:
            gloo.init(rank, size, f"{folder}/gloo")
        self._rank, self._size = rank, size
        self._counts: Tuple[int, ...] = ()
        self._steps: Optional[Steps] = None

    def check_step(self, compression: str, model: str) -> None:
        if self._steps is None:
            self._steps = Steps(self._rank, model)
        self._steps.check(compression)

    def prepare_step(self, compression: str) -> None:
        self._steps.prepare(compression)

    def measure_step(self, compression: str) -> Tuple[float, float]:
        return timed(lambda: self._steps.run(compression))

    def shape(self) -> Tuple[int, int, int]:
        """What lightcc has found out: ranks, ranks of this host, hosts."""
        return hvd.size(), hvd.local_size(), hvd.cross_size()

    def cluster(self) -> Optional[Cluster]:
        """What lightcc has measured."""
        return measured_cluster()

    def check(self, library: str, way: str, counts: Tuple[int, ...]) -> None:
        """AssertionError unless random numbers are added up."""
        self.prepare(counts)
        self._run(library, way)
        if self._expected is None:
            self._expected = sum(random_numbers(sum(counts), rank) for rank in range(self._size))
        torch.testing.assert_close(torch.cat(self._tensors), self._expected,
                                   msg=lambda text: f"{library}, {way}, {len(counts)} tensors of {counts[0]}: {text}")

    def prepare(self, counts: Tuple[int, ...]) -> None:
        """The same numbers before each sample, in the same memory."""
        if self._counts != counts:
            self._counts, self._source = counts, random_numbers(sum(counts), self._rank)
            self._tensors = [torch.empty(count) for count in counts]
            self._buffer = torch.empty(sum(counts) if len(counts) > 1 else 0)
            self._expected: Optional[torch.Tensor] = None
        for tensor, source in zip(self._tensors, self._source.split(counts)):
            tensor.copy_(source)

    def measure(self, library: str, way: str, calls: int, begins: float) -> Tuple[float, float]:
        """Seconds of a call and its CPU seconds, after computing until that moment of the machine's clock, if any."""
        compute_until(begins)
        return timed(lambda: self._run(library, way), calls)

    def stream(self, listens: int, sends: int, address: str) -> Optional[float]:
        return cables.stream(self._rank, listens, sends, address)

    def end(self) -> None:
        if self._with_gloo:
            gloo.shutdown()
        hvd.shutdown()

    def _run(self, library: str, way: str) -> None:
        run = named_started if library == own.NAME and way == "started" else WAYS[way]
        run(LIBRARIES[library], self._tensors, self._buffer)


def timed(call: Callable[[], None], calls: int = 1) -> Tuple[float, float]:
    """Seconds of a call and its CPU seconds."""
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    return seconds / calls, (time.process_time() - cpu) / calls


def compute_until(moment: float) -> None:
    square = torch.ones(64, 64)
    while time.perf_counter() < moment:
        torch.mm(square, square)


def random_numbers(count: int, rank: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 + rank))


# Sides

class Side:
    """One library in one team, with one way to reduce many tensors."""

    def __init__(self, team: Team, library: str, way: str):
        self._team, self._library, self._way = team, library, way

    def check(self, case: Case) -> None:
        self._team.ask("check", self._library, self._way, case.counts)

    def sample(self, case: Case, pause_s: float) -> Sample:
        self._team.ask("prepare", case.counts)
        time.sleep(pause_s)  # as between steps of a training: whoever watches the network has fallen asleep
        begins = time.perf_counter() + START_S + case.compute_s if case.compute_s else 0.0
        answers = self._team.ask("measure", self._library, self._way, case.calls, begins)
        return Sample(max(seconds for seconds, _ in answers), sum(cpu for _, cpu in answers))


class StepSide:
    """The optimizer's exchange of one compression."""

    def __init__(self, team: Team, compression: str):
        self._team, self._compression = team, compression

    def check(self, case: Case) -> None:
        self._team.ask("check_step", self._compression, case.model)

    def sample(self, _: Case, pause_s: float) -> Sample:
        self._team.ask("prepare_step", self._compression)
        time.sleep(pause_s)
        answers = self._team.ask("measure_step", self._compression)
        return Sample(max(seconds for seconds, _ in answers), sum(cpu for _, cpu in answers))


class Sides:
    """All that take part between these hosts. Teams share the hosts, and thus the cables; one at a time uses them."""

    def __init__(self, stack: contextlib.ExitStack, network: cables.Network, args: argparse.Namespace):
        self._stack, self._network = stack, network
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._main = self._team(own.NAME, True)
        self._others: Dict[str, Team] = {}
        self._compressions = [DENSE, *args.compression]
        if args.flat:
            with environment(LIGHT_2D_ALLREDUCE="0"):
                self._others[FLAT] = self._team(FLAT, False)
        if args.uncalibrated:
            with environment(LIGHTCC_CALIBRATION="0"):
                self._others[UNCALIBRATED] = self._team(UNCALIBRATED, False)
        for net in args.harp:
            with environment(**CHOOSES[net]):
                self._others[OVER[net]] = self._team(OVER[net], False)
        for algorithm in ALGORITHMS if args.model else ():
            with environment(LIGHTCC_SELECT=f"allreduce={algorithm}"):
                self._others[side_name(algorithm)] = self._team(side_name(algorithm), False)
        if args.also:
            with environment(LIGHTCC_LIBRARY=str(args.also.resolve())):
                self._others[ALSO] = self._team(ALSO, False)
        if args.cyclic:
            self._others[CYCLIC] = self._team(CYCLIC, True, cyclic=True)

    def of(self, case: Case) -> Dict[str, Side]:
        """By name, in the order in which they are printed."""
        if case.ours == STEP:
            names = {text: own.NAME if text == DENSE else text for text in self._compressions}
            return {name: StepSide(self._main, text) for text, name in names.items()}
        one = len(case.counts) == 1
        ways = {gloo.NAME: "each"} if one else GLOO_WAYS
        found = {own.NAME: Side(self._main, own.NAME, case.ours)}
        found.update({name: Side(self._main, gloo.NAME, way) for name, way in ways.items()})
        found.update({name: Side(team, own.NAME, case.ours) for name, team in self._others.items()})
        if one and CYCLIC in self._others:
            found[GLOO_CYCLIC] = Side(self._others[CYCLIC], gloo.NAME, "each")
        return found

    def cluster(self) -> Cluster:
        return self._main.ask("cluster")[0]

    def goodput(self) -> float:
        return cables.goodput_of(self._main, self._network)

    def _team(self, name: str, with_gloo: bool, cyclic: bool = False) -> Team:
        home, ranks = Path(self._folder) / name.replace(" ", ""), self._network.ranks
        places = self._network.places(cyclic)
        home.mkdir()
        made = Team(name, len(places), Rank, (places, with_gloo, str(home), secrets.token_hex(16)))
        self._stack.callback(made.end)
        found = made.ask("shape")[0]
        if found != (sum(ranks), ranks[0], len(ranks)):
            raise SystemExit(f"{name} takes {ranks} for (ranks, of one host, hosts) = {found}")
        return made


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Samples(NamedTuple):
    of: Dict[str, List[Sample]]  # of each side, one a round
    tried_s: Dict[str, float]    # the best trial of each of gloo's ways; bad ones are in no round


def samples_of(sides: Dict[str, Any], case: Case, rounds: int, pause_s: float) -> Samples:
    """After each side has been checked."""
    for side in sides.values():
        side.check(case)
    tried = {name: min(sides[name].sample(case, pause_s).seconds for _ in range(TRIALS))
             for name in GLOO_WAYS if name in sides}
    names = [name for name in sides if name not in tried or tried[name] <= FAR_BEHIND * min(tried.values())]
    samples: Dict[str, List[Sample]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            samples[name].append(sides[name].sample(case, pause_s))
    return Samples(samples, tried)

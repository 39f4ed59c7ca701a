"""How fast lightcc's all-reduce is beside that of every other library at hand, on one host, in one run.

    python bench/allreduce.py [--ranks 2,4] [--peers openmpi,mpich,impi,gloo,oneccl] [--quick]

For each number of ranks, binding and size: every library's settings are tried once and checked on random numbers; then
rounds follow in which each library runs once, by turns, with the setting that was best. bench/README.md has the rest.
"""
import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import report
from group import Failed, Group, build_driver
from peers.peer import Job, Peer, Unavailable

PEERS = ("openmpi", "mpich", "impi", "gloo", "oneccl")
MODULES = {"lightcc": "lightcc_c", "gloo": "torch_gloo"}  # where the file's name is not the peer's
KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [4, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
TRIAL_BATCHES = 5
BATCHES = 33  # short ones, so that most are over before the scheduler takes the core away
FLOAT = 4


def resnet50() -> List[int]:
    """How many floats each of ResNet-50's 161 parameters has, in their order: 25,557,032 in all."""
    def batch_norm(channels: int) -> List[int]:
        return [channels, channels]

    counts = [3 * 64 * 49, *batch_norm(64)]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            counts += [width_in * width, *batch_norm(width), width * width * 9, *batch_norm(width),
                       width * width * 4, *batch_norm(width * 4)]
            if block == 0:
                counts += [width_in * width * 4, *batch_norm(width * 4)]
            width_in = width * 4
    return [*counts, 2048 * 1000, 1000]


class Case(NamedTuple):
    """What is all-reduced."""
    key: str
    counts: List[int]

    @property
    def bytes(self) -> int:
        return FLOAT * sum(self.counts)


class Way(NamedTuple):
    """One way in which a contestant can do a case: the first round finds the best."""
    group: Group
    place: str  # in, out
    how: str    # each, async, fused

    def text(self, case: Case) -> str:
        words = [self.group.setting.name, {"in": "in place", "out": "out of place"}[self.place]]
        return ", ".join(words + ([{"each": "one by one"}.get(self.how, self.how)] if len(case.counts) > 1 else []))


class Contestant:
    """A library with one kind of memory, and the groups of ranks that stand for its settings."""

    def __init__(self, peer: Peer, memory: str, groups: List[Group]):
        self.peer, self.memory, self.groups = peer, memory, groups
        self.name = peer.name if memory == "private" or len(peer.memories) == 1 else f"{peer.name} {memory}"

    def ways(self, case: Case) -> List[Way]:
        hows = self.peer.ways if len(case.counts) > 1 else ("each",)
        places = self.peer.places if len(case.counts) == 1 else ("in",)  # gradients are summed where they are
        return [Way(group, place, how) for group in self.groups for place in places for how in hows]

    def prepare(self, case: Case, way: Way) -> None:
        way.group.ask(f"prepare {self.memory} {way.place} {' '.join(map(str, case.counts))}")


class Point(NamedTuple):
    """How a case is timed with one way."""
    way: Way
    warm: int
    calls: int
    batches: int

    def seconds(self, of_batches: Callable[[List[float]], float]) -> float:
        """Of one call: what of_batches takes from the batches, each as long as for its slowest rank."""
        answers = self.way.group.ask(f"time {self.way.how} {self.warm} {self.calls} {self.batches}")
        return of_batches([max(map(int, batch)) / self.calls / 1e9 for batch in zip(*answers)])


def point_of(way: Way, seconds: float) -> Tuple[float, Point]:
    """How long a call takes at best, and enough calls to last so long, found by doing more and more of them. The
    fastest batch counts here: others may have been kept waiting by strangers to this benchmark."""
    point = Point(way, 1, 1, 1)
    once = point.seconds(min)
    while True:
        batches = min(TRIAL_BATCHES, max(1, int(seconds / once)))
        calls = max(1, min(point.calls * 10, int(seconds / 2 / batches / once)))
        enough = calls < point.calls * 10 
        point = Point(way, 1, calls, batches)
        once = min(once, point.seconds(min))
        if enough:
            break
    calls = max(1, int(seconds / once))
    batches = min(BATCHES, calls)
    return once, Point(way, max(1, calls // 10), calls // batches, batches)


class Run:
    """One number of ranks with one binding: all contestants, up at the same time."""

    def __init__(self, args: argparse.Namespace, ranks: int, binding: str, folder: Path, driver: Path):
        self.args, self.ranks, self.binding, self._folder, self._driver = args, ranks, binding, folder, driver
        self.contestants: List[Contestant] = []
        self.versions: Dict[str, str] = {}
        self.left_out: Dict[str, str] = {}
        self.rows: List[Dict[str, Any]] = []

    def start(self, peers: Sequence[Peer]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        one = self.binding == "one"
        shared = one or self.ranks > len(cores)
        bound = str(cores[0]) if one else "any" if shared else ",".join(map(str, cores))
        for peer in peers:
            for memory in peer.memories:
                groups = []
                job = Job(self.ranks, one, shared, [], self._folder, max(case.bytes for case in self.args.cases))
                for setting in peer.settings(job)[:self.args.settings]:
                    home = Path(tempfile.mkdtemp(dir=self._folder))
                    driver = [str(self._driver), str(home / "socket"), str(home / "barrier"), bound]
                    groups.append(Group(peer, setting, job._replace(driver=driver, folder=home)))
                self.contestants.append(Contestant(peer, memory, groups))
        for contestant in self.contestants:
            for group in list(contestant.groups):
                with self._leaving_out(contestant, group):
                    self.versions[contestant.peer.name] = group.meet()

    @contextlib.contextmanager
    def _leaving_out(self, contestant: Contestant, group: Group) -> Iterator[None]:
        """What fails is named, is left out from here on, and nothing else is touched."""
        try:
            yield
        except Failed as failure:
            name = f"{contestant.name} ({group.setting.name})"
            self.left_out[name] = str(failure)
            print(f"  LEFT OUT: {name}: {failure}", flush=True)
            group.kill()
            contestant.groups.remove(group)

    def measure(self, case: Case) -> None:
        """Adds the case's row."""
        points: Dict[Contestant, Point] = {}
        for contestant in self.contestants:
            best = self._best(contestant, case)
            if best:
                with self._leaving_out(contestant, best.way.group):
                    contestant.prepare(case, best.way)
                    best.way.group.ask(f"check {best.way.how} {self.args.seed}")
                    points[contestant] = best
        samples: Dict[Contestant, List[float]] = {contestant: [] for contestant in points}
        for _ in range(self.args.rounds):
            for contestant, point in list(points.items()):
                with self._leaving_out(contestant, point.way.group):
                    samples[contestant].append(point.seconds(self.args.of_batches))
                if point.way.group not in contestant.groups:
                    del points[contestant], samples[contestant]
        for contestant, point in points.items():
            with self._leaving_out(contestant, point.way.group):
                point.way.group.ask("release")
        self.rows.append({
            "ranks": self.ranks, "binding": self.binding, "case": case.key, "bytes": case.bytes,
            "tensors": len(case.counts),
            "seconds": {contestant.name: times for contestant, times in samples.items()},
            "way": {contestant.name: point.way.text(case) for contestant, point in points.items()}})

    def _best(self, contestant: Contestant, case: Case) -> Optional[Point]:
        """The fastest way, each tried and checked once."""
        found: List[Any] = []
        for way in contestant.ways(case):
            if way.group not in contestant.groups:
                continue
            with self._leaving_out(contestant, way.group):
                contestant.prepare(case, way)
                way.group.ask(f"check {way.how} {self.args.seed}")
                once, point = point_of(way, self.args.seconds_per_point)
                found.append((once, len(found), point))
                way.group.ask("release")
        return min(found)[2] if found else None

    def quit(self) -> None:
        for contestant in self.contestants:
            for group in contestant.groups:
                group.quit()


def load(names: Sequence[str], install: bool) -> List[Peer]:
    """The peers that can be measured; of the others the reason is printed."""
    found = []
    for name in names:
        try:
            peer = importlib.import_module(f"peers.{MODULES.get(name, name)}").PEER
            if install:
                peer.install()
            peer.find()
            found.append(peer)
        except (Unavailable, ImportError) as why:
            print(f"LEFT OUT: {name}: {why}", flush=True)
    return found


def size_of(text: str) -> int:
    units = {"K": KIB, "M": MIB, "G": 1 << 30}
    text = text.upper().replace("IB", "").rstrip("B")
    size = int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
    if size <= 0 or size % FLOAT:
        raise argparse.ArgumentTypeError(f"{size} bytes are no whole number of floats")
    return size


def arguments() -> argparse.Namespace:
    def words(text: str) -> List[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda t: [int(n) for n in words(t)], default=[2, 4], help="default 2,4")
    parser.add_argument("--peers", type=words, default=list(PEERS), help=f"default {','.join(PEERS)}")
    parser.add_argument("--sizes", type=lambda t: [size_of(s) for s in words(t)],
                        help="bytes of one tensor, as 4,64K,1M; default 4 to 256M")
    parser.add_argument("--bindings", type=words, default=["own", "one"],
                        help="own: each rank on its own core (free where there are too few); one: all on one core")
    parser.add_argument("--no-gradients", action="store_true", help="without the 161 gradients of ResNet-50")
    parser.add_argument("--rounds", type=int, help="default 9, with --quick 5")
    parser.add_argument("--seconds-per-point", type=float, help="default 0.1, with --quick 0.03")
    parser.add_argument("--fastest", action="store_true",
                        help="a round's time is that of its fastest batch, not the median one: for a busy machine")
    parser.add_argument("--settings", type=int, help="try only the first so many settings of each library")
    parser.add_argument("--seed", type=int, default=1, help="of the numbers that are checked; default %(default)s")
    parser.add_argument("--install", action="store_true", help="first put the peers into build/peers, with pip")
    parser.add_argument("--json", type=Path, default=Path("build/bench/allreduce.json"), metavar="FILE")
    parser.add_argument("--png", type=Path, default=Path("build/bench/allreduce.png"), metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about two minutes")
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 9)
    args.of_batches = min if args.fastest else statistics.median
    args.seconds_per_point = args.seconds_per_point or (0.03 if args.quick else 0.1)
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    args.cases = [Case(str(size), [size // FLOAT]) for size in sizes]
    if not args.no_gradients:
        args.cases.append(Case("gradients", resnet50()))
    return args


def main() -> None:
    args = arguments()
    began = time.monotonic()
    where = report.surroundings()
    print(report.headline(where), flush=True)
    driver = build_driver(Path("build/bench").resolve())
    peers = load(["lightcc", "floor", *args.peers], args.install)
    if not any(peer.name == "lightcc" for peer in peers):
        sys.exit("lightcc itself cannot be measured")
    runs = []
    for ranks in args.ranks:
        for binding in args.bindings:
            with tempfile.TemporaryDirectory(prefix="lightcc-bench-") as folder:
                run = Run(args, ranks, binding, Path(folder), driver)
                try:
                    run.start(peers)
                    for case in args.cases:
                        run.measure(case)
                finally:
                    run.quit()
            runs.append(run)
            print(report.table(run.rows), flush=True)
    took = time.monotonic() - began
    print(f"{args.rounds} rounds, {took:.0f} s in all; every result was checked before it was timed.")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({
        **where, "rounds": args.rounds, "seconds_per_point": args.seconds_per_point,
        "transports": {peer.name: peer.transport for peer in peers},
        "versions": {name: text for run in runs for name, text in run.versions.items()},
        "left_out": {name: text for run in runs for name, text in run.left_out.items()},
        "rows": [row for run in runs for row in run.rows]}, indent=1, ensure_ascii=False))
    print(f"All samples: {args.json}")


if __name__ == "__main__":
    main()

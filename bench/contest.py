"""What is measured in bench/allreduce.py and how: libraries that compete, each with its best way, case by case."""
import argparse
import contextlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

from group import Failed, Group
from peers.peer import Job, Peer

MIB = 1 << 20
TRIAL_BATCHES = 5
BATCHES = 33  # short ones, so that most are over before the scheduler takes the core away
PATIENCE = 3  # times what a measurement was meant to take
FLOAT = 4
COPY_BYTES = 64 * MIB
LARGE, FAR_BEHIND = MIB, 1.7



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
        self.dropped: Set[Way] = set()
        self.name = peer.name if memory == "private" or len(peer.memories) == 1 else f"{peer.name} {memory}"

    def ways(self, case: Case) -> List[Way]:
        hows = self.peer.ways if len(case.counts) > 1 else ("each",)
        places = self.peer.places if len(case.counts) == 1 else ("in",)  # gradients are summed where they are
        groups = self.groups
        if len(case.counts) > 1:
            groups = [g for g in groups if Way(g, "in", "each") not in self.dropped] or groups
        return [Way(group, place, how) for group in groups for place in places for how in hows]

    def prepare(self, case: Case, way: Way) -> None:
        way.group.ask(f"prepare {self.memory} {way.place} {' '.join(map(str, case.counts))}")


class Point(NamedTuple):
    """How a case is timed with one way."""
    way: Way
    warm: int
    calls: int
    batches: int
    limit_s: float  # a busy machine may take much longer than thought, and then fewer batches do

    def seconds(self, of_batches: Callable[[List[float]], float]) -> float:
        """Of one call: what of_batches takes from the batches, each as long as for its slowest rank."""
        answers = self.way.group.ask(
            f"time {self.way.how} {self.warm} {self.calls} {self.batches} {int(self.limit_s * 1000)}")
        return of_batches([max(map(int, batch)) / self.calls / 1e9 for batch in zip(*answers)])


def point_of(way: Way, seconds: float) -> Tuple[float, Point]:
    """How long a call takes at best, and enough calls to last so long, found by doing more and more of them. The
    fastest batch counts here: others may have been kept waiting by strangers to this benchmark."""
    point = Point(way, 1, 1, 1, seconds)
    once = point.seconds(min)
    while True:
        batches = min(TRIAL_BATCHES, max(1, int(seconds / once)))
        calls = max(1, min(point.calls * 20, int(seconds / 2 / batches / once)))
        enough = calls < point.calls * 20
        point = Point(way, 1, calls, batches, seconds)
        once = min(once, point.seconds(min))
        if enough:
            break
    calls = max(1, int(seconds / once))
    batches = min(BATCHES, calls)
    return once, Point(way, max(1, calls // 10), calls // batches, batches, PATIENCE * seconds)


class Run:
    """One number of ranks with one binding: all contestants, up at the same time."""

    def __init__(self, args: argparse.Namespace, ranks: int, binding: str, folder: Path, driver: Path):
        self.args, self.ranks, self.binding, self._folder, self._driver = args, ranks, binding, folder, driver
        self.contestants: List[Contestant] = []
        self.versions: Dict[str, str] = {}
        self.left_out: Dict[str, str] = {}
        self.rows: List[Dict[str, Any]] = []
        self.machine: Dict[str, float] = {}

    def start(self, peers: Sequence[Peer]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        one = self.binding == "one"
        shared = one or self.ranks > len(cores)
        bound = str(cores[0]) if one else "any" if shared else ",".join(map(str, cores))
        most = max(COPY_BYTES, *(case.bytes for case in self.args.cases))
        for peer in peers:
            for memory in peer.memories:
                groups = []
                job = Job(self.ranks, one, shared, [], self._folder, most)
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
            contestant.groups = [one for one in contestant.groups if one is not group]

    def measure(self, case: Case) -> None:
        """Adds the case's row."""
        points: Dict[Contestant, Point] = {}
        for contestant in self.contestants:
            for point in self._tried(contestant, case):
                if point.way.group not in contestant.groups:
                    continue
                with self._leaving_out(contestant, point.way.group):
                    contestant.prepare(case, point.way)
                    point.way.group.ask(f"check {point.way.how} {self.args.seed}")
                    points[contestant] = point
                    break
        samples: Dict[Contestant, List[float]] = {contestant: [] for contestant in points}
        for turn in range(self.args.rounds):
            order = list(points)
            for contestant in order[turn % len(order):] + order[:turn % len(order)]:
                point = points[contestant]
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

    def measure_machine(self) -> Dict[str, float]:
        """What the memory does without any library: seconds of a cache line's round trip between two ranks, and bytes
        a second that every rank copies while the others do so too."""
        floor = next((c for c in self.contestants if c.name == "floor" and c.groups), None)
        found: Dict[str, float] = {}
        for how, case in (("line", Case("line", [1])), ("copy", Case("copy", [COPY_BYTES // FLOAT]))):
            if floor and floor.groups:
                with self._leaving_out(floor, floor.groups[0]):
                    way = Way(floor.groups[0], "out", how)
                    floor.prepare(case, way)
                    _, point = point_of(way, self.args.seconds_per_point)
                    found[how] = statistics.median(point.seconds(self.args.of_batches) for _ in range(self.args.rounds))
                    way.group.ask("release")
        if "copy" in found:
            found["copy"] = COPY_BYTES / found["copy"]
        return found

    def _tried(self, contestant: Contestant, case: Case) -> List[Point]:
        """All ways, each tried once, the fastest first. One far behind at a large size is not tried at larger ones."""
        found: List[Tuple[float, Point]] = []
        for way in contestant.ways(case):
            if way.group not in contestant.groups or (len(case.counts) == 1 and way in contestant.dropped):
                continue
            with self._leaving_out(contestant, way.group):
                contestant.prepare(case, way)
                found.append(point_of(way, self.args.seconds_per_point))
                way.group.ask("release")
        found.sort(key=lambda once_and_point: once_and_point[0])
        if len(case.counts) == 1 and case.bytes >= LARGE:
            contestant.dropped |= {point.way for once, point in found if once > FAR_BEHIND * found[0][0]}
        return [point for _, point in found]

    def quit(self) -> None:
        for contestant in self.contestants:
            for group in contestant.groups:
                group.quit()

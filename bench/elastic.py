"""How long a job stands still when a worker or a host is lost, and when a worker comes; beside starting the job anew.

    python bench/elastic.py [--np 3] [--rounds 11] [--hosts]
    python bench/elastic.py --namespaces               # as root

Workers train a small model, a commit a step. In each round one of them, chosen by turns, is killed (kill -9): the time
from that moment to the next step of those who are left, and then the longest pause between two steps while its
successor comes in. Before the rounds the job was started: the time to its first step is what a restart costs. With
--hosts each worker has a host of its own, in name only: they are started by agents. With --namespaces these hosts are
network namespaces (tests/multihost/emulated.py), and in more rounds one of them is lost: its cable is pulled, and
nothing comes from it to the driver either.
"""
import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from cables import emulated
from peers import own
from where import RESULTS, heading, surroundings

TEXTS = {"killed": "from kill -9 to the next step of the others", "lost": "from a lost host to the next step of others",
         "came": "longest pause between two steps while a newcomer comes in"}
GOALS_S = {"killed": 0.3, "came": 0.3}
GOALS_BETWEEN_HOSTS_S = {"killed": 2.5, "lost": 6.0, "came": 0.3}
IN_NAME_ONLY = "sh -c {command}"  # a launch command
WORKER = Path(__file__).resolve().with_name("elastic_worker.py")
_STEP = re.compile(r":step \d+ size (\d+) images (\d+) at ([\d.]+)")
_WORKER = re.compile(r"worker (\d+) is pid (\d+) on host (\S+)")


class Step(NamedTuple):
    size: int    # of the world
    images: int  # of all ranks
    at: float    # when it was done, by time.monotonic() of this machine


class Worker(NamedTuple):
    pid: int
    host: str


class Running:
    """A job. flags: of lightccrun. python: that its workers run."""

    def __init__(self, flags: Sequence[object], command: Sequence[object], python: str = sys.executable) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightcc.runner", "--min-np", "1", "--verbose", *map(str, flags), python,
             *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd="/")  # there is no source folder without a library
        self.workers: Dict[int, Worker] = {}  # by number

    def step(self) -> Step:
        """The next one."""
        while line := self.process.stdout.readline():
            if found := _WORKER.search(line):
                self.workers[int(found[1])] = Worker(int(found[2]), found[3])
            if found := _STEP.search(line):
                return Step(int(found[1]), int(found[2]), float(found[3]))
        raise RuntimeError("the job has ended")

    def until_size(self, size: int) -> float:
        """Reads on until so many train; the longest pause on the way."""
        longest, step = 0.0, self.step()
        while step.size != size:
            last, step = step, self.step()
            longest = max(longest, step.at - last.at)
        return longest

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.close()
        self.process.wait()


@contextlib.contextmanager
def killed(worker: Worker) -> Iterator[None]:
    os.kill(worker.pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def lost(hosts: emulated.Hosts, worker: Worker) -> Iterator[None]:
    """Its host, whose processes end when it is back."""
    hosts.cut(worker.host)
    pids = hosts.pids(worker.host)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    hosts.restore(worker.host)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def measure(np: int, rounds: int, launch_command: str, hosts: Optional[emulated.Hosts]) -> Dict[str, List[float]]:
    """launch_command: of the hosts that workers are on; "": all are here."""
    where = ["-H", ",".join(f"h{i}:1" for i in range(np)), "--launch-command", launch_command] if launch_command else []
    samples: Dict[str, List[float]] = defaultdict(list)
    running = Running(["-np", np, "--failures-per-host", 1000, *where], [WORKER])
    try:
        samples["start"].append(running.step().at - running.started)
        running.until_size(np)
        for turn in range(rounds):
            for kind in ("killed", "lost") if hosts else ("killed",):
                for _ in range(20):
                    running.step()
                worker = running.workers.pop(sorted(running.workers)[turn % np])
                since = time.monotonic()
                with lost(hosts, worker) if kind == "lost" else killed(worker):
                    step = running.step()
                    while step.size == np:  # steps that were done before, and printed late
                        step = running.step()
                samples[kind].append(step.at - since)
                samples["came"].append(running.until_size(np))
        return samples
    finally:
        running.end()


def report(samples: Dict[str, List[float]], goals_s: Dict[str, float]) -> Iterator[str]:
    (start,) = samples["start"]
    yield f"from the start of the job to its first step: {start:.2f} s"
    for kind, goal in goals_s.items():
        some, median = samples[kind], statistics.median(samples[kind])
        yield (f"{TEXTS[kind]}: median {median:.3f} s ({min(some):.3f} to {max(some):.3f}), {median / start:.3f} of a "
               f"start; goal {goal:g} s: {'ok' if median <= goal else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=3, help="workers, 2 or more; default %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="losses of each kind; default %(default)s")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--hosts", action="store_true", help="each on a host in name only")
    group.add_argument("--namespaces", action="store_true", help="each on a host that is a network namespace")
    parser.add_argument("--output", type=Path, default=RESULTS / "elastic.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if args.np < 2:
        parser.error("--np: of one worker nobody is left")
    if args.namespaces and emulated.why_not():
        parser.error(f"{emulated.why_not()}; --hosts does without")
    where = surroundings(args.np, [own.VERSION])
    print(heading(where), flush=True)
    with emulated.Hosts(args.np) if args.namespaces else contextlib.nullcontext() as hosts:
        samples = measure(args.np, args.rounds, hosts.launch_command if hosts else IN_NAME_ONLY * args.hosts, hosts)
    print("\n".join(report(samples, GOALS_BETWEEN_HOSTS_S if hosts else GOALS_S)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, **{f"{kind}_s": some for kind, some in samples.items()}}, indent=1))
    print(f"All samples: {args.output}")


if __name__ == "__main__":
    main()

"""How long a job stands still when a worker is lost, and when one comes; beside starting the job anew.

    python bench/elastic.py [--np 3] [--rounds 11] [--hosts]

Workers train a small model, a commit a step. In each round one of them, chosen by turns, is killed (kill -9): the time
from that moment to the next step of those who are left, and then the longest pause between two steps while its
successor comes in. Before the rounds the job was started: the time to its first step is what a restart costs. With
--hosts each worker has a host of its own, in name only: they are started by agents.
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Tuple

from peers import own
from where import heading, surroundings

GOALS_S = {"lost": 0.3, "came": 0.3}
_STEP = re.compile(r":step (\d+) size (\d+) at ([\d.]+)")
_WORKER = re.compile(r"worker (\d+) is pid (\d+) ")


class Running:
    """A job; its clock is time.monotonic() of this machine."""

    def __init__(self, np: int, hosts: bool):
        where = ["-H", ",".join(f"h{i}:1" for i in range(np)), "--launch-command", "sh -c {command}"] if hosts else []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightcc.runner", "-np", str(np), "--min-np", "1", "--failures-per-host", "1000",
             "--verbose", *where, sys.executable, str(Path(__file__).resolve().with_name("elastic_worker.py"))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd="/")  # there is no source folder without a library
        self.workers = {}

    def step(self) -> Tuple[int, float]:
        """The next step: the world's size and when it was done."""
        while line := self.process.stdout.readline():
            if found := _WORKER.search(line):
                self.workers[int(found[1])] = int(found[2])
            if found := _STEP.search(line):
                return int(found[2]), float(found[3])
        raise RuntimeError("the job has ended")

    def until_size(self, size: int) -> float:
        """Reads on until so many train; the longest pause on the way."""
        longest, (now, last) = 0.0, self.step()
        while now != size:
            now, at = self.step()
            longest, last = max(longest, at - last), at
        return longest

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.close()
        self.process.wait()


def measure(np: int, rounds: int, hosts: bool) -> Tuple[float, List[float], List[float]]:
    running = Running(np, hosts)
    try:
        start = running.step()[1] - running.started
        lost, came = [], []
        running.until_size(np)
        for turn in range(rounds):
            for _ in range(20):
                running.step()
            victim = sorted(running.workers)[turn % np]
            killed = time.monotonic()
            os.kill(running.workers.pop(victim), signal.SIGKILL)
            size, at = running.step()
            while size == np:  # steps that were done before, and printed late
                size, at = running.step()
            lost.append(at - killed)
            came.append(running.until_size(np))
        return start, lost, came
    finally:
        running.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=3, help="workers, 2 or more; default %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="losses; default %(default)s")
    parser.add_argument("--hosts", action="store_true", help="each on a host in name only")
    parser.add_argument("--output", type=Path, default=Path("build/bench/elastic.json"), metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if args.np < 2:
        parser.error("--np: of one worker nobody is left")
    where = surroundings(args.np, [own.VERSION])
    print(heading(where), flush=True)
    start, lost, came = measure(args.np, args.rounds, args.hosts)
    print(f"from the start of the job to its first step: {start:.2f} s")
    for name, text, samples in (("lost", "from kill -9 to the next step of the others", lost),
                                ("came", "longest pause between two steps while a newcomer comes in", came)):
        median = statistics.median(samples)
        print(f"{text}: median {median:.3f} s ({min(samples):.3f} to {max(samples):.3f}), {median / start:.3f} of a "
              f"start; goal {GOALS_S[name]:g} s: {'ok' if median <= GOALS_S[name] else 'MISSED'}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "start_s": start, "lost_s": lost, "came_s": came}, indent=1))
    print(f"All samples: {args.output}")


if __name__ == "__main__":
    main()

"""What Ray and Spark cost a job that they place: its steps beside those of lightccrun, the way to the first all-reduce,
the pauses of elastic jobs; and what is left when something is killed.

    build/ray/bin/python bench/clusters.py ray         # about 5 minutes, in the environments of make clusters
    build/spark/bin/python bench/clusters.py spark     # about 10 minutes
    ... bench/clusters.py ray --rows step first --rounds 5

step: the median step of a small model on 2 ranks, in rounds by turns, and its ratio to that of lightcc.run. first: from
the moment at which all ranks are placed (Ray: RayExecutor.start() has returned; Spark: the last task has started its
rank) to the end of the first all-reduce, imports included. elastic: the longest pause between two steps while a host
comes, and from a lost host to the next step. kills: each thing is killed so often (kill -9); the time to the error on
the other rank and to that of run(), and whether nothing is left of the job 10 s later. runs: so many runs in a row.
"""
import argparse
import contextlib
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import clusters_ranks
from clusters_ranks import first, steps, until_it_fails
from clusters_schedulers import DEADLINE_S, Ray, Spark
from where import heading, leave_checkout, surroundings, version

cloudpickle.register_pickle_by_value(clusters_ranks)
LEFT_S = 10.0
GOALS = {"ray": {"ratio": 1.05, "first": 0.5}, "spark": {"ratio": 1.05, "first": 2.0}}
PAUSE_GOALS = {"came": 0.3, "lost": 6.0}


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S} s for {what}")
        time.sleep(0.005)


def row_step(scheduler, name, rounds, count):
    import lightcc

    ours, beside, ratios = [], [], []
    scheduler.start()
    for _ in range(rounds):
        there = statistics.median(map(max, zip(*scheduler.run(steps, count))))
        here = statistics.median(map(max, zip(*lightcc.run(steps, args=(count,), num_proc=2))))
        ours.append(there)
        beside.append(here)
        ratios.append(there / here)
    scheduler.end()
    print(f"step: {statistics.median(ours) * 1e3:.3f} ms, lightcc.run {statistics.median(beside) * 1e3:.3f} ms, ratio "
          f"{statistics.median(ratios):.3f} (goal {GOALS[name]['ratio']})", flush=True)


def row_first(scheduler, name, rounds):
    found = [scheduler.first() for _ in range(rounds + 1)][1:]  # the first one fills caches
    print(f"from all placed to the first all-reduce: median {statistics.median(found):.2f} s, longest "
          f"{max(found):.2f} s (goal {GOALS[name]['first']})", flush=True)


def row_elastic(scheduler, rounds):
    came, lost = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            outcome = []
            run = scheduler.elastic(folder)
            thread = threading.Thread(target=lambda run=run, outcome=outcome: outcome.append(run()))
            thread.start()
            sizes = elastic_changes(scheduler, folder)
            Path(folder, "stop").touch()
            thread.join(DEADLINE_S)
            times = outcome[0][0]
            for (before, small), (after, large) in zip(times, times[1:]):
                if large > small:
                    came.append(after - before)
                elif large < small:
                    lost.append(after - sizes)
    for what, found in (("came", came), ("lost", lost)):
        print(f"a host {what}: median {statistics.median(found):.3f} s, longest {max(found):.3f} s "
              f"(goal {PAUSE_GOALS[what]})", flush=True)


def elastic_changes(scheduler, folder):
    """A host comes and is lost, in the order of the scheduler. Returns when it was lost."""
    def seen():
        return sorted((path.name.split(".") for path in Path(folder).glob("size.*")), key=lambda words: int(words[2]))

    def worlds(count):
        wait_until(lambda: len(seen()) >= count, f"world {count}, after {seen()}")

    worlds(1)
    if isinstance(scheduler, Ray):
        scheduler.come()
        worlds(2)
    lost_at = time.time()
    scheduler.lose(())
    worlds(3 if isinstance(scheduler, Ray) else 2)
    if isinstance(scheduler, Spark):
        worlds(3)
    return lost_at


def row_kills(scheduler, count):
    for kind in scheduler.kinds:
        errors, raised, left = [], [], []
        for _ in range(count):
            with tempfile.TemporaryDirectory() as folder:
                killed_at, raised_at, pids = (kill_driver if kind == "driver" else kill_inside)(scheduler, kind, folder)
                errors += [float(path.read_text()) - killed_at for path in Path(folder).glob("error.*")]
                if raised_at:
                    raised.append(raised_at - killed_at)
                over_at = time.time() + LEFT_S
                while (still := [pid for pid in pids if runs(pid)] + scheduler.left()) and time.time() < over_at:
                    time.sleep(0.05)
                left += still
                scheduler.repair(kind)
        print(f"{kind} killed {count} times: " + "; ".join(
            f"{what} after {statistics.median(found):.2f} s, at most {max(found):.2f} s"
            for what, found in (("error on another rank", errors), ("error of run()", raised)) if found)
            + f"; left after {LEFT_S:g} s: {left or 'nothing'}", flush=True)


def kill_inside(scheduler, kind, folder):
    scheduler.begin(kind) if kind == "node" else scheduler.start()
    killed = []

    def kill():
        wait_until(lambda: len(list(Path(folder).glob("rank.*"))) == 2, "both ranks")
        pids = [int(Path(folder, f"rank.{rank}").read_text()) for rank in range(2)]
        killed.extend([time.time(), pids])
        if kind == "rank":
            os.kill(pids[1], 9)
        else:
            scheduler.kill(kind, pids)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        scheduler.run(until_it_fails, folder)
    except RuntimeError:
        raised_at = time.time()
    thread.join()
    scheduler.end()
    return killed[0], raised_at, killed[1]


def kill_driver(scheduler, kind, folder):
    path = Path(folder, "function")
    path.write_bytes(cloudpickle.dumps(until_it_fails))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    driver = subprocess.Popen(scheduler.driver(folder, str(path)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env={**environment, "SPARK_LOCAL_IP": "127.0.0.1"})
    wait_until(lambda: len(list(Path(folder).glob("rank.*"))) == 2, "both ranks of a driver")
    pids = [int(Path(folder, f"rank.{rank}").read_text()) for rank in range(2)]
    killed_at = time.time()
    driver.kill()
    driver.wait()
    return killed_at, None, pids


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def row_runs(scheduler, count):
    """Descriptors and children of this process, and the scheduler's own things, before and after."""
    import psutil

    def here():
        return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))

    scheduler.start()
    scheduler.run(first)
    before = here()
    for _ in range(count):
        scheduler.run(first)
    after = here()
    scheduler.end()
    print(f"{count} runs in a row: descriptors {before[0]} -> {after[0]}, processes {before[1]} -> {after[1]}",
          flush=True)


def main():
    rows = ("step", "first", "elastic", "kills", "runs")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheduler", choices=("ray", "spark"))
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--rounds", type=int, default=7, help="of step, first and elastic")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=30)
    asked = parser.parse_args()
    leave_checkout()
    name = asked.scheduler
    package = {"ray": "ray", "spark": "pyspark"}[name]
    print(heading(surroundings(2, [f"{package} {version(package)}", f"torch {version('torch')}"])), flush=True)
    scheduler = {"ray": Ray, "spark": Spark}[name]()
    try:
        for row in asked.rows:
            arguments = {"step": (name, asked.rounds, asked.steps), "first": (name, asked.rounds),
                         "elastic": (asked.rounds,), "kills": (asked.kills,), "runs": (asked.runs,)}[row]
            globals()[f"row_{row}"](scheduler, *arguments)
    finally:
        scheduler.close()


if __name__ == "__main__":
    main()

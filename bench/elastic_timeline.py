"""Images a second of a job whose hosts come and go, 2, 4, 3, 1 and 2 of them, and a picture of it.

    python bench/elastic_timeline.py
    python bench/elastic_timeline.py --framework tensorflow --python build/tensorflow-2.21.0/bin/python \\
        --above build/bench/elastic_timeline.torch.json --png docs/elastic.png

A discovery script names the hosts, which are all this machine, each with one worker. All share the cores, so a step
takes 50 ms beside the processor's time, in place of a device that computes. Images are counted from the steps that
rank 0 prints, in bins of half a second; where there are none, the job stands still.
"""
import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Tuple

from elastic import IN_NAME_ONLY, WORKER, Running, Step
from figures import plt, save
from peers import own
from where import RESULTS, heading, surroundings

HOSTS = ("ab", "abcd", "acd", "c", "ce")  # a letter each
DEVICE_S, BIN_S = 0.05, 0.5
WORKERS = {"torch": WORKER, "tensorflow": WORKER.with_name("elastic_worker_tensorflow.py")}


def measure(worker: Path, python: str, hold_s: float) -> Tuple[List[Step], List[Tuple[float, int]]]:
    """The steps, and when how many hosts were named. hold_s: how long each number of workers trains."""
    steps: List[Step] = []
    changes: List[Tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / "hosts"

        def name(hosts: str) -> None:
            (Path(folder) / "next").write_text("".join(f"{host}:1\n" for host in hosts))
            (Path(folder) / "next").rename(named)
            changes.append((time.monotonic(), len(hosts)))

        name(HOSTS[0])
        running = Running(["-np", len(HOSTS[0]), "--launch-command", IN_NAME_ONLY, "--host-discovery-script",
                           f"cat {shlex.quote(str(named))}"], [worker, DEVICE_S], python)
        try:
            for hosts in HOSTS:
                if steps:
                    name(hosts)
                steps.append(running.step())
                while steps[-1].size != len(hosts):
                    steps.append(running.step())
                since = steps[-1].at
                while steps[-1].at < since + hold_s:
                    steps.append(running.step())
        finally:
            running.end()
    return steps, changes


def draw(results: List[Dict[str, Any]], path: Path) -> None:
    """Writes a PNG, a panel for each result."""
    figure, axes = plt.subplots(len(results), figsize=(10, 3.6 * len(results)), squeeze=False)
    for axis, result in zip(axes[:, 0], results):
        draw_one(axis, result)
    save(figure, path)


def draw_one(axis: plt.Axes, result: Dict[str, Any]) -> None:
    steps = [Step(*step) for step in result["steps"]]
    begin = steps[0].at
    bins: Counter[int] = Counter()
    for step in steps:
        bins[int((step.at - begin) / BIN_S)] += step.images
    count = max(bins)  # the last is not full
    axis.stairs([bins[i] / BIN_S for i in range(count)], [i * BIN_S for i in range(count + 1)], color="#c0392b",
                linewidth=2, baseline=None)
    axis.set(xlabel="seconds since the first step", ylabel="images/s", ylim=(0, 1.15 * max(bins.values()) / BIN_S),
             xlim=(0, count * BIN_S))
    for at, hosts in result["changes"]:
        at = max(0.0, at - begin)
        axis.axvline(at, color="#7f8c8d", linewidth=1, linestyle="--")
        axis.text(at, 0.97, f" {hosts} host{'s' * (hosts != 1)}", transform=axis.get_xaxis_transform(), va="top")
    axis.grid(True, alpha=0.3)
    axis.set_title(f"{result['framework']}: {heading(result)}", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(WORKERS), default="torch", help="default %(default)s")
    parser.add_argument("--python", default=sys.executable, help="that workers run; default this one")
    parser.add_argument("--hold", type=float, default=6.0, metavar="SECONDS",
                        help="for which each number of workers trains; default %(default)s")
    parser.add_argument("--above", type=Path, metavar="FILE", help="of all steps of another run, drawn above this one")
    parser.add_argument("--png", type=Path, default=RESULTS / "elastic.png", metavar="FILE",
                        help="default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="gets all steps; default build/bench/elastic_timeline.FRAMEWORK.json")
    args = parser.parse_args()
    where = surroundings(max(map(len, HOSTS)), [own.VERSION])
    print(heading(where), flush=True)
    steps, changes = measure(WORKERS[args.framework], os.path.abspath(args.python), args.hold)
    longest = max(later.at - step.at for step, later in zip(steps, steps[1:]))
    print(f"{len(steps)} steps, {sum(step.images for step in steps)} images; longest pause {longest:.2f} s")
    result = {**where, "framework": args.framework, "steps": steps, "changes": changes}
    output = args.output or RESULTS / f"elastic_timeline.{args.framework}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result))
    draw([json.loads(args.above.read_text()), result] if args.above else [result], args.png)
    print(f"All steps: {output}; {args.png}")


if __name__ == "__main__":
    main()

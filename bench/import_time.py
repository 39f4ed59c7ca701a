"""What `import lightcc.torch` costs beyond `import torch`, in fresh processes by turns.

    python bench/import_time.py [--repeats 9]

Each process times its own imports, so the start of Python is not in it. The files are in the page cache and compiled:
the first process of each kind is not counted. Prints the median of each kind in ms, and lightcc.torch's as a share of
torch's. A goal that is missed is printed as such, and the exit code is 0 all the same.
"""
import argparse
import statistics
import subprocess
import sys

KINDS = {  # what is timed: imported before, timed
    "torch": ("", "torch"),
    "lightcc.torch, after torch": ("torch", "lightcc.torch"),
    "lightcc": ("", "lightcc"),
    "lightcc.as_horovod, at every start of Python": ("", "lightcc.as_horovod"),
}
GOAL_MS = {"lightcc.torch, after torch": 50, "lightcc": 5, "lightcc.as_horovod, at every start of Python": 10}


def once(before: str, timed: str) -> float:
    """Milliseconds that a fresh process needs for one import."""
    code = (f"import time{', ' + before if before else ''}; began = time.perf_counter(); import {timed}\n"
            "print((time.perf_counter() - began) * 1e3)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="processes of each kind; default %(default)s")
    args = parser.parse_args()
    samples = {name: [] for name in KINDS}
    for turn in range(args.repeats + 1):
        for name, (before, timed) in KINDS.items():
            took = once(before, timed)
            if turn:
                samples[name].append(took)
    for name, times in samples.items():
        median = statistics.median(times)
        goal = GOAL_MS.get(name)
        verdict = "" if goal is None else f"  goal < {goal} ms: {'ok' if median < goal else 'MISSED'}"
        print(f"{name:<46}{median:9.2f} ms  ({min(times):.2f} to {max(times):.2f}){verdict}")
    torch, ours = (statistics.median(samples[name]) for name in list(KINDS)[:2])
    print(f"import torch, lightcc.torch takes {(torch + ours) / torch:.3f} of the time of import torch")


if __name__ == "__main__":
    main()

"""A step of Accelerate, of the Trainer of Transformers, and of Lightning over lightcc beside the same over gloo, on two
ranks of this host, by turns; lightning_strategy is lightcc's HorovodStrategy beside DDPStrategy over gloo.

    python bench/trainers.py [--turns 5] [--python PYTHON]

--python: one that has lightcc, lightning, accelerate and transformers (build/trainers/bin/python), if that is another.
Prints a row of a table for each, and exits with 1 if a median of lightcc is above gloo's.
"""
import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

from where import heading, surroundings, table_row, version

WORKER = Path(__file__).with_name("trainers_worker.py")
TRAINERS = ("accelerate", "transformers", "lightning", "lightning_strategy")


def step_ms(python: str, trainer: str, backend: str) -> float:
    done = subprocess.run([python, "-m", "lightcc.runner", "-np", "2", python, WORKER, trainer, backend],
                          capture_output=True, text=True, check=False)
    found = re.search(r"found ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{trainer} over {backend} ended with {done.returncode}:\n{done.stderr}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    print(heading(surroundings(2, [f"torch {version('torch')}"])))
    print(table_row("trainer", "gloo, ms a step", "lightcc", "ratio"), table_row(*["---"] * 4), sep="\n", flush=True)
    ratios = []
    for trainer in TRAINERS:
        samples: Dict[str, List[float]] = {"gloo": [], "lightcc": []}
        for _ in range(options.turns):
            for backend, of_backend in samples.items():
                of_backend.append(step_ms(options.python, trainer, backend))
        gloo, ours = map(statistics.median, samples.values())
        ratios.append(ours / gloo)
        print(table_row(trainer, f"{gloo:.1f}", f"{ours:.1f}", f"{ratios[-1]:.2f}"), flush=True)
    sys.exit(max(ratios) > 1)


if __name__ == "__main__":
    main()

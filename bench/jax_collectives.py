"""JAX's collectives over lightcc beside the same over gloo, on two ranks of this host, by turns.

    python bench/jax_collectives.py [--turns 3] [--np 2] [--python PYTHON] [--mib 1,64]

--python: one that has lightcc and jax (build/jax/bin/python), if that is another. Each turn starts a job over each; a
time is the median of a job's calls on its slowest rank, and the table has the medians over the turns. Prints a row for
each operation, and exits with 1 if a ratio is above its goal.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

from where import heading, surroundings, table_row, version

WORKER = Path(__file__).with_name("jax_worker.py")
GOALS = {"psum of one float": 0.15, "100 psums of one float": 0.05, "all_to_all of 1 MiB": 0.4, "psum of 64 MiB": 0.5,
         "psum_scatter of 64 MiB": 0.25, "training step": 0.25}  # of gloo's time


def goal(operation: str) -> float:
    return GOALS.get(operation, 0.15 if operation.endswith(" 1 MiB") else 0.8)


def milliseconds(python: str, np: int, backend: str, mib: str) -> Dict[str, float]:
    done = subprocess.run([python, "-m", "lightcc.runner", "-np", str(np), python, WORKER, backend, mib],
                          capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in re.findall(r"found (\{.*\})", done.stdout)]
    if done.returncode or len(found) != np:
        raise RuntimeError(f"the job over {backend} ended with {done.returncode}:\n{done.stderr}")
    return {operation: max(one[operation] for one in found) for operation in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--mib", default="1,64", help="sizes of tensors")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    jax = subprocess.run([options.python, "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True)
    print(heading(surroundings(options.np, [f"jax {jax.stdout.strip()}", f"lightcc {version('lightcc')}"])))
    samples: Dict[str, Dict[str, List[float]]] = {}
    for _ in range(options.turns):
        for backend in ("gloo", "lightcc"):
            for operation, took in milliseconds(options.python, options.np, backend, options.mib).items():
                samples.setdefault(operation, {}).setdefault(backend, []).append(took)
    print(table_row("operation", "gloo, ms", "lightcc", "ratio", "goal"), table_row(*["---"] * 5), sep="\n")
    missed = 0
    for operation, of_backend in samples.items():
        gloo, ours = statistics.median(of_backend["gloo"]), statistics.median(of_backend["lightcc"])
        missed += ours / gloo > goal(operation)
        print(table_row(operation, f"{gloo:.3f}", f"{ours:.3f}", f"{ours / gloo:.3f}", f"{goal(operation):g}"))
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()

"""What lightcc.embedding costs beside PyTorch, FBGEMM and TensorFlow Recommenders-Addons: lookups, updates, exchange.

    python bench/embedding.py --install                     # first makes the peers' environments, with pip
    python bench/embedding.py                               # everything; as root: between hosts, too; half an hour
    python bench/embedding.py --parts steps --rounds 5      # some of them: see --help

steps: a step on one core with 65,536 ids and a table of 10^6 rows x 16, which all exist: look up, take a gradient for
each id, update; and lookups alone. Each side is a process in an environment of its own, all bound to one core; in a
round each is measured once, by turns, and ratios are medians of the rounds' ratios. Row numbers come from one
generator (embedding_ids.py); FBGEMM and PyTorch look up row numbers, lightcc and TFRA raw 64-bit keys.
large: lookups of raw keys in 10^7 rows, beside reads of memory. memory: bytes a key. exchange, ranks: two ranks on this
host. hosts: two hosts of two ranks, and of one. flights: examples/embedding_flights.py. Goals that are missed are
printed as such, and the exit code stays 0: speed is not a test.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import embedding_ids
import embedding_peers
from embedding_peers import Process, Unavailable
from report import ratio_of
from where import RESULTS, heading, surroundings, table_row, version

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "embedding_flights.py"
DIM, BATCHES, LARGE_ROWS = 16, 8, 10**7
MOST_OF_BYTES, HEAD_BYTES = 1.25, 29  # bytes a key, at most: 1.25 * (4 * dim * (1 + slots) + 29)
SLOTS = {"sgd": 0, "rowwise_adagrad": 1 / DIM, "adagrad": 1, "lazy_adam": 2, "sparse_adam": 2}
SIDES = {"lightcc": ["sparse_adam", "lazy_adam", "adagrad", "rowwise_adagrad", "sgd"],
         "torch": ["lazy_adam", "adagrad"], "fbgemm": ["adagrad", "rowwise_adagrad", "sgd"],
         "tfra": ["lazy_adam", "adagrad"]}
LOOKED_UP = {"lightcc": "sgd", "torch": "adagrad", "fbgemm": "sgd", "tfra": "adagrad"}


class Goal(NamedTuple):
    """Our row is at least so many times as fast as theirs, for ids of these kinds."""
    what: str
    ours: str
    side: str
    theirs: str
    least: float
    kinds: Tuple[str, ...] = embedding_ids.KINDS


GOALS = [Goal("step", "sparse_adam", "torch", "lazy_adam", 4),
         Goal("step", "sparse_adam", "tfra", "lazy_adam", 12),
         Goal("step", "adagrad", "fbgemm", "adagrad", 1),
         Goal("step", "rowwise_adagrad", "fbgemm", "rowwise_adagrad", 0.7),
         Goal("step", "sgd", "fbgemm", "sgd", 0.7), Goal("lookup", "sgd", "fbgemm", "sgd", 0.6, ("uniform",))]


def verdict(met: bool) -> str:
    return "ok" if met else "MISSED"


def steps(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    different = embedding_ids.write(folder, args.rows, args.ids, BATCHES)
    print(f"\n{args.ids:,} ids of {args.rows:,} rows x {DIM}, different: "
          + ", ".join(f"{kind} {count:,.0f}" for kind, count in different.items()), flush=True)
    sides: Dict[str, Process] = {}
    tables: List[Tuple[str, str]] = []
    try:
        for side in args.sides:
            try:
                sides[side] = Process(side, folder, args.rows, DIM, core, args.clock)
                for rule in SIDES[side]:
                    sides[side].ask("make", rule)
                    tables.append((side, rule))
            except Unavailable as why:
                print(f"LEFT OUT: {side}: {why}", flush=True)
        samples: Dict[Tuple[str, str, str, str], List[float]] = {}
        for turn in range(args.rounds):
            for side, rule in tables[turn % len(tables):] + tables[:turn % len(tables)]:
                for kind in embedding_ids.KINDS:
                    for what in ("step", "lookup"):
                        if what == "step" or LOOKED_UP[side] == rule:
                            samples.setdefault((what, side, rule, kind), []).append(
                                sides[side].ask(what, rule, kind, args.repeats))
    finally:
        for process in sides.values():
            process.end()
    print(", ".join(process.version for process in sides.values()) + f"; {args.clock} time")
    print(steps_table(samples))
    goals = [line for goal in GOALS for kind in goal.kinds if (line := goal_line(goal, kind, samples))]
    print("\n".join(goals), flush=True)
    return {"different": different, "goals": goals,
            "samples_s": {" ".join(key): some for key, some in samples.items()}}


def steps_table(samples: Dict[Tuple[str, str, str, str], List[float]]) -> str:
    lines = [table_row("ms, median", "optimizer", *embedding_ids.KINDS), table_row(*["---"] * 4)]
    for what in ("step", "lookup"):
        for side, rule in dict.fromkeys(key[1:3] for key in samples if key[0] == what):
            cells = [f"{1e3 * statistics.median(samples[what, side, rule, kind]):.2f}" for kind in embedding_ids.KINDS]
            lines.append(table_row(f"{what}, {side}", rule if what == "step" else "none", *cells))
    return "\n".join(lines)


def goal_line(goal: Goal, kind: str, samples: Dict[Tuple[str, str, str, str], List[float]]) -> Optional[str]:
    """Nothing if a side was left out."""
    ours = samples.get((goal.what, "lightcc", goal.ours, kind))
    theirs = samples.get((goal.what, goal.side, goal.theirs, kind))
    if not ours or not theirs or len(ours) != len(theirs):
        return None
    ratio, low, high = ratio_of(theirs, ours)
    return (f"{goal.what}, {kind}: {goal.ours} {ratio:.2f} times as fast as {goal.side}'s {goal.theirs} ({low:.2f} to "
            f"{high:.2f}), goal >= {goal.least:g}: {verdict(ratio >= goal.least)}")


def large(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    from embedding_large import Large
    os.sched_setaffinity(0, {core})
    found = Large(args.large_rows, DIM, BATCHES)
    samples = found.samples(args.rounds)
    print(f"\n{args.ids:,} raw keys of {args.large_rows:,} rows x {DIM}, uniform, ms: "
          + ", ".join(f"{side} {1e3 * statistics.median(some):.2f}" for side, some in samples.items()))
    ratio, low, high = ratio_of(samples["floor"], samples["lookup"])
    print(f"lookup: {ratio:.2f} of the floor's speed ({low:.2f} to {high:.2f}), goal >= 0.7: {verdict(ratio >= 0.7)}",
          flush=True)
    both = [floor + index for floor, index in zip(samples["floor"], samples["index"])]
    ratio_of_both, low, high = ratio_of(both, samples["lookup"])
    print(f"lookup: {ratio_of_both:.2f} of the speed of the floor and a line of the index a key ({low:.2f} to "
          f"{high:.2f})", flush=True)
    return {"samples_s": samples, "record_bytes": found.record_bytes, "ratio": ratio}


def memory(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    from embedding_large import bytes_a_key
    os.sched_setaffinity(0, {core})
    found = {}
    print(f"\nBytes a key, {args.rows:,} rows x {DIM}")
    for rule, slots in SLOTS.items():
        most = MOST_OF_BYTES * (4 * DIM * (1 + slots) + HEAD_BYTES)
        found[rule] = bytes_a_key(rule, args.rows, DIM)
        print(f"{rule}: {found[rule]:.0f}, goal <= {most:.0f}: {verdict(found[rule] <= most)}", flush=True)
    return found


def exchange(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    import embedding_exchange
    return embedding_exchange.contest(args.ids, args.rows, DIM, args.rounds, args.repeats)


def ranks(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    import embedding_exchange
    return embedding_exchange.scaling(args.ids, args.rows, DIM, args.rounds, args.repeats)


def hosts(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    import embedding_hosts
    return embedding_hosts.contest(args.rows, args.rounds)


def flights(args: argparse.Namespace, folder: Path, core: int) -> Dict[str, Any]:
    found = {}
    for optimizer in ("adagrad", "sparse_adam"):
        output = RESULTS / f"embedding_flights_{optimizer}.json"
        subprocess.run([sys.executable, str(EXAMPLE), "--compare", "--optimizer", optimizer, "--output", str(output)],
                       check=True)
        found[optimizer] = json.loads(output.read_text())
        ours, vocabulary, hashed = (row["auc"] for row in found[optimizer].values())
        print(f"AUC {ours - vocabulary:+.4f} beside the finished vocabulary, goal within 0.001: "
              f"{verdict(abs(ours - vocabulary) <= 1e-3)}; {ours - hashed:+.4f} beside hashed ids, goal >= 0.02: "
              f"{verdict(ours - hashed >= 0.02)}", flush=True)
    return found


Part = Callable[[argparse.Namespace, Path, int], Dict[str, Any]]
PARTS: Dict[str, Part] = {"steps": steps, "large": large, "memory": memory, "exchange": exchange, "ranks": ranks,
                          "hosts": hosts, "flights": flights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="first makes the peers' environments in build/peers")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="of steps; default: all")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each side; default %(default)s")
    parser.add_argument("--repeats", type=int, default=8, help="steps a sample; default %(default)s")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="of steps; cpu: that of the side's process, where other programs run; default %(default)s")
    parser.add_argument("--rows", type=int, default=10**6, help="of a table; default %(default)s")
    parser.add_argument("--large-rows", type=int, default=LARGE_ROWS, help="of the large one; default %(default)s")
    parser.add_argument("--ids", type=int, default=65536, help="a step, of each rank; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "embedding.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    parser.add_argument("--part-output", type=Path, help=argparse.SUPPRESS)  # of a part in a process of its own
    args = parser.parse_args()
    if args.install:
        embedding_peers.install()
    core = max(os.sched_getaffinity(0))
    if args.part_output:
        with tempfile.TemporaryDirectory() as folder:
            args.part_output.write_text(json.dumps(PARTS[args.parts[0]](args, Path(folder), core)))
        return
    where = surroundings(1, [f"torch {version('torch')}"])
    print(heading(where), flush=True)
    found = {part: in_own_process(part) for part in args.parts}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "parts": found}, indent=1))
    print(f"\n{args.rounds} rounds. All samples: {args.output}")


def in_own_process(part: str) -> Any:
    """What a part finds. A process of its own has its own memory, core and job; one that fails is LEFT OUT."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        given = [argument for argument in sys.argv[1:] if argument != "--install"]
        own = ["--parts", part, "--part-output", file.name]
        done = subprocess.run([sys.executable, __file__, *given, *own], check=False)
        if done.returncode:
            print(f"LEFT OUT: {part}: exit code {done.returncode}", flush=True)
            return None
        return json.loads(Path(file.name).read_text())


if __name__ == "__main__":
    main()

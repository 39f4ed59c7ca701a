"""How fast lightcc's all-reduce is beside that of every other library at hand, on one host, in one run.

    python bench/allreduce.py [--ranks 2,4] [--peers openmpi,mpich,impi,gloo,oneccl] [--quick]

For each number of ranks, binding and size: every library's settings are tried once and checked on random numbers; then
rounds follow in which each library runs once, by turns, with the setting that was best. bench/README.md has the rest.
"""
import argparse
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import List, Sequence

import report
from contest import FLOAT, Case, Run
from group import build_driver
from peers.peer import Peer, Unavailable
from shapes import resnet50
from where import RESULTS

PEERS = ("openmpi", "mpich", "impi", "gloo", "oneccl")
MODULES = {"lightcc": "lightcc_c", "gloo": "torch_gloo"}  # where the file's name is not the peer's
KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK_SIZES = [4, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]


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


def affordable(cases: List[Case], ranks: int, contestants: int) -> List[Case]:
    """Without those whose tensors, input and output of every rank of every library, would fill the memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * KIB
    found = []
    for case in cases:
        needed = 2 * case.bytes * ranks * (contestants + 2)  # lightcc has two kinds of memory, and there is the floor
        if needed <= free:
            found.append(case)
        else:
            print(f"LEFT OUT: {case.key}: needs {needed >> 20} MiB of memory, there are {free >> 20}", flush=True)
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
    parser.add_argument("--seconds-per-point", type=float, help="default 0.06, with --quick 0.02")
    parser.add_argument("--fastest", action="store_true",
                        help="a round's time is that of its fastest batch, not the median one: for a busy machine")
    parser.add_argument("--settings", type=int,
                        help="of each library only the first so many; default all, with --quick 3")
    parser.add_argument("--seed", type=int, default=1, help="of the numbers that are checked; default %(default)s")
    parser.add_argument("--install", action="store_true", help="first put the peers into build/peers, with pip")
    parser.add_argument("--json", type=Path, default=RESULTS / "allreduce.json", metavar="FILE")
    parser.add_argument("--png", type=Path, default=RESULTS / "allreduce.png", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about two minutes")
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 9)
    args.of_batches = min if args.fastest else statistics.median
    args.seconds_per_point = args.seconds_per_point or (0.02 if args.quick else 0.06)
    args.settings = args.settings or (3 if args.quick else None)
    sizes = sorted(args.sizes or (QUICK_SIZES if args.quick else SIZES))
    args.cases = [Case(str(size), [size // FLOAT]) for size in sizes]
    if not args.no_gradients:
        args.cases.append(Case("gradients", list(map(math.prod, resnet50()))))
    return args


def main() -> None:
    args = arguments()
    began = time.monotonic()
    where = report.surroundings()
    print(report.headline(where), flush=True)
    args.cases = affordable(args.cases, max(args.ranks), 1 + len(args.peers))
    driver = build_driver(RESULTS)
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
                    print(report.title(run.ranks, run.binding), flush=True)
                    for case in args.cases:
                        run.measure(case)
                        print(report.verdict_lines(run.rows[-1]), flush=True)
                    run.machine = run.measure_machine()
                finally:
                    run.quit()
            runs.append(run)
            print(report.details(run.rows, run.machine), flush=True)
    took = time.monotonic() - began
    print(report.origins(peers, {name: text for run in runs for name, text in run.versions.items()}))
    print(f"{args.rounds} rounds, {took:.0f} s in all; every result was checked before it was timed.")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({
        **where, "rounds": args.rounds, "seconds_per_point": args.seconds_per_point,
        "transports": {peer.name: peer.transport for peer in peers},
        "versions": {name: text for run in runs for name, text in run.versions.items()},
        "machine": [{"ranks": run.ranks, "binding": run.binding, "line_s": run.machine.get("line"),
                     "copy_bytes_per_s": run.machine.get("copy")} for run in runs],
        "left_out": {name: text for run in runs for name, text in run.left_out.items()},
        "rows": [{**row, "verdicts": report.verdicts(row)} for run in runs for row in run.rows],
    }, indent=1, ensure_ascii=False))
    print(f"All samples: {args.json}")
    try:
        import picture
    except ImportError as why:
        print(f"No picture: {why}")
        return
    picture.draw([row for run in runs for row in run.rows], report.headline(where), args.png)
    print(f"Picture: {args.png}")


if __name__ == "__main__":
    main()

"""HARP against the kernel's TCP in the very same message pattern, and against its own targets.

    python bench/harp.py                              # as root: all rows, about seven minutes
    python bench/harp.py --rows 'udp-*' --rounds 15
    python bench/harp.py --rows 'xdp-*'               # past the kernel (ninja -C build/cmake harp_xsk_bench)
    python bench/harp.py --rows 'nccl-*'              # its plugin for NCCL against what NCCL's sockets do
    python bench/harp.py --rows 'shm*' 'mem*' idle    # these need no root
    python bench/harp.py --list

The pattern is that of NCCL's network plugins: messages of 1 MiB, 8 requests outstanding, polled tests; both sides check
what they get. Hosts are two network namespaces on one veth cable (harp_network.py), made here and removed at the end;
each side of a run is bound to one core. In each round every side is measured once, in turning order; a ratio is the
median of the rounds' ratios. TCP is the best of one connection, with the kernel's buffers and with large ones; four
connections stand beside it. CPU is that of both processes, all threads; the machine's busy time stands beside it.
A target that is missed is printed as such and the exit code stays 0: speed is not a test. A run that fails is an error.
"""
import argparse
import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

from harp_rows import ROWS as OWN_ROWS
from harp_rows import Bench, Row, line_of
from nccl_rows import NCCL_ROWS
from where import RESULTS, surroundings

ROWS = [*OWN_ROWS, *NCCL_ROWS]
HOME = Path(__file__).resolve().parents[1]


def run_row(bench: Bench, row: Row) -> Dict[str, Any]:
    print(f"\n{row.name}", flush=True)
    samples = row.measure(bench)
    for name, some in samples.items():
        print(line_of(name, some), flush=True)
    goals = row.goals(samples) if bench.args.sides == "*" else []
    for goal in goals:
        print(goal.line(), flush=True)
    verdicts = [{**goal._asdict(), "met": goal.met(goal.bar)} for goal in goals]
    return {"row": row.name, "samples": samples, "goals": verdicts}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="names of rows; default: all")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--sides", default="*", metavar="PATTERN", help="only these sides, and nothing about targets")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a sample; default %(default)s")
    parser.add_argument("--warm-up", type=float, default=0.2, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control; default %(default)s")
    parser.add_argument("--engine-mode", default="auto", help="of HARP over udp: auto, inline or threads")
    parser.add_argument("--harp", default="", metavar="WORDS", help="more options of harp-bench for HARP over udp")
    parser.add_argument("--build", type=Path, default=HOME / "build" / "cmake", metavar="FOLDER",
                        help="where harp-bench is; default %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "harp.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if not (args.build / "harp-bench").exists():
        parser.error(f"no harp-bench in {args.build}: make it with -DLIGHTCC_TESTS=ON, or say --build")
    return args


def chosen(args: argparse.Namespace) -> List[Row]:
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in args.rows)]
    for row in rows if os.geteuid() else []:
        if row.needs_root:
            print(f"LEFT OUT: {row.name}: needs root, for network namespaces")
    return [row for row in rows if not (os.geteuid() and row.needs_root)]


def main() -> int:
    args = arguments()
    if args.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    where = surroundings(2, [])
    print(f"{where['cores']} cores, {where['cpu']}, Linux {where['kernel']}, load {where['load_before']:.1f}; commit "
          f"{where['commit']}; TCP: {args.congestion}; {args.rounds} rounds of {args.seconds} s", flush=True)
    bench, results, failures = Bench(args), [], 0
    for row in chosen(args):
        try:
            results.append(run_row(bench, row))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"    FAILED: {error}", flush=True)
            failures += 1
    met = [goal["met"] for result in results for goal in result["goals"]]
    print(f"\n{sum(met)} of {len(met)} targets met; {failures} rows failed. Incast is the simulator's: harp_tests "
          "--gtest_filter='*Incast*'")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**where, "rows": results}, indent=1))
    print(f"All samples: {args.json}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

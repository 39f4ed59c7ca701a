"""How lightcc does on a machine with many cores, beside gloo in the same processes: which sizes, and how it grows.

    python bench/cores.py                          # 2, 4, 8 and 16 ranks, as many as there are cores for; and two hosts
    python bench/cores.py --ranks 2,4 --oversubscribe

For each number of ranks: one float, 4 KiB, 1 MiB and 64 MiB, the 161 gradients of a ResNet-50, and the exchange of a
DistributedOptimizer whose gradients are ready, held against gloo's best way to sum those gradients. Then as root two
hosts of 8 ranks in network namespaces. Sums are checked first; a round measures every side once, by turns, and takes as
long as its slowest rank; times are medians, ratios medians of the rounds' ratios. "growth" is the time beside that of
the fewest ranks. What a rank costs that waits for nothing is CPU time, of a team without gloo. What does not begin
within --minutes is left out, and said so. Goals that are missed are printed as such; the exit code is 0 all the same.
"""
import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import multihost_sides as sides
from cables import Network, network_of
from multihost import parse_size
from peers import gloo, own
from report import MIB, ratio_of
from shapes import MODELS
from smoke import idle
from teams import Team
from where import RESULTS, heading, surroundings

ONE_FLOAT = sides.Case("1 float", (1,), calls=200)
SIZES = (4, 4096, MIB, 64 * MIB)
# Of gloo's time, at most: by the case and, for the large one, the ranks.
GOALS = {("1 float", None): 0.1, ("64 MiB", 16): 0.25}
NOTHING_ELSE = argparse.Namespace(flat=False, uncalibrated=False, harp=(), model=False, also=None, cyclic=False,
                                  compression=())
LINE = "{:<18} {:<10} {:>11} {:>11} {:>7} {:>9}  {}"
TITLE = LINE.format("", "", "lightcc", "gloo", "ratio", "growth", "goal")


class IdleRank(sides.Rank):
    """What it costs to be there."""

    def idle(self, seconds: float) -> Dict[str, float]:
        return idle(seconds)


def case_of(nbytes: int) -> sides.Case:
    return ONE_FLOAT if nbytes == 4 else sides.one_tensor(nbytes)


def cases_of(sizes: Sequence[int], model: str) -> List[sides.Case]:
    return [*map(case_of, sizes), *([sides.gradients(model), sides.step(model)] if model else [])]


def goal_of(case: str, ranks: int) -> Optional[float]:
    return GOALS.get((case, None), GOALS.get((case, ranks)))


def row_of(ranks: Tuple[int, ...], case: str, samples: Dict[str, List[float]]) -> Dict[str, Any]:
    """samples: seconds by side, one a round. gloo's are those of its best way."""
    theirs = [name for name in samples if name.startswith(gloo.NAME)]
    best = min(theirs, key=lambda name: statistics.median(samples[name]))
    ratio = ratio_of(samples[own.NAME], samples[best])[0]
    goal = goal_of(case, sum(ranks)) if len(ranks) == 1 else None
    return {"ranks": list(ranks), "case": case, "lightcc": statistics.median(samples[own.NAME]), "peer": best,
            "gloo": statistics.median(samples[best]), "ratio": ratio, "goal": goal,
            "met": None if goal is None else ratio <= goal, "samples": samples}


def add_growth(rows: List[Dict[str, Any]]) -> None:
    """The time by that of the fewest ranks of one host."""
    first: Dict[str, float] = {}
    for row in rows:
        row["growth"] = None
        if len(row["ranks"]) == 1:
            row["growth"] = row["lightcc"] / first.setdefault(row["case"], row["lightcc"])


def measure(ranks: Tuple[int, ...], cases: Sequence[sides.Case], rounds: int) -> List[Dict[str, Any]]:
    """The rows of ranks that lie so on hosts: one, which is this machine, or several network namespaces."""
    rows: List[Dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(ranks, len(ranks) == 1, "", min(case.nbytes for case in cases)))
        both = sides.Sides(stack, network, NOTHING_ELSE)
        of_gradients: Dict[str, List[float]] = {}
        for case in cases:
            found = sides.samples_of(both.of(case), case, rounds, 0.0)
            seconds = {name: [sample.seconds for sample in samples] for name, samples in found.of.items()}
            if case.ours == sides.STEP:
                seconds.update({name: times for name, times in of_gradients.items() if name != own.NAME})
            elif len(case.counts) > 1:
                of_gradients = seconds
            rows.append(row_of(ranks, case.label, seconds))
    return rows


def idle_ms(network: Network, seconds: float) -> float:
    """CPU time a second of the rank that takes most, in ms, of ranks that have just been busy."""
    with tempfile.TemporaryDirectory() as folder:
        places = network.places()
        team = Team("idle", len(places), IdleRank, (places, False, folder, secrets.token_hex(16)))
        try:
            team.ask("check", own.NAME, "each", (1,))
            return 1e3 * max(found["idle_cpu"] for found in team.ask("idle", seconds)) / seconds
        finally:
            team.end()


def title_of(ranks: Sequence[int]) -> str:
    """
    >>> title_of([4]), title_of([8, 8])
    ('4 ranks', '2 hosts of 8 ranks')
    """
    return f"{ranks[0]} ranks" if len(ranks) == 1 else f"{len(ranks)} hosts of {ranks[0]} ranks"


def time_text(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


def line_of(row: Dict[str, Any]) -> str:
    growth = "" if row["growth"] is None else f"{row['growth']:.2f}"
    goal = "" if row["goal"] is None else f"<= {row['goal']:g} x gloo  {'ok' if row['met'] else 'MISSED'}"
    return LINE.format(title_of(row["ranks"]), row["case"], time_text(row["lightcc"]), time_text(row["gloo"]),
                       f"{row['ratio']:.3f}", growth, goal).rstrip()


def plan(counts: Sequence[int], per_host: int, cores: int, oversubscribe: bool, is_root: bool,
         ) -> Tuple[List[Tuple[int, ...]], List[str]]:
    """The ranks of each host, run by run; and what is left out, with the reason.

    >>> plan([2, 4], 8, 2, False, True)
    ([(2,)], ['4 ranks: 2 cores; --oversubscribe runs them', '2 hosts of 8 ranks: 2 cores; --oversubscribe runs them'])
    """
    wanted: List[Tuple[int, ...]] = [*((count,) for count in counts), *([(per_host,) * 2] if per_host else [])]
    runs, left_out = [], []
    for ranks in wanted:
        title = title_of(ranks)
        if sum(ranks) > cores and not oversubscribe:
            left_out.append(f"{title}: {cores} cores; --oversubscribe runs them")
        elif len(ranks) > 1 and not is_root:
            left_out.append(f"{title}: only root can make network namespaces")
        else:
            runs.append(ranks)
    return runs, left_out


def arguments(words: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: sorted(map(int, text.split(","))), default=[2, 4, 8, 16],
                        metavar="N,N...", help="default 2,4,8,16")
    parser.add_argument("--per-host", type=int, default=8, metavar="N",
                        help="ranks of each of two hosts, 0: no hosts; default %(default)s")
    parser.add_argument("--oversubscribe", action="store_true", help="also more ranks than there are cores")
    parser.add_argument("--sizes", type=lambda text: tuple(map(parse_size, text.split(","))), default=SIZES,
                        metavar="SIZE,...", help="default 4,4K,1M,64M")
    parser.add_argument("--no-gradients", action="store_true", help="no gradients, and no optimizer's exchange")
    parser.add_argument("--model", choices=MODELS, default="resnet50",
                        help="whose gradients; default %(default)s; tiny only tries the program")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--idle", type=float, default=2, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--minutes", type=float, default=2.5, help="nothing begins later; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "cores.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args(words)
    if args.ranks[0] < 2:
        parser.error("--ranks: one rank alone has nobody to send to")
    return args


def main(words: Optional[List[str]] = None) -> None:
    args = arguments(words)
    end = time.monotonic() + 60 * args.minutes
    runs, left_out = plan(args.ranks, args.per_host, len(os.sched_getaffinity(0)), args.oversubscribe,
                          os.geteuid() == 0)
    where = surroundings(max(map(sum, runs), default=0), [own.VERSION, gloo.VERSION])
    print(heading(where), TITLE, sep="\n", flush=True)
    rows: List[Dict[str, Any]] = []
    idle_costs: Dict[str, float] = {}
    for ranks in runs:
        title = title_of(ranks)
        if time.monotonic() > end:
            left_out.append(f"{title}: --minutes {args.minutes:g} are over")
            continue
        try:
            found = measure(ranks, cases_of(args.sizes, "" if args.no_gradients else args.model), args.rounds)
            with network_of(ranks, len(ranks) == 1, "", 4) as network:
                idle_costs[title] = idle_ms(network, args.idle)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # root may make no hosts here
            left_out.append(f"{title}: {error}")
            continue
        rows += found
        add_growth(rows)
        print("\n".join(map(line_of, found)), flush=True)
    for title, cost in idle_costs.items():
        print(f"idle, {title}: {cost:.2f} ms of CPU time a second, of the rank that takes most")
    for one in left_out:
        print(f"LEFT OUT: {one}")
    print(f"Medians of {args.rounds} rounds, slowest rank; results were checked.")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "rows": rows, "idle_ms_a_second": idle_costs, "left_out": left_out},
                                      indent=1, ensure_ascii=False))
    print(f"All samples: {args.output}")


if __name__ == "__main__":
    main()

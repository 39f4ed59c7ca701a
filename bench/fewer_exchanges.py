"""What fewer exchanges bring on slow networks: DelayedGradients, LocalSGD and DiLoCo beside dense steps, Top-K, and
DistributedDataParallel over gloo, by time to the same validation loss on real text.

    python bench/fewer_exchanges.py                                 # as root: 4 hosts, 40 minutes
    python bench/fewer_exchanges.py --rates 100mbit --steps 120 --settings dense "DiLoCo 30/4"
    python bench/fewer_exchanges.py --png build/bench/fewer_exchanges.png

A transformer of 2.7 million parameters learns the characters of the sources of Python's standard library, which every
machine has; every tenth file is held out. The hosts are network namespaces on one bridge, whose cables carry the rate
each way (cables.py), each with one rank; all share this machine's cores. Settings have the same initial weights, data,
batch, AdamW and schedule of the learning rate, which were chosen with dense steps. The clock stands still while the
ranks validate. The loss that settings are to reach is that of dense steps at the end and 3 % (without dense steps: the
highest of the last ones); when each has reached it, the points say by linear interpolation. Bytes are what a host's
interface has sent. Goals that are missed are printed as such.
"""
import argparse
import json
import math
import secrets
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from cables import goodput_of, goodput_text, network_of
from fewer_exchanges_trainer import SETTINGS, Point, Shape, Trainer
from peers import gloo, own
from report import MIB
from teams import Team
from where import RESULTS, heading, surroundings, table_row

DENSE, DELAYED, DILOCO = "dense", "DelayedGradients", "DiLoCo"  # DiLoCo: how its settings begin
COLUMNS = ("rate", "setting", "validation loss", "beside dense", "seconds to {:.3f}", "beside dense", "s a step",
           "MB sent a host", "goal")
SLOW = "100mbit"
TARGET = 1.03                           # of dense's last loss
MOST_LOSS = {DELAYED: 1.01, DILOCO: 1.03}  # of dense's loss after the same number of samples
ALIKE = 1.5                             # exchange and computation take about equally long, at most so far apart


def train(team: Team, setting: str, args: argparse.Namespace) -> List[Point]:
    """The points of the first rank; bytes are those of the host that has sent most."""
    team.ask("begin", setting, args.seed, args.steps)
    points = [Point(0, 0.0, 0, float("nan"))]
    while points[-1].step < args.steps:
        steps = min(args.every, args.steps - points[-1].step)
        of_ranks = team.ask("advance", steps, points[-1].step + steps == args.steps)
        points.append(of_ranks[0]._replace(sent=max(point.sent for point in of_ranks)))
    return points[1:]


def seconds_to(loss: float, points: Sequence[Sequence[float]]) -> Optional[float]:
    """When the validation loss was first so low; None: never.

    >>> seconds_to(2.0, [(1, 10.0, 0, 3.0), (2, 20.0, 0, 1.0)])
    15.0
    """
    before = None
    for _, seconds, _, reached in points:
        if reached <= loss:
            if before is None or before[1] == reached:
                return seconds
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] + share * (seconds - before[0])
        before = seconds, reached
    return None


def goals_of(row: Dict[str, Any], found: Dict[str, Any]) -> List[Dict[str, Any]]:
    """What was wanted of a row beside dense's, and whether it is so."""
    name = DILOCO if row["setting"].startswith(DILOCO) else row["setting"]
    exchange = found["dense_step_s"] - found["compute_s"]
    goals = []
    if name in MOST_LOSS:
        goals.append({"what": f"loss <= {MOST_LOSS[name]:g}x", "met": row["loss_ratio"] <= MOST_LOSS[name]})
    if name == DILOCO and found["rate"] == SLOW:
        goals.append({"what": "time <= 0.15x", "met": row["time_ratio"] <= 0.15})
    if name == DELAYED and 1 / ALIKE <= exchange / found["compute_s"] <= ALIKE:
        goals.append({"what": "time <= 0.75x", "met": row["time_ratio"] <= 0.75})
    return goals


def contest(rate: str, args: argparse.Namespace) -> Dict[str, Any]:
    """All settings at one rate."""
    hosts = (1,) * args.hosts
    with network_of(hosts, False, rate, 16 * MIB) as network, tempfile.TemporaryDirectory() as folder:
        team = Team("trainers", args.hosts, Trainer, (network.places(), folder, secrets.token_hex(16), args.shape))
        try:
            goodput = goodput_of(team, network)
            print(f"\n{args.hosts} hosts, {rate} each; {goodput_text(goodput, rate)}", flush=True)
            compute_s = max(team.ask("compute_s"))
            parameters = team.ask("parameters")[0]
            curves: Dict[str, List[Point]] = {}
            for setting in args.settings:
                curves[setting] = train(team, setting, args)
                last = curves[setting][-1]
                print(f"  {setting}: loss {last.loss:.4f} after {last.seconds:.1f} s, {last.sent / 1e6:.1f} MB",
                      flush=True)
        finally:
            team.end()
    target = (TARGET * curves[DENSE][-1].loss if DENSE in curves else
              max(points[-1].loss for points in curves.values()))
    found = {"rate": rate, "compute_s": compute_s, "parameters": parameters, "target": target, "goodput": goodput,
             "dense_step_s": curves[DENSE][-1].seconds / args.steps if DENSE in curves else float("nan"), "rows": []}
    for setting, points in curves.items():
        row: Dict[str, Any] = {"setting": setting, "points": points, "loss": points[-1].loss,
                               "seconds": seconds_to(target, points)}
        if DENSE in curves:
            row["loss_ratio"] = row["loss"] / curves[DENSE][-1].loss
            row["time_ratio"] = (row["seconds"] or math.inf) / seconds_to(target, curves[DENSE])
            row["goals"] = goals_of(row, found)
        found["rows"].append(row)
    return found


def lines(found: Dict[str, Any]) -> List[str]:
    title = table_row(*COLUMNS).format(found["target"])
    rows = [f"computing alone {1e3 * found['compute_s']:.0f} ms a step, {found['parameters'] / 1e6:.2f} million "
            "parameters", title, table_row(*["---"] * len(COLUMNS))]
    for row in found["rows"]:
        last = row["points"][-1]
        goals = "; ".join(f"{goal['what']}: {'ok' if goal['met'] else 'MISSED'}" for goal in row.get("goals", ()))
        rows.append(table_row(found["rate"], row["setting"], f"{row['loss']:.4f}", f"{row.get('loss_ratio', 1):.3f}",
                              f"{row['seconds']:.1f}" if row["seconds"] else "never",
                              f"{row['time_ratio']:.3f}" if row["seconds"] and "time_ratio" in row else "–",
                              f"{last.seconds / last.step:.3f}", f"{last.sent / 1e6:.1f}", goals or "–"))
    return rows


def arguments(given: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="of one rank each; default %(default)s")
    parser.add_argument("--rates", nargs="+", default=[SLOW, "1gbit"], help="of each cable; default: both")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING",
                        help="%(choices)s; default: all")
    parser.add_argument("--steps", type=int, default=300, help="of each training; default %(default)s")
    parser.add_argument("--every", type=int, default=30, help="steps between points; default %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    for field, default in Shape()._asdict().items():
        parser.add_argument(f"--{field}", type=type(default), default=default, help="default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "fewer_exchanges.json", metavar="FILE",
                        help="gets all points; default %(default)s")
    parser.add_argument("--png", type=Path, metavar="FILE", help="gets a picture (fewer_exchanges_picture.py)")
    args = parser.parse_args(given)
    if args.hosts < 2 or args.steps < 1 or args.every < 1:
        parser.error("--hosts: 2 or more; --steps, --every: 1 or more")
    args.shape = Shape(*(getattr(args, field) for field in Shape._fields))
    return args


def main(given: Optional[List[str]] = None) -> None:
    args = arguments(given)
    where = surroundings(args.hosts, [own.VERSION, gloo.VERSION])
    print(heading(where), flush=True)
    found = {**where, "steps": args.steps, "shape": args.shape._asdict(), "rates": []}
    for rate in args.rates:
        found["rates"].append(contest(rate, args))
        print("\n".join(lines(found["rates"][-1])), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found))
    if args.png:
        from fewer_exchanges_picture import draw  # late: it needs matplotlib
        draw(found, args.png)


if __name__ == "__main__":
    main()

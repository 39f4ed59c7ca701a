"""A picture of what bench/convergence.py measured: the test score over simulated time on a slow network.

    python bench/convergence_picture.py docs/convergence.png build/bench/convergence.json [Gbit/s]
"""
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
from figures import plt, save

COLOURS = {"dense": "#2980b9", "top-k 1 %": "#c0392b", "top-k 0.1 %, warm-up": "#e67e22",
           "top-k 1 %, no error feedback": "#7f8c8d", "int8": "#27ae60"}
SHARE_BELOW = 0.02  # of the points


def draw(found: Dict[str, Any], rate_gbit: float, path: Path) -> None:
    """Writes a PNG: for each data set the means over the seeds, with a band of one standard deviation each way.

    The test sets of some seeds are harder than those of others, for all settings alike: of each curve is taken by how
    much the scores of its seed, at the end and over all settings, are above those of all seeds.
    """
    by_data: Dict[str, List[Dict[str, Any]]] = {}
    for row in found["rows"]:
        by_data.setdefault(row["data"], []).append(row)
    figure, axes = plt.subplots(1, len(by_data), figsize=(1 + 6 * len(by_data), 5), squeeze=False)
    for axis, (data, some) in zip(axes[0], by_data.items()):
        ends = np.array([[run["score"] for run in row["runs"]] for row in some])
        for row in some:
            _curve(axis, row, ends.mean(axis=0) - ends.mean(), rate_gbit)
        compute_ms = 1e3 * some[0]["compute_s"]
        axis.set(xscale="log", title=f"{data}, computing {compute_ms:.1f} ms a step",
                 xlabel=f"simulated seconds of training, cables of {rate_gbit:g} Gbit/s",
                 ylabel=f"test {some[0]['score']}, %")
        axis.set_ylim(bottom=_least_score(some))
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{found['ranks']} nodes of 1 rank; computing measured on {found['cpu']}, sent bytes counted, "
                    f"network simulated; commit {found['commit']}", fontsize=8)
    save(figure, path)


def simulated_s(row: Dict[str, Any], rate_gbit: float) -> np.ndarray:
    """When each point of the curve is reached: computing, and then sending, which nothing hides."""
    points = np.array([run["points"] for run in row["runs"]])
    steps, sent = points[:, :, 0], points[:, :, 1]
    return np.mean(steps * row["compute_s"] + 8 * sent / (rate_gbit * 1e9), axis=0)


def _curve(axis: Any, row: Dict[str, Any], easier: np.ndarray, rate_gbit: float) -> None:
    scores = np.array([[point[3] for point in run["points"]] for run in row["runs"]]) - easier[:, np.newaxis]
    seconds, mean, spread = simulated_s(row, rate_gbit), scores.mean(axis=0), scores.std(axis=0)
    colour = COLOURS.get(row["setting"])
    axis.plot(seconds, mean, label=row["setting"], color=colour, linewidth=2)
    axis.fill_between(seconds, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def _least_score(rows: Sequence[Dict[str, Any]]) -> float:
    """Where the picture begins: all but the first steps, next to which everything else would be a line at the top."""
    scores = np.array([[point[3] for point in run["points"]] for row in rows for run in row["runs"]])
    return float(np.quantile(scores, SHARE_BELOW))


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    found = json.loads(Path(sys.argv[2]).read_text())
    rate = float(sys.argv[3]) if len(sys.argv) == 4 else found["rate_gbit"]
    draw(found, rate, Path(sys.argv[1]))


if __name__ == "__main__":
    main()

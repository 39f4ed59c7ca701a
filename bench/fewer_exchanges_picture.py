"""A picture of what bench/fewer_exchanges.py measured: the validation loss over the seconds of training.

    python bench/fewer_exchanges_picture.py build/bench/fewer_exchanges.png build/bench/fewer_exchanges.json
"""
import json
import sys
from pathlib import Path
from typing import Any, Dict

from figures import plt, save

COLOURS = {"dense": "#2980b9", "DDP over gloo": "#7f8c8d", "Top-K 1 %": "#c0392b", "DelayedGradients": "#8e44ad",
           "LocalSGD 30": "#e67e22", "DiLoCo 30/4": "#27ae60", "DiLoCo 30/4, int8, delay 5": "#16a085",
           "DiLoCo 30/4, int4, delay 5": "#2c3e50"}


def draw(found: Dict[str, Any], path: Path) -> None:
    """Writes a PNG with a panel for each rate."""
    figure, axes = plt.subplots(1, len(found["rates"]), figsize=(1 + 6 * len(found["rates"]), 5), squeeze=False)
    for axis, of_rate in zip(axes[0], found["rates"]):
        for row in of_rate["rows"]:
            seconds = [point[1] for point in row["points"]]
            losses = [point[3] for point in row["points"]]
            axis.plot(seconds, losses, marker=".", label=row["setting"], color=COLOURS.get(row["setting"]))
        axis.axhline(of_rate["target"], color="black", linewidth=0.6, linestyle=":")
        axis.set(xscale="log", xlabel="seconds of training", ylabel="validation loss, nats a character",
                 title=f"{of_rate['rate']}, computing {1e3 * of_rate['compute_s']:.0f} ms a step")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=8)
    millions = found["rates"][0]["parameters"] / 1e6
    figure.suptitle(f"{found['ranks']} hosts of 1 rank, {millions:.1f} million parameters; {found['cpu']}, "
                    f"{found['cores']} cores; commit {found['commit']}", fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[1]))

"""A picture of what bench/allreduce.py measured: times and ratios over sizes, one column a run."""
import statistics
from pathlib import Path
from typing import Any, Dict, List, Tuple

import report
from figures import plt, save

COLOURS = {"lightcc": "#c0392b", "lightcc shared": "#e67e22", "floor": "#7f8c8d"}
BINDINGS = {"own": "a core each, or free", "one": "one core"}


def draw(rows: List[Dict[str, Any]], headline: str, path: Path) -> None:
    """Writes a PNG."""
    rows = [row for row in rows if row["case"] != "gradients"]
    runs: Dict[Tuple[int, str], List[Dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["ranks"], row["binding"]), []).append(row)
    if not runs:
        return
    figure, axes = plt.subplots(2, len(runs), figsize=(1.5 + 5 * len(runs), 8), sharex=True, sharey="row",
                                squeeze=False, height_ratios=(3, 2))
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    for column, ((ranks, binding), some) in enumerate(runs.items()):
        times, ratios = axes[0][column], axes[1][column]
        for name in names:
            points = [(row["bytes"], statistics.median(row["seconds"][name])) for row in some if name in row["seconds"]]
            ours = name in report.OURS
            times.plot(*zip(*points), label=name, color=COLOURS.get(name), marker="o" if ours else ".",
                       linewidth=2.5 if ours else 1.2, linestyle=":" if name == "floor" else "-")
        for ours in report.OURS:
            found = [(row["bytes"], report.verdicts(row)[ours]) for row in some if ours in report.verdicts(row)]
            if not found:
                continue
            sizes, verdicts = zip(*found)
            ratio = [v["ratio"] for v in verdicts]
            around = [[v["ratio"] - v["low"] for v in verdicts], [v["high"] - v["ratio"] for v in verdicts]]
            ratios.errorbar(sizes, ratio, yerr=around, label=f"{ours} / best peer", color=COLOURS[ours], marker="o",
                            capsize=3, linewidth=2)
            goals = [(size, v["goal"]) for size, v in found if v["goal"] is not None]
            if goals:
                ratios.plot(*zip(*goals), linestyle="", marker="_", markersize=16, markeredgewidth=2,
                            color=COLOURS[ours], alpha=0.5, label=f"goal of {ours}")
        times.set_title(f"{ranks} ranks, {BINDINGS[binding]}")
        times.set(xscale="log", yscale="log")
        ratios.set(xscale="log", yscale="log", xlabel="bytes")
        ratios.axhline(1, color="black", linewidth=0.8)
        sizes = sorted({row["bytes"] for row in some})
        ratios.set_xticks(sizes, [report.size_text(size) for size in sizes], rotation=60)
        ratios.minorticks_off()
        for axis in (times, ratios):
            axis.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("seconds an all-reduce")
    axes[1][0].set_ylabel("ratio; below 1 lightcc is faster")
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8)
    figure.suptitle(headline, fontsize=9)
    save(figure, path)

"""A picture of what bench/multihost.py measured, from one run or from the files of several.

    python bench/multihost_picture.py docs/multihost.png build/bench/wire.json build/bench/free.json

Above rows with a rate: time by the bound of the wire. Above rows without: lightcc's time by gloo's, with the interval.
"""
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from figures import plt, save
from report import size_text

COLOURS = {"lightcc": "#c0392b", "gloo": "#2980b9", "lightcc, flat": "#e67e22", "lightcc, cyclic": "#8e44ad",
           "gloo, cyclic": "#7f8c8d"}
MARKERS, DASHES = "osD^v", ("-", "--", ":", "-.")
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
HOSTS_COLOURS = ("#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#e67e22")


def draw(rows: Sequence[Dict[str, Any]], headline: str, path: Path) -> None:
    """Writes a PNG; of rows with one tensor alone."""
    rows = [row for row in rows if row["tensors"] == 1]
    wire, free = [row for row in rows if row.get("bound_counts")], [row for row in rows if not row["rate"]]
    panels = [(panel, some) for panel, some in ((_by_the_bound, wire), (_by_gloo, free)) if some]
    if not panels:
        raise SystemExit("no picture: it shows single tensors, without a rate, or with one that the cables kept")
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 6 * len(panels), 5), squeeze=False)
    for axis, (panel, some) in zip(axes[0], panels):
        panel(axis, some)
        axis.set(xscale="log", xlabel="bytes")
        axis.axhline(1, color="black", linewidth=0.8)
        sizes = sorted({row["bytes"] for row in some})
        axis.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60)
        axis.minorticks_off()
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(headline, fontsize=8)
    save(figure, path)


def _by_the_bound(axis: Any, rows: List[Dict[str, Any]]) -> None:
    for (hosts, some), dash, marker in zip(_by_hosts(rows), DASHES * 9, MARKERS * 9):
        for name in dict.fromkeys(name for row in some for name in row["of_bound"]):
            points = [(row["bytes"], row["of_bound"][name]) for row in some if name in row["of_bound"]]
            axis.plot(*zip(*points), label=f"{name}: {hosts}", color=COLOURS.get(name), linestyle=dash, marker=marker)
    rates = ", ".join(sorted({row["rate"] for row in rows}))
    axis.set(title=f"cables of {rates}", ylabel="time by the bound of the wire")


def _by_gloo(axis: Any, rows: List[Dict[str, Any]]) -> None:
    for (hosts, some), colour, marker in zip(_by_hosts(rows), HOSTS_COLOURS * 9, MARKERS * 9):
        sizes, ratios = [row["bytes"] for row in some], [row["ratios"]["gloo"] for row in some]
        around = [[ratio - low for ratio, low, _ in ratios], [high - ratio for ratio, _, high in ratios]]
        axis.errorbar(sizes, [ratio for ratio, _, _ in ratios], yerr=around, label=hosts, color=colour, marker=marker,
                      capsize=3)
    axis.set(title="as fast as the machine can", ylabel="lightcc / gloo; below 1 lightcc is faster", yscale="log")
    least, most = axis.get_ylim()
    ticks = [tick for tick in RATIOS if least <= tick <= most]
    axis.set_yticks(ticks, list(map(str, ticks)))


def _by_hosts(rows: List[Dict[str, Any]]) -> List[Tuple[str, List[Dict[str, Any]]]]:
    found: Dict[str, List[Dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        found.setdefault(", ".join(map(str, row["hosts"])), []).append(row)
    return list(found.items())


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    runs = [json.loads(Path(file).read_text()) for file in sys.argv[2:]]
    headlines = dict.fromkeys(f"{run['cores']} cores, {run['cpu']}, Linux {run['kernel']}, commit {run['commit']}"
                              for run in runs)
    draw([row for run in runs for row in run["rows"]], "\n".join(headlines), Path(sys.argv[1]))


if __name__ == "__main__":
    main()

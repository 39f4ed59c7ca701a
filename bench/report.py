"""What the samples of bench/allreduce.py amount to: ratios with their intervals, goals, a table, a picture."""
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
OURS = ("lightcc", "lightcc shared")
NO_PEER = (*OURS, "floor")
# Ratio to the best peer of the same run, at most: two ranks, by memory and bytes.
GOALS = {("lightcc", 4): 1.2, ("lightcc", 64 * KIB): 1.3,
         ("lightcc", MIB): 0.8, ("lightcc", 16 * MIB): 0.85, ("lightcc", 64 * MIB): 0.65, ("lightcc", 256 * MIB): 0.9,
         ("lightcc shared", MIB): 0.5, ("lightcc shared", 16 * MIB): 0.5, ("lightcc shared", 64 * MIB): 0.4,
         ("lightcc shared", 256 * MIB): 0.6}
GRADIENTS_GOAL = 0.5             # in lightcc's memory
MORE_RANKS_GOALS = (1.2, 0.8)    # four ranks: below 64 KiB, and from there on
RESAMPLES, INTERVAL = 2000, (2.5, 97.5)


def goal_of(row: Dict[str, Any], ours: str) -> Optional[float]:
    if row["case"] == "gradients":
        return GRADIENTS_GOAL if ours == "lightcc shared" else None
    if row["ranks"] > 2:
        return MORE_RANKS_GOALS[row["bytes"] >= 64 * KIB]
    return GOALS.get((ours, row["bytes"]))


def best_peer(row: Dict[str, Any]) -> Optional[str]:
    medians = {name: statistics.median(times) for name, times in row["seconds"].items() if name not in NO_PEER}
    return min(medians, key=medians.__getitem__) if medians else None


def ratio_of(ours: List[float], theirs: List[float]) -> Tuple[float, float, float]:
    """The median of the rounds' ratios, and its bootstrap interval of 95 %."""
    ratios = np.array(ours) / np.array(theirs)
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), INTERVAL)
    return float(np.median(ratios)), float(low), float(high)


def verdicts(row: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """For each of ours: the peer it is held against, the ratio, and the goal."""
    peer, result = best_peer(row), {}
    for ours in OURS:
        if ours in row["seconds"] and peer:
            ratio, low, high = ratio_of(row["seconds"][ours], row["seconds"][peer])
            goal = goal_of(row, ours)
            result[ours] = {"peer": peer, "ratio": ratio, "low": low, "high": high, "goal": goal,
                            "met": None if goal is None else ratio <= goal}
    return result


def size_text(bytes_: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:g} {name}"
    return f"{bytes_} B"


def time_text(seconds: float) -> str:
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def title(ranks: int, binding: str) -> str:
    bound = {"own": "each on its own core, or free if there are too few", "one": "all on one core"}[binding]
    return (f"\n{ranks} ranks, {bound}\n"
            f"{'':<14} {'':<15} {'time':>9} {'best peer':>20} {'ratio':>6}  {'95 %':<12} goal")


def verdict_lines(row: Dict[str, Any]) -> str:
    """Ours against the best peer, if there is one."""
    held = verdicts(row)
    lines = [f"{label(row):<14} {ours:<15} {time_text(statistics.median(row['seconds'][ours])):>9} {'no peer':>20}"
             for ours in OURS if ours in row["seconds"] and ours not in held]
    for ours, v in held.items():
        goal = "" if v["goal"] is None else f"<= {v['goal']:<5g}{'ok' if v['met'] else 'MISSED'}"
        theirs = f"{v['peer']} {time_text(statistics.median(row['seconds'][v['peer']]))}"
        lines.append(f"{label(row):<14} {ours:<15} {time_text(statistics.median(row['seconds'][ours])):>9} "
                     f"{theirs:>20} {v['ratio']:>6.2f}  {v['low']:.2f}–{v['high']:<7.2f} {goal}".rstrip())
    return "\n".join(lines)


def details(rows: List[Dict[str, Any]], machine: Dict[str, float]) -> str:
    """Of one run: everybody's time and way, and the machine's own."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = ["", f"{'all medians':<14}" + "".join(f"{name:>15}" for name in names)]
    for row in rows:
        lines.append(f"{label(row):<14}" + "".join(
            f"{time_text(statistics.median(row['seconds'][name])) if name in row['seconds'] else '–':>15}"
            for name in names))
    lines.append("")
    if "line" in machine:
        lines.append(f"round trip of a spinning cache line: {time_text(machine['line'])}")
    if "copy" in machine:
        lines.append(f"memcpy, every rank at once: {machine['copy'] / 1e9:.1f} GB/s a rank")
    lines += ["", "the way that was best"]
    for row in rows:
        lines.append(f"{label(row):<14}" + "; ".join(f"{name}: {way}" for name, way in row["way"].items()))
    return "\n".join(lines)


def origins(peers: Sequence[Any], versions: Dict[str, str]) -> str:
    """What was measured, and how its bytes travel."""
    return "\n".join(["", *[f"{peer.name}: {versions[peer.name]}; {peer.transport}"
                            for peer in peers if peer.name in versions]])


def label(row: Dict[str, Any]) -> str:
    return f"{row['tensors']} gradients" if row["case"] == "gradients" else size_text(row["bytes"])


def surroundings() -> Dict[str, Any]:
    """Where, with what and how: what somebody needs who wants to see the same numbers."""
    def git(*words: str) -> str:
        home = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, check=False).stdout.strip()

    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(), "load_before": os.getloadavg()[0], "python": platform.python_version(),
            "commit": (git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "-s") else "")) or "unknown",
            "command": shlex.join(["python", *sys.argv])}


def headline(where: Dict[str, Any]) -> str:
    return (f"{where['cores']} cores, {where['cpu']}, Linux {where['kernel']}, load {where['load_before']:.1f}, "
            f"commit {where['commit']}")

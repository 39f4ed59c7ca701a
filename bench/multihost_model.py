"""The cost model (lightcc-explain) held against what bench/multihost.py measured, of lightcc and of algorithms that
were forced upon it. Its cluster is what lightcc's calibration has found, but for the NICs, which have the goodput of
plain streams."""
import dataclasses
from typing import Any, Dict, List

from cables import LEAST_BOUND_BYTES
from peers import own

from lightcc.explain import Cluster, candidates

ALGORITHMS = ("ring", "halving_doubling")  # beside 2D, which lightcc chooses between hosts
GOAL = 0.10     # most by which a prediction may be off
NEAR = 0.05     # whose two best differ by less, either may be said to win
GOAL_WINNERS = 0.95


def side_name(algorithm: str) -> str:
    return f"{own.NAME}, {algorithm}"


def predictions(cluster: Cluster, nbytes: int, goodput: float) -> Dict[str, float]:
    """Seconds, by side."""
    cluster = dataclasses.replace(cluster, nic_gbit_per_s=8e-9 * goodput, flow_gbit_per_s=0)
    ways = list(reversed(candidates(cluster, nbytes)))  # the best of each algorithm comes last
    seconds = {one.algorithm: one.seconds for one in ways}
    return {own.NAME: seconds["2d"], **{side_name(name): seconds[name] for name in ALGORITHMS}}


def hold_against_model(row: Dict[str, Any], cluster: Cluster, goodput: float) -> None:
    """Adds what was predicted, where bytes matter more than start-ups."""
    if row["tensors"] == 1 and row["bytes"] >= LEAST_BOUND_BYTES:
        found = predictions(cluster, row["bytes"], goodput)
        row["predicted_s"] = {name: seconds for name, seconds in found.items() if name in row["median_s"]}


def model_lines(rows: List[Dict[str, Any]]) -> List[str]:
    held = [row for row in rows if "predicted_s" in row]
    lines = ["measured by predicted:"]
    for row in held:
        ratios = {name: row["median_s"][name] / seconds for name, seconds in row["predicted_s"].items()}
        lines.append(f"{row['case']:<14} " + ", ".join(
            f"{name} {ratio:.3f}{'' if abs(ratio - 1) <= GOAL else ' MISSED'}" for name, ratio in ratios.items()))
    right = sum(map(winner_is_right, held))
    verdict = "ok" if right >= GOAL_WINNERS * len(held) else "MISSED"
    return [*lines, f"the quickest was predicted in {right} of {len(held)} cells: {verdict}"] if held else []


def winner_is_right(row: Dict[str, Any]) -> bool:
    measured, predicted = row["median_s"], row["predicted_s"]
    chosen = min(predicted, key=predicted.__getitem__)
    return measured[chosen] <= (1 + NEAR) * min(measured[name] for name in predicted)

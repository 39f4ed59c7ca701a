"""Step times of teams that train by turns, and what they amount to: how much of a step is exposed communication.

A team is a Team whose workers have train(steps), which returns seconds a step. The team "alone" does not communicate.
"""
import random
import statistics
from typing import Any, Dict, List, Tuple

from teams import Team

ALONE = "alone"
BOOTSTRAPS = 4000


def measure(teams: Dict[str, Team], repeats: int, steps: int) -> Dict[str, List[float]]:
    """Seconds a step of the slowest rank, for each side and repeat."""
    samples: Dict[str, List[float]] = {side: [] for side in teams}
    order = list(teams)
    for _ in range(repeats):
        for side in order:
            samples[side].append(max(teams[side].ask("train", steps)))
        order.append(order.pop(0))
    return samples


def medians(samples: Dict[str, List[float]]) -> Dict[str, float]:
    """ms a step."""
    return {side: 1e3 * statistics.median(xs) for side, xs in samples.items()}


def summary(samples: Dict[str, List[float]], ours: str, theirs: str) -> Dict[str, Any]:
    """Medians in ms; how much of the exposed communication of their side is left, with a 95 % interval."""
    def exposed(chosen: List[int]) -> Tuple[float, float]:
        alone, mine, others = (statistics.median(samples[side][i] for i in chosen) for side in (ALONE, ours, theirs))
        return mine - alone, others - alone

    repeats = range(len(samples[ALONE]))
    mine, others = exposed(list(repeats))
    draw = random.Random(1)
    infinite = float("inf")  # their communication hides in the noise
    ratios = sorted(a / b if b > 0 else infinite
                    for a, b in (exposed(draw.choices(repeats, k=len(repeats))) for _ in range(BOOTSTRAPS)))
    interval = [None if x == infinite else x
                for x in (ratios[round(0.025 * BOOTSTRAPS)], ratios[round(0.975 * BOOTSTRAPS) - 1])]
    step_ratio = statistics.median(a / b for a, b in zip(samples[ours], samples[theirs]))  # pairs of a repeat
    return {"step_ms": medians(samples), "step_ratio": step_ratio,
            "exposed_ms": {ours: 1e3 * mine, theirs: 1e3 * others}, "ratio": mine / others if others > 0 else None,
            "interval": interval}


def counted(before: Dict[str, int], after: Dict[str, int], steps: int) -> Dict[str, float]:
    """What the core's counters say of one step."""
    return {counter: (after[counter] - before[counter]) / steps for counter in after}

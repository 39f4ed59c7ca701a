"""What the samples of bench/multihost.py amount to: medians, ratios with their intervals, goals, lines of a table."""
import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from cables import LEAST_BOUND_BYTES, LEAST_GOODPUT, share_of_rate
from floor import bound_s
from multihost_driven import OPEN_MPI, OURS
from multihost_sides import CYCLIC, OVER, STEP, Case, Samples
from peers import gloo, own
from report import KIB, MIB, ratio_of, time_text

TWO, FOUR_BY_TWO, CABLE = (1, 1), (2, 2, 2, 2), "1gbit"
GOAL_RATIO = {16 * MIB: 0.8, 64 * MIB: 0.8}  # to gloo, on two hosts of one rank, as fast as the machine can
GOAL_SPREAD = 2.0                            # the largest sample by the median, in the same rows
GOAL_OPEN_MPI = {4 * KIB: 1.2, 64 * KIB: 1.2, MIB: 1.0, 16 * MIB: 1.0, 64 * MIB: 0.5}  # in the same rows
GOAL_CYCLIC = 1.02
GOAL_HARP = 1.0                              # of TCP's time, where a cable bounds both
GOAL_CPU = 1.0
GOAL_GRADIENTS_BY_BOUND, GOAL_GRADIENTS = 1.06, 0.7
GOAL_SMALL = {500: 0.030}                    # seconds, by the number of tensors
GOAL_LONE_S = 0.0005
# Speedups over the dense exchange
GOAL_COMPRESSION = {("100mbit", "topk:0.01"): 12, (CABLE, "topk:0.01"): 4.5, ("100mbit", "topk:0.001"): 45,
                    (CABLE, "topk:0.001"): 5}


class Goal(NamedTuple):
    what: str
    value: float
    most: float
    seconds: bool = False

    def line(self) -> str:
        show = time_text if self.seconds else "{:.3f}".format
        return f"{'':<10} {self.what}: {show(self.value)}, goal <= {show(self.most)}: {self.verdict()}"

    def verdict(self) -> str:
        return "ok" if self.value <= self.most else "MISSED"


def best_gloo(median: Dict[str, float]) -> Optional[str]:
    """The best of gloo's ways in the usual order of ranks."""
    names = [name for name in median if name.startswith(gloo.NAME) and "cyclic" not in name]
    return min(names, key=median.__getitem__, default=None)


def row_of(hosts: Tuple[int, ...], rate: str, case: Case, samples: Samples) -> Dict[str, Any]:
    seconds = {name: [sample.seconds for sample in some] for name, some in samples.of.items()}
    cpu = {name: [sample.cpu_seconds for sample in some] for name, some in samples.of.items()}
    median = {name: statistics.median(xs) for name, xs in seconds.items()}
    held = {name: OURS if name == OPEN_MPI else own.NAME for name in seconds if name not in (own.NAME, OURS)}
    return {"hosts": hosts, "rate": rate, "case": case.label, "bytes": case.nbytes, "tensors": len(case.counts),
            "compute_s": case.compute_s, "median_s": median,
            "p90_s": {name: sorted(xs)[int(0.9 * (len(xs) - 1) + 0.5)] for name, xs in seconds.items()},
            "spread": {name: max(xs) / median[name] for name, xs in seconds.items()},
            "ratios": {name: ratio_of(seconds[ours], seconds[name]) for name, ours in held.items()},
            "cpu_s": {name: statistics.median(xs) for name, xs in cpu.items()}, "tried_s": samples.tried_s,
            "samples_s": seconds, "samples_cpu_s": cpu}


def hold_against_wire(row: Dict[str, Any], goodput: float) -> None:
    """Adds the bound, where the message is large enough for it to say something."""
    if row["bytes"] >= LEAST_BOUND_BYTES:
        row["goodput"], row["bound_counts"] = goodput, share_of_rate(goodput, row["rate"]) >= LEAST_GOODPUT
        row["bound_s"] = bound_s(len(row["hosts"]), row["bytes"], goodput)
        row["of_bound"] = {name: seconds / row["bound_s"] for name, seconds in row["median_s"].items()}


def goals_of(row: Dict[str, Any]) -> List[Goal]:
    """Those that are set for such a row; one by the bound only if the bound counts."""
    hosts, ratios, nbytes = tuple(row["hosts"]), row["ratios"], row["bytes"]
    best, one, found = best_gloo(row["median_s"]), row["tensors"] == 1, []
    if hosts == TWO and not row["rate"] and one:
        if nbytes in GOAL_RATIO:
            found.append(Goal(f"lightcc / {best}", ratios[best][0], GOAL_RATIO[nbytes]))
            found.append(Goal("largest sample of lightcc / median", row["spread"][own.NAME], GOAL_SPREAD))
        if OPEN_MPI in ratios and nbytes in GOAL_OPEN_MPI:
            found.append(Goal(f"{OURS} / {OPEN_MPI}", ratios[OPEN_MPI][0], GOAL_OPEN_MPI[nbytes]))
    if hosts == TWO and not row["rate"] and row["compute_s"]:
        found.append(Goal("median of lightcc", row["median_s"][own.NAME], GOAL_LONE_S, True))
    if hosts == FOUR_BY_TWO and row["rate"] == CABLE and row["case"] == "gradients":
        found.append(Goal(f"lightcc / {best}", ratios[best][0], GOAL_GRADIENTS))
        if row.get("bound_counts"):
            found.append(Goal("lightcc / bound", row["of_bound"][own.NAME], GOAL_GRADIENTS_BY_BOUND))
    elif hosts == FOUR_BY_TWO and row["rate"] == CABLE and row["tensors"] in GOAL_SMALL:
        found.append(Goal("median of lightcc", row["median_s"][own.NAME], GOAL_SMALL[row["tensors"]], True))
    if hosts == FOUR_BY_TWO and row["case"] == STEP:
        found += [Goal(f"{name} / dense", 1 / ratios[name][0], 1 / GOAL_COMPRESSION[row["rate"], name])
                  for name in ratios if (row["rate"], name) in GOAL_COMPRESSION]
    if CYCLIC in ratios and row["rate"] and nbytes >= LEAST_BOUND_BYTES:
        found.append(Goal(f"{CYCLIC} / host order", 1 / ratios[CYCLIC][0], GOAL_CYCLIC))
    if OVER["harp"] in ratios and row["rate"] == CABLE and nbytes >= LEAST_BOUND_BYTES:
        found.append(Goal(f"{OVER['harp']} / over TCP", 1 / ratios[OVER["harp"]][0], GOAL_HARP))
    if best and row["cpu_s"][best]:
        found.append(Goal(f"CPU seconds, lightcc / {best}", row["cpu_s"][own.NAME] / row["cpu_s"][best], GOAL_CPU))
    return found


TITLE = (f"{'':<14} {'':<22} {'median':>9} {'p90':>9} {'largest':>9} {'/ median':>8} {'CPU':>9}   lightcc to it")


def lines_of(row: Dict[str, Any]) -> str:
    lines, label = [], row["case"]
    for name, xs in row["samples_s"].items():
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*row["ratios"][name]) if name in row["ratios"] else ""
        lines.append(f"{label:<14} {name:<22} {time_text(row['median_s'][name]):>9} {time_text(row['p90_s'][name]):>9} "
                     f"{time_text(max(xs)):>9} {row['spread'][name]:>8.2f} {time_text(row['cpu_s'][name]):>9}   {ratio}"
                     .rstrip())
        label = ""
    lines += [f"{'':<14} {name:<22} {time_text(tried):>9} when tried; left out of the rounds"
              for name, tried in row["tried_s"].items() if name not in row["samples_s"]]
    if "open_mpi" in row:
        lines.append(f"{'':<14} {OPEN_MPI}'s best: {row['open_mpi']['setting']}")
    return "\n".join(lines)


def wire_line(row: Dict[str, Any]) -> str:
    return f"{row['case']:<14} {time_text(row['bound_s']):>9}  " + ", ".join(
        f"{name} {ratio:.3f}" for name, ratio in row["of_bound"].items())

"""What communication costs a training step: lightcc's DistributedOptimizer beside DistributedDataParallel over gloo.

    python bench/training.py [--np 2] [--models resnet50 tiny convolutions resnet20 mlp] [--comm-hook]

Four teams of processes train the same model: with lightcc, with DistributedDataParallel, with a barrier a step in place
of the exchange, and without communication. With --comm-hook lightcc's team uses DistributedDataParallel, too, with
lightcc.torch.ddp.comm_hook. One works while the others sleep; a repeat measures each of them, in turning order. What a
step takes longer than the step without communication is the exposed communication; what the barrier takes is waiting
for the slower rank, which no exchange avoids. First, the parameters after some steps must be equal on all ranks and the
same on both sides. Then the calling thread's cost of each gradient is measured on tiny gradients.
"""
import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import models
import torch
from peers import gloo, own
from python_cost import Cost
from steps import ALONE, counted, measure, summary
from teams import Team, become_rank
from where import RESULTS, heading, surroundings

import lightcc.torch as hvd
from lightcc.core import lib
from lightcc.torch import ddp

BARRIER = "barrier"
GOAL_RATIO = 0.5
GOAL_COST_US = 3.0
CHECKED_STEPS = 5


# What runs on every rank

class Trainer:
    """A rank of one side. Step numbers go on from call to call."""

    def __init__(self, rank: int, size: int, side: str, name: str, folder: str, bucket_view: bool, hook: bool):
        torch.set_num_threads(1)
        self._rank, self._step = rank, 0
        self._side = side
        self._model = models.make(name)
        self._parameters = list(self._model.parameters())
        self._optimizer: Any = torch.optim.SGD(self._parameters, lr=1e-3)
        if side in (own.NAME, BARRIER):
            become_rank(rank, size, f"{folder}/{side}")
            hvd.init()
            if side == own.NAME and not hook:
                self._optimizer = hvd.DistributedOptimizer(self._optimizer, self._model.named_parameters())
        self._gloo = side == gloo.NAME or side == own.NAME and hook
        if self._gloo:
            gloo.init(rank, size, f"{folder}/gloo.{side}")
            self._model = torch.nn.parallel.DistributedDataParallel(self._model, gradient_as_bucket_view=bucket_view)
        if side == own.NAME and hook:
            self._model.register_comm_hook(None, ddp.comm_hook)

    def train(self, steps: int) -> float:
        """Seconds a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._model(self._rank, self._step).backward()
            if self._side == BARRIER:
                hvd.barrier()
            self._optimizer.step()
            self._step += 1
        return (time.perf_counter() - begin) / steps

    def parameters(self) -> Tuple[str, bytes]:
        """A digest of all parameters; from rank 0 also all of them, float32."""
        everything = torch.cat([p.detach().reshape(-1) for p in self._parameters]).numpy().tobytes()
        return hashlib.sha256(everything).hexdigest(), everything if self._rank == 0 else b""

    def counters(self) -> Dict[str, int]:
        return lib.counters()

    def end(self) -> None:
        hvd.shutdown()
        if self._gloo:
            gloo.shutdown()


class CostOnRank(Cost):
    """The cost of gradients on one rank; a world of one takes part in the exchange, too."""

    def __init__(self, rank: int, size: int, folder: str):
        torch.set_num_threads(1)
        become_rank(rank, size, folder)
        hvd.init()
        os.environ["HOROVOD_ELASTIC"] = "1"  # without it the optimizer of a world of one is a plain one
        super().__init__()

    def end(self) -> None:
        hvd.shutdown()


# One model

def compare(name: str, np: int, repeats: int, steps: int, bucket_view: bool, hook: bool) -> Dict[str, Any]:
    """Checks, then measures; the row of this model."""
    with tempfile.TemporaryDirectory() as folder:
        teams = {side: Team(side, np, Trainer, (side, name, folder, bucket_view, hook))
                 for side in (own.NAME, gloo.NAME, BARRIER, ALONE)}
        try:
            check(teams, name)
            for team in teams.values():
                team.ask("train", steps)  # warms up
            before = teams[own.NAME].ask("counters")[0]
            samples = measure(teams, repeats, steps)
            after = teams[own.NAME].ask("counters")[0]
        finally:
            for team in teams.values():
                team.end()
    found = summary(samples, own.NAME, gloo.NAME)
    return {"model": name, **found, "goal": f"<= {GOAL_RATIO:g} x DDP",
            "met": None if found["ratio"] is None else found["ratio"] <= GOAL_RATIO,
            "counters_of_rank_0_a_step": counted(before, after, repeats * steps),
            "samples_ms": {side: [1e3 * x for x in xs] for side, xs in samples.items()}}


def check(teams: Dict[str, Team], name: str) -> None:
    """AssertionError unless some steps leave equal parameters on all ranks and about the same on both sides."""
    trained = {}
    for side in (own.NAME, gloo.NAME):
        teams[side].ask("train", CHECKED_STEPS)
        answers = teams[side].ask("parameters")
        assert len({digest for digest, _ in answers}) == 1, f"{name}: {side}'s ranks differ in their parameters"
        trained[side] = torch.frombuffer(bytearray(answers[0][1]), dtype=torch.float32)
    torch.testing.assert_close(trained[own.NAME], trained[gloo.NAME], msg=lambda text: f"{name}: {text}")
    start = torch.cat([p.detach().reshape(-1) for p in models.make(name).parameters()])
    assert not torch.equal(start, trained[own.NAME]), f"{name}: nothing was learned"


# The cost of each gradient

def cost_of_gradients(np: int, repeats: int) -> Dict[str, Any]:
    """Medians in µs a parameter: the hook without its copy, and synchronize."""
    result = {}
    for size in (1, np):
        with tempfile.TemporaryDirectory() as folder:
            team = Team(f"cost of gradients, {size} ranks", size, CostOnRank, (folder,))
            try:
                samples = team.ask("measure", repeats)[0]
            finally:
                team.end()
        row = {part: 1e6 * statistics.median(xs) for part, xs in samples.items()}
        row["all but the copy"] = row["hook"] - row["copy"] + row["synchronize"]
        result[f"{size} ranks" if size > 1 else "1 rank"] = row
    return result


# What is printed

def head() -> str:
    return (f"{'model':<14}{'step alone':>11}{'lightcc':>9}{'DDP':>9}{'ratio':>7}{'exposed':>10}{'DDP':>9}"
            f"{'barrier':>9}{'ratio':>8}"
            f"  {'95 % interval':<16} {'goal':<13}{'':<8}{'collectives a step'}")


def line(row: Dict[str, Any]) -> str:
    def number(x: Optional[float]) -> str:
        return "inf" if x is None else f"{x:.3f}"

    step, exposed = row["step_ms"], row["exposed_ms"]
    verdict = {True: "ok", False: "MISSED", None: "noise"}[row["met"]]
    return (f"{row['model']:<14}{step[ALONE]:>11.2f}{step[own.NAME]:>9.2f}{step[gloo.NAME]:>9.2f}"
            f"{row['step_ratio']:>7.3f}{exposed[own.NAME]:>10.2f}{exposed[gloo.NAME]:>9.2f}"
            f"{step[BARRIER] - step[ALONE]:>9.2f}{number(row['ratio']):>8}"
            f"  {' to '.join(map(number, row['interval'])):<16} {row['goal']:<13}{verdict:<8}"
            f"{row['counters_of_rank_0_a_step']['collectives']:.1f}")


def cost_table(cost: Dict[str, Dict[str, float]]) -> str:
    lines = [f"{'µs a parameter':<16}" + "".join(f"{part:>18}" for part in next(iter(cost.values())))]
    lines += [f"{world:<16}" + "".join(f"{value:>18.2f}" for value in row.values()) for world, row in cost.items()]
    total = cost["1 rank"]["all but the copy"]
    verdict = "ok" if total <= GOAL_COST_US else "MISSED"
    return "\n".join(lines) + f"\nOn 1 rank all but the copy: goal <= {GOAL_COST_US:g} µs  {verdict}"


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks, 2 or more; default %(default)s")
    parser.add_argument("--models", nargs="*", choices=list(models.MODELS), default=list(models.MODELS),
                        help="default: all of them")
    parser.add_argument("--repeats", type=int, default=21, help="measurements of each side; default %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="steps a measurement; default %(default)s")
    parser.add_argument("--bucket-view", action="store_true", help="DistributedDataParallel copies less, too")
    parser.add_argument("--comm-hook", action="store_true", help="DistributedDataParallel on lightcc's side, too")
    parser.add_argument("--output", type=Path, default=RESULTS / "training.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args(arguments)
    if args.np < 2:
        parser.error("--np: one rank alone has nobody to send to")
    where = surroundings(args.np, [own.VERSION, gloo.VERSION])
    print(heading(where), flush=True)
    rows = []
    print(head(), flush=True)
    for name in args.models:
        rows.append(compare(name, args.np, args.repeats, args.steps, args.bucket_view, args.comm_hook))
        print(line(rows[-1]), flush=True)
    print(f"ms a step: median of {args.repeats} repeats of {args.steps} steps, slowest rank; results were checked.")
    cost = cost_of_gradients(args.np, 10 * args.repeats)
    print(cost_table(cost))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "rows": rows, "cost_us": cost}, indent=1, ensure_ascii=False))
    print(f"All samples: {args.output}")


if __name__ == "__main__":
    main()

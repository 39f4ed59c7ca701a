"""A rank of bench/amp.py: `amp_worker.py ROW OPTION...`; rank 0 prints what it found as JSON behind "found "."""
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import models
import numpy as np
import torch

import lightcc.torch as hvd
from lightcc.amp import Always, AnyOf, HoldAfterLearningRateChange, OnPlateau, Policy
from lightcc.core import lib

ROUNDS, WARM = 41, 5
DIGITS_STEPS, DIGITS_BATCH, DIGITS_RATE = 400, 64, 0.05


class Random(Policy):
    """What each rank draws for itself."""

    levels = ("float32", "bfloat16", "float16")

    def __init__(self) -> None:
        self._rng = np.random.default_rng(hvd.rank())

    def decide(self, state: Any) -> str:
        return str(self._rng.choice(self.levels, p=[0.1, 0.3, 0.6]))


class InTurns(Policy):
    """Each level for so many steps."""

    levels = ("float32", "bfloat16")

    def __init__(self, steps: int):
        self.steps = steps

    def decide(self, state: Any) -> str:
        return self.levels[state.step // self.steps % 2]


def digits(seed: int) -> Dict[str, float]:
    """The accuracy on the test images, by policy."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from digits import load, shard
    (x, labels), (test, test_labels) = ((torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(of).long())
                                        for images, of in load(seed))
    found = {}
    for name, policy in (("full", Always("float32")), ("bfloat16", Always("bfloat16")),
                         ("switching", AnyOf(OnPlateau(60, smoothing=20), HoldAfterLearningRateChange(40)))):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2, padding=1),
            torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(512, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=DIGITS_RATE, momentum=0.9),
                                             model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        precision = hvd.amp.MixedPrecision(optimizer, policy)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [DIGITS_STEPS // 2, DIGITS_STEPS * 3 // 4])
        for step in range(DIGITS_STEPS):
            mine = torch.from_numpy(shard(step, len(x), DIGITS_BATCH, seed, hvd.rank(), hvd.size()))
            optimizer.zero_grad()
            with precision:
                output = model(x[mine])
            precision.backward(torch.nn.functional.cross_entropy(output.float(), labels[mine]))
            precision.step()
            schedule.step()
        with torch.no_grad():
            found[name] = (model(test).argmax(1) == test_labels).float().mean().item()
        found[f"{name}, share of steps in bfloat16"] = precision.history().levels().count("bfloat16") / DIGITS_STEPS
    return found


def agreement(steps: int) -> Dict[str, Any]:
    """Whether all ranks had one level in each step, and in the end the same weights."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model.named_parameters())
    precision = hvd.amp.MixedPrecision(optimizer, Random())
    levels = []
    torch.manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        with precision:
            loss = (model(torch.randn(4, 4)) ** 2).mean()
        precision.backward(loss)
        precision.step()
        levels.append(Random.levels.index(precision.level))
    every = hvd.allgather(torch.tensor([levels]))
    weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).view(1, -1).view(torch.uint8))
    return {"ranks": hvd.size(), "steps": steps, "one level": bool((every == every[0]).all()),
            "weights equal": bool((weights == weights[0]).all()), "switches": len(precision.history().switches) - 1}


def time_waits(controller: Any, waits: List[float]) -> None:
    """Notes how long the core takes to hand out each vote when the step is over."""
    settle, finish = controller.settle, lib.finish

    def timed_finish(handle: int) -> None:
        begin = time.perf_counter()
        finish(handle)
        waits.append(time.perf_counter() - begin)

    def timed_settle() -> None:
        lib.finish = timed_finish
        settle()
        lib.finish = finish
    controller.settle = timed_settle


def cost(name: str) -> Dict[str, Any]:
    """Milliseconds of a step with and without lightcc.amp, in full precision, by turns, and the processor's time that
    is added, which other load changes less: by a policy of one level, which agrees once, and by one that votes in each
    step; what the step waits for the vote; and steps with a switch before each."""
    def made(policy: Any) -> Callable[[], Tuple[float, float]]:
        model = models.make(name)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
        precision = policy and hvd.amp.MixedPrecision(optimizer, policy)
        if precision and len(policy.levels) > 1:
            time_waits(precision._controller, waits)
        count = [0]

        def step() -> Tuple[float, float]:
            count[0] += 1
            begin, begin_cpu = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            if precision:
                with precision:
                    loss = model(hvd.rank(), count[0])
                precision.backward(loss)
                precision.step()
            else:
                model(hvd.rank(), count[0]).backward()
                optimizer.step()
            return time.perf_counter() - begin, time.process_time() - begin_cpu
        return step

    waits: List[float] = []
    sides = {"without": made(None), "Always(float32)": made(Always("float32")),
             "Always(bfloat16)": made(Always("bfloat16")), "votes for float32": made(InTurns(1 << 30)),
             "a switch a step": made(InTurns(1)), "a switch in 20": made(InTurns(20))}
    samples: Dict[str, List[float]] = {side: [] for side in sides}
    cpus: Dict[str, List[float]] = {side: [] for side in sides}
    order = list(sides)
    for round_ in range(WARM + ROUNDS * 2):
        for side in order:
            hvd.barrier()
            seconds, cpu = sides[side]()
            slowest = hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max).item()
            if round_ >= WARM:
                samples[side].append(1e3 * slowest)
                cpus[side].append(1e6 * cpu)
        order.append(order.pop(0))
    ms = {side: statistics.median(x) for side, x in samples.items()}
    mean = (ms["Always(float32)"] + ms["Always(bfloat16)"]) / 2
    by_level = [statistics.median(samples["a switch a step"][first::2]) for first in (0, 1)]

    def beside(side: str) -> Dict[str, float]:
        pairs = [*zip(samples[side], samples["without"])]
        return {f"{side} / without": statistics.median(a / b for a, b in pairs),
                f"{side} adds us": 1e3 * statistics.median(a - b for a, b in pairs),
                f"{side} adds processor us": statistics.median(cpus[side]) - statistics.median(cpus["without"])}
    return {"model": name, "ranks": hvd.size(), "ms": ms, **beside("Always(float32)"), **beside("votes for float32"),
            "wait for the vote us": 1e6 * statistics.median(waits),
            "switching / mean of both": statistics.mean(by_level) / mean}


def shapes(steps: int) -> Dict[str, Any]:
    """How many graphs torch.compile makes in so many steps, whose sizes differ by step and rank."""
    graphs = 0

    def backend(module: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    def made(dynamic: Any, padded: bool, distribute: bool) -> int:
        nonlocal graphs
        graphs = 0
        torch._dynamo.reset()
        model = torch.nn.Linear(5, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if distribute:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        forward = torch.compile(model, backend=backend, dynamic=dynamic)
        for size in np.random.default_rng(hvd.rank()).integers(5, 65, steps).tolist():
            optimizer.zero_grad()
            forward(torch.ones(1 << (size - 1).bit_length() if padded else size, 5)).sum().backward()
            optimizer.step()
        return graphs

    kinds = {"dynamic=False": (False, False), "by default": (None, False), "dynamic=True": (True, False),
             "padded to powers of two": (False, True)}
    return {"ranks": hvd.size(), "graphs": {kind: made(*how, True) for kind, how in kinds.items()},
            "without lightcc": {kind: made(*how, False) for kind, how in kinds.items()}}


ROWS: Dict[str, Callable[[str], Dict[str, Any]]] = {
    "digits": lambda seed: digits(int(seed)), "agreement": lambda steps: agreement(int(steps)), "cost": cost,
    "shapes": lambda steps: shapes(int(steps))}

if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    found = ROWS[sys.argv[1]](sys.argv[2])
    if hvd.rank() == 0:
        print("found " + json.dumps(found), flush=True)
    hvd.barrier()

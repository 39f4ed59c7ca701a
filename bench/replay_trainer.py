"""A rank of bench/replay.py: it trains a model whose computation is replayed from a trace; gradients are real."""
import json
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import cables
import torch
from peers import gloo, own
from shapes import MODELS, Shape
from teams import become_rank

import lightcc.torch as hvd
from lightcc.core import lib

ALONE, DDP, DELAYED = "alone", "DDP over gloo", "lightcc, delayed"
BUCKET_MB = 25  # DDP's default


class Trace(NamedTuple):
    """Shares of a step."""
    model: str
    forward: float
    ready: List[float]  # of each parameter, in the order of the model's

    @property
    def shapes(self) -> List[Shape]:
        return MODELS[self.model]()

    @property
    def nbytes(self) -> List[int]:
        """Of each gradient."""
        return [4 * torch.Size(shape).numel() for shape in self.shapes]


def read_trace(file: Path, model: str) -> Trace:
    found = json.loads(file.read_text())
    trace = Trace(model, found["forward"], found["ready"])
    if len(trace.ready) != len(trace.shapes) or not all(trace.forward <= share <= 1 for share in trace.ready):
        raise SystemExit(f"{file}: not the trace of a step of {model}")
    return trace


class Ready(torch.autograd.Function):
    """Passes its input on; in backward it waits until the weight's gradient is ready in the trace, and hands it on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, model: "Replayed", index: int) -> torch.Tensor:
        ctx.model, ctx.index, ctx.shape = model, index, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Any, ...]:
        return gradient, ctx.model.gradient(ctx.index, ctx.shape), None, None


class Replayed(torch.nn.Module):
    """The parameters of a model, which nobody reads, so that they take no memory. `step_s` is what a step takes.

    Its gradients lie in `memory`, each from the begin, and forward fills it while it would sleep anyway: to make a
    gradient takes nothing of the cores, which a GPU would not take either. The sides of a process share this memory.
    Each copies a gradient as soon as it gets it; what DDP puts there, after backward, is the mean, in all of them."""

    def __init__(self, trace: Trace, memory: torch.Tensor):
        super().__init__()
        self.trace, self.step_s, self._memory, self._begin = trace, 0.0, memory, 0.0
        self.weights = torch.nn.ParameterList(torch.empty(shape) for shape in trace.shapes)
        # Backward goes through the chain from its end.
        self._chain = sorted(range(len(self.weights)), key=lambda index: -trace.ready[index])

    def forward(self, value: float) -> torch.Tensor:
        self._begin = time.perf_counter()
        self._memory.fill_(value)
        x = torch.zeros((), requires_grad=True)
        for index in self._chain:
            x = Ready.apply(x, self.weights[index], self, index)
        self._wait(self.trace.forward)
        return x

    def gradient(self, index: int, shape: torch.Size) -> torch.Tensor:
        self._wait(self.trace.ready[index])
        return self._memory[:shape.numel()].view(shape)  # a tensor of its own, so autograd takes it and copies nothing

    def _wait(self, share: float) -> None:
        time.sleep(max(0.0, self._begin + share * self.step_s - time.perf_counter()))


class NoUpdate(torch.optim.SGD):
    """The update is a part of the computation, which is replayed."""

    def step(self, closure: Any = None) -> None:
        pass


class Trainer:
    """One process: it has the models of some sides, of lightcc, DDP and one without communication."""

    def __init__(self, rank: int, size: int, places: Sequence[cables.Place], sides: Sequence[str], folder: str,
                 secret: str, trace: Trace):
        become_rank(rank, size, folder)
        cables.settle(places[rank], secret)
        torch.set_num_threads(1)
        hvd.init()
        self._rank, self._size, self._step = rank, size, 0
        memory = torch.empty(max(trace.nbytes) // 4)
        self._modules = {side: Replayed(trace, memory) for side in sides}
        self._models: Dict[str, torch.nn.Module] = dict(self._modules)
        self._optimizers: Dict[str, torch.optim.Optimizer] = {
            side: NoUpdate(model.parameters(), lr=0.1) for side, model in self._modules.items()}
        self._optimizers[own.NAME] = hvd.DistributedOptimizer(self._optimizers[own.NAME],
                                                              self._modules[own.NAME].named_parameters())
        if DELAYED in sides:
            self._optimizers[DELAYED] = hvd.DelayedGradients(
                self._optimizers[DELAYED], named_parameters=self._modules[DELAYED].named_parameters())
        if DDP in sides:
            gloo.init(rank, size, f"{folder}/gloo")
            self._models[DDP] = torch.nn.parallel.DistributedDataParallel(
                self._modules[DDP], bucket_cap_mb=BUCKET_MB, init_sync=False)

    def train(self, side: str, steps: int, step_s: float) -> float:
        """Seconds a step, of which the computation takes step_s. With delayed gradients a step before these is not
        counted, whose exchange the first one waits for, nor the end of the last one's."""
        self._modules[side].step_s = step_s
        if side == DELAYED:
            self._make_step(side)
        begin = time.perf_counter()
        for _ in range(steps):
            self._make_step(side)
        seconds = (time.perf_counter() - begin) / steps
        if side == DELAYED:
            self._optimizers[side].state_dict()  # waits, so that the next side has the cables to itself
        return seconds

    def _make_step(self, side: str) -> None:
        self._step += 1
        self._optimizers[side].zero_grad()
        self._models[side](float(1 + self._rank + self._step % 3)).backward()
        self._optimizers[side].step()

    def check(self, side: str, step_s: float) -> None:
        """AssertionError unless every gradient is the mean over the ranks. Sums of these numbers are exact."""
        self.train(side, 1, step_s)
        mean = 1 + (self._size - 1) / 2 + (self._step - (side == DELAYED)) % 3
        for index, weight in enumerate(self._modules[side].weights):
            found = weight.grad
            assert found is not None and bool((found == mean).all()), f"{side}: gradient {index} is not {mean}: {found}"

    def counters(self) -> Dict[str, int]:
        return lib.counters()

    def stream(self, listens: int, sends: int, address: str) -> Optional[float]:
        return cables.stream(self._rank, listens, sends, address)

    def latency(self, listens: int, sends: int, address: str) -> Optional[float]:
        return cables.latency(self._rank, listens, sends, address)

    def end(self) -> None:
        if DDP in self._models:
            gloo.shutdown()
        hvd.shutdown()

"""What the calling thread spends on each gradient, measured on gradients so small that bytes do not count.

The hooks are called here, not by autograd, so that nothing else is in the time; they are the very ones that backward
calls. The copy, which every exchange needs, is measured on the same tensors and can be subtracted.
"""
import time
from typing import Callable, Dict, List

import models
import torch

import lightcc.torch as hvd
from lightcc.core import lib


class Cost:
    """Of a model of tiny parameters. After hvd.init()."""

    def __init__(self):
        self._model = models.make("tiny")
        self._parameters = list(self._model.parameters())
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._parameters, lr=1e-3))
        self._calls = [(hook, p) for p in reversed(self._parameters) for hook in p._post_accumulate_grad_hooks.values()]
        count = sum(p.numel() for p in self._parameters)
        memory = torch.frombuffer(lib.alloc(4 * count), dtype=torch.float32, count=count)
        self._slots = memory.split([p.numel() for p in self._parameters])

    def measure(self, repeats: int) -> Dict[str, List[float]]:
        """Seconds a parameter of each part, for each repeat."""
        self._once()
        samples = [self._once() for _ in range(repeats)]
        return {part: [sample[part] for sample in samples] for part in samples[0]}

    def _once(self) -> Dict[str, float]:
        gradients = [torch.ones_like(p) for p in self._parameters]
        with torch.no_grad():  # as in backward
            copy = self._timed(lambda: [slot.copy_(g) for slot, g in zip(self._slots, gradients)])
            self._optimizer.zero_grad()
            for p, gradient in zip(self._parameters, gradients):
                p.grad = gradient
            hvd.barrier()
            hook = self._timed(lambda: [hook(p) for hook, p in self._calls])
        synchronize = self._timed(self._optimizer.synchronize)
        return {"hook": hook, "copy": copy, "synchronize": synchronize}

    def _timed(self, function: Callable[[], object]) -> float:
        begin = time.perf_counter()
        function()
        return (time.perf_counter() - begin) / len(self._parameters)

"""Steps of an optimizer whose gradients are ready, dense and compressed: what multihost_sides.py asks its ranks to do
with --compression.
"""
from typing import Dict, List

import torch
from shapes import MODELS

import lightcc.torch as hvd

DENSE = "dense"
SHIFT = 4099  # each step's numbers are those of the step before, moved on: largest elements lie elsewhere


def compression_of(text: str):
    """dense, int8, topk:0.01 or topk16:0.01 (values as float16)."""
    kind, _, ratio = text.partition(":")
    if kind in ("topk", "topk16"):
        return hvd.Compression.topk(float(ratio), fp16=kind == "topk16")
    return {DENSE: hvd.Compression.none, "int8": hvd.Compression.int8()}[kind]


class Steps:
    """The gradients of a model, in an optimizer for each compression."""

    def __init__(self, rank: int, model: str):
        random = torch.Generator().manual_seed(1000 + rank)
        self._shapes = [torch.Size(shape) for shape in MODELS[model]()]
        self._source = torch.randn(sum(shape.numel() for shape in self._shapes), generator=random)
        self._optimizers: Dict[str, torch.optim.Optimizer] = {}

    def prepare(self, text: str) -> None:
        """The gradients of the next step."""
        if text not in self._optimizers:
            parameters = [(f"{text}.{i}", torch.nn.Parameter(torch.zeros(shape)))
                          for i, shape in enumerate(self._shapes)]
            self._optimizers[text] = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1), parameters,
                compression=compression_of(text), op=hvd.Sum)
        self._source = self._source.roll(SHIFT)
        for parameter, part in zip(self._parameters(text), self._parts()):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))

    def run(self, text: str) -> None:
        self._optimizers[text].synchronize()

    def check(self, text: str) -> None:
        """AssertionError unless what was received and what is left behind on all hosts is the sum of all gradients."""
        self.prepare(text)
        parameters = self._parameters(text)
        self.run(text)
        saved = self._optimizers[text].state_dict().get("lightcc_residuals", {"tensors": {}})["tensors"]
        for i, (parameter, part) in enumerate(zip(parameters, self._parts())):
            expected = hvd.allreduce(part.view_as(parameter), op=hvd.Sum)
            left = torch.zeros(parameter.numel())
            for piece in saved.get(f"{text}.{i}", {"pieces": ()})["pieces"]:
                left[piece["first"]:piece["first"] + len(piece["values"])] = piece["values"]
            left = hvd.allreduce(left.view_as(parameter), op=hvd.Sum)
            received = parameter.grad + left  # of the first step: nothing had been left behind
            torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-3)

    def _parameters(self, text: str) -> List[torch.nn.Parameter]:
        return [p for group in self._optimizers[text].param_groups for p in group["params"]]

    def _parts(self) -> List[torch.Tensor]:
        return list(self._source.split([shape.numel() for shape in self._shapes]))

"""What the checks of compression in the core share: a job on nodes, and an optimizer whose gradients are known.

Gradients are small integers, so that all sums are exact: what was delivered over the steps and what is left behind add
up to the dense sum, to the last bit.
"""
import os

import numpy as np
import torch

import lightcc.torch as hvd

SHAPES = {"a.weight": (128, 80), "b.weight": (80, 120), "odd.weight": (5, 43, 47),  # those that are compressed
          "a.bias": (4096,), "small.weight": (8, 8), "embed.weight": (64, 80)}
COMPRESSED = ("a.weight", "b.weight", "odd.weight")
_OURS = ("LIGHT_INTRA_SIZE", "LIGHT_TOPK_THRESHOLD", "LIGHT_TOPK_ALLREDUCE", "LIGHT_TOPK_RATIO", "LIGHT_TOPK_FP16",
         "LIGHTCC_FUSION")


def begin(intra, **knobs):
    """Another epoch, in which so many ranks of this host are a node; 0: all."""
    end()
    os.environ.update({"LIGHT_INTRA_SIZE": str(intra), "LIGHT_TOPK_THRESHOLD": "0", **knobs})
    hvd.init()


def end():
    hvd.shutdown()
    for name in _OURS:
        os.environ.pop(name, None)


def gradient(name, step, rank):
    """Of few large values and many small ones."""
    random = np.random.default_rng([step, rank, *name.encode()])
    values = random.integers(-3, 4, SHAPES[name])
    values[random.random(SHAPES[name]) < 0.02] *= 20
    return torch.from_numpy(values.astype(np.float32))


class Training:
    """Parameters of these names under an optimizer, and what their gradients have come to."""

    def __init__(self, compression, op=hvd.Sum, names=tuple(SHAPES), dtype=torch.float32, make=torch.optim.SGD,
                 process_set=hvd.global_process_set, **options):
        self.parameters = {name: torch.nn.Parameter(torch.zeros(SHAPES[name], dtype=dtype)) for name in names}
        self.optimizer = hvd.DistributedOptimizer(
            make(self.parameters.values(), lr=1.0), self.parameters.items(), compression=compression, op=op,
            process_set=process_set, **options)
        self.ranks = process_set.ranks
        self.step_number = 0
        self.delivered = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in names}
        self.dense = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in names}

    def backward(self, scale=1.0, edit=lambda name, values: values):
        self.optimizer.zero_grad()
        mine = {name: edit(name, gradient(name, self.step_number, hvd.rank())) for name in self.parameters}
        sum((p * (scale * mine[name]).to(p.dtype)).sum() for name, p in self.parameters.items()).backward()

    def step(self, scale=1.0, present=None, edit=lambda name, values: values):
        """One step; present: the ranks that have data."""
        self.backward(scale, edit)
        self.optimizer.synchronize()
        for name, p in self.parameters.items():
            self.delivered[name] += p.grad.double() / scale
            self.dense[name] += sum(gradient(name, self.step_number, rank) for rank in present or self.ranks)
        self.step_number += 1
        return self

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def grads(self):
        return torch.cat([p.grad.reshape(-1) for p in self.parameters.values()])

    def left(self, saved=None):
        """What is left behind on all nodes, by name; saved: of a checkpoint."""
        saved = saved or hvd.gather_residuals(self.optimizer) or {"tensors": {}}
        return {name: total_of(saved, name) for name in self.parameters}

    def expect_total(self, delivered=1.0, tolerance=0.0):
        """Nothing is lost. delivered: by how much the reduction has multiplied the sum."""
        for name, left in self.left().items():
            found = self.delivered[name] / delivered + left
            torch.testing.assert_close(found, self.dense[name], rtol=tolerance, atol=tolerance,
                                       msg=lambda text, name=name: f"{name}: {text}")

    def expect_equal_bits(self):
        every = hvd.allgather(self.grads().reshape(1, -1).view(torch.uint8))
        assert (every == every[0]).all()


def total_of(saved, name, part=0):
    """The sum over nodes of what was left behind of a tensor."""
    total = torch.zeros(int(np.prod(SHAPES[name])), dtype=torch.float64)
    for piece in saved["tensors"].get(name, {"pieces": []})["pieces"]:
        if piece["part"] == part:
            total[piece["first"]:piece["first"] + len(piece["values"])] += piece["values"].double()
    return total.reshape(SHAPES[name])

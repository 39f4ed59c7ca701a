"""A training step on a GPU with lightcc's DistributedOptimizer, with its hook for DistributedDataParallel, with
DistributedDataParallel alone, and with none of them: one rank, NCCL on all sides. bench/gpu.py starts it.

    python bench/gpu_step.py OUTPUT.json MEETING     MEETING: a file that does not exist, for torch.distributed

One rank has nobody to wait for: what is measured is what each adds to a step on the host and on the GPU.
"""
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from shapes import resnet50

import lightcc.torch as hvd
from lightcc.torch import ddp

LIGHTCC, HOOK, DDP, ALONE = "lightcc", "DDP, hook", "DDP", "alone"
GOAL = 1.05             # of DDP's step, at most
CHECKED_STEPS = 3
ALIKE = 0.05            # what these steps change may differ by so much of it: kernels are not all deterministic
ROUNDS, ROUND_S = 21, 0.2

Loss = Callable[[torch.nn.Module], torch.Tensor]


class Gradients(torch.nn.Module):
    """Parameters of any shapes, and hardly any work but that of making their gradients."""

    def __init__(self, shapes: List[Tuple[int, ...]]):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([torch.dot(p.view(-1), p.detach().view(-1)) for p in self.weights]).sum()


def gradients() -> Tuple[torch.nn.Module, Loss]:
    return Gradients(resnet50()), lambda model: model()


def transformer() -> Tuple[torch.nn.Module, Loss]:
    """The encoder of BERT-base without its embeddings: 12 layers, 85 million parameters, 16 sequences of 128."""
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    inputs = torch.randn(16, 128, 768, device="cuda")
    return (torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
            lambda model: model(inputs).float().square().mean())


def images() -> Tuple[torch.nn.Module, Loss]:
    import torchvision
    inputs = torch.randn(32, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.arange(32, device="cuda")
    return (torchvision.models.resnet50().to(memory_format=torch.channels_last),
            lambda model: torch.nn.functional.cross_entropy(model(inputs).float(), labels))


MODELS = {"transformer encoder, 85 M": transformer, "gradients of ResNet-50 alone": gradients}
if importlib.util.find_spec("torchvision"):
    MODELS["ResNet-50, 32 images"] = images


class Trainer:
    def __init__(self, side: str, make: Callable[[], Tuple[torch.nn.Module, Loss]]):
        torch.manual_seed(1)
        self.module, self._loss = make()
        self.module.cuda()
        self._model: Any = self.module
        self._optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        if side == LIGHTCC:
            self._optimizer = hvd.DistributedOptimizer(self._optimizer, self.module.named_parameters())
        elif side in (HOOK, DDP):
            self._model = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
            if side == HOOK:
                self._model.register_comm_hook(None, ddp.comm_hook)

    def train(self, steps: int) -> float:
        """Seconds a step."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = self._loss(self._model)
            loss.backward()
            self._optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


def compare(name: str) -> Dict[str, Any]:
    sides = {side: Trainer(side, MODELS[name]) for side in (LIGHTCC, HOOK, DDP, ALONE)}
    start = sides[ALONE].parameters()
    for side in sides.values():
        side.train(CHECKED_STEPS)
    learned = {side: trainer.parameters() - start for side, trainer in sides.items()}
    for side in (LIGHTCC, HOOK, DDP):
        off = ((learned[side] - learned[ALONE]).norm() / learned[ALONE].norm()).item()
        assert off < ALIKE, f"{name}: the steps of {side} differ by {off:.3f} of what is learned"
    for side in sides.values():
        side.train(5)
    steps = max(1, int(ROUND_S / sides[ALONE].train(5)))
    samples: Dict[str, List[float]] = {side: [] for side in sides}
    order = list(sides)
    for _ in range(ROUNDS):
        for side in order:
            samples[side].append(1e3 * sides[side].train(steps))
        order.append(order.pop(0))
    ratios = {side: statistics.median(ours / theirs for ours, theirs in zip(samples[side], samples[DDP]))
              for side in (LIGHTCC, HOOK)}
    return {"model": name, "steps_a_round": steps, "ms": {side: statistics.median(x) for side, x in samples.items()},
            "ratios": ratios, "goal": GOAL, "met": max(ratios.values()) <= GOAL, "samples_ms": samples}


def line(row: Dict[str, Any]) -> str:
    ratios = ", ".join(f"{side} {ratio:.3f}" for side, ratio in row["ratios"].items())
    return (f"{row['model']:<30}" + "".join(f"{side:>10} {ms:7.2f} ms" for side, ms in row["ms"].items())
            + f"   of DDP's: {ratios}  <= {row['goal']}  {'ok' if row['met'] else 'MISSED'}")


def main() -> None:
    output, meeting = sys.argv[1:]
    hvd.init()
    os.environ["HOROVOD_ELASTIC"] = "1"  # without it the optimizer of a world of one is a plain one
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(meeting, 1), rank=0, world_size=1,
                            device_id=torch.device("cuda", 0))
    rows, failed = [], False
    for name in MODELS:
        try:
            rows.append(compare(name))
            print(line(rows[-1]), flush=True)
        except (AssertionError, torch.cuda.OutOfMemoryError) as error:
            print(f"ERROR {name}: {error}", flush=True)
            failed = True
        torch.cuda.empty_cache()
    Path(output).write_text(json.dumps(rows))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    hvd.shutdown()
    sys.exit(failed)


if __name__ == "__main__":
    main()

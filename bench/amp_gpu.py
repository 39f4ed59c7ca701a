"""Mixed precision that switches, on a GPU: images or sequences a second of each level, and of a switch every 50 steps;
and memory over 1,000 switches.

    python bench/amp_gpu.py

One rank, synthetic data: a ResNet-50 (bench/networks.py) and a transformer of 85 million parameters. fp8 is measured if
Transformer Engine is installed. Switching must be within 3 % of the weighted mean of its two levels, and memory must
not grow. Takes less than 4 minutes on an H100.
"""
import importlib.util
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, Tuple

import networks
import torch
from amp_worker import InTurns

import lightcc.torch as hvd
from lightcc.amp import Always, Policy

STEPS, ROUNDS, EVERY, SWITCHES = 50, 3, 50, 1000
LARGEST_OFF, BATCH = 0.03, 64


def resnet50() -> Tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    inputs, labels = torch.randn(BATCH, 3, 224, 224, device="cuda"), torch.arange(BATCH, device="cuda")
    return networks.ResNet50(), lambda model: torch.nn.functional.cross_entropy(model(inputs).float(), labels)


def transformer() -> Tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    inputs = torch.randn(BATCH, 128, 768, device="cuda")
    return (torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
            lambda model: model(inputs).float().square().mean())


def training(make: Callable[[], Any], policy: Policy) -> Callable[[int], float]:
    """A function that makes steps, and returns samples a second."""
    torch.manual_seed(1)
    model, loss_of = make()
    model.cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    precision = hvd.amp.MixedPrecision(optimizer, policy, context=_fp8)

    def train(steps: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            with precision:
                loss = loss_of(model)
            precision.backward(loss)
            precision.step()
        torch.cuda.synchronize()
        return BATCH * steps / (time.perf_counter() - begin)
    return train


def _fp8() -> Any:
    from transformer_engine import pytorch
    return pytorch.fp8_autocast(enabled=True)


def compare(name: str, make: Callable[[], Any]) -> bool:
    levels = ["float32", "tf32", "bfloat16", "float16"]
    if importlib.util.find_spec("transformer_engine"):
        levels.append("fp8")
    sides = {level: training(make, Always(level)) for level in levels}
    sides["switching"] = training(make, InTurns(EVERY))
    samples: Dict[str, list] = {side: [] for side in sides}
    for train in sides.values():
        train(5)
    for _ in range(ROUNDS):
        for side, train in sides.items():
            samples[side].append(train(2 * EVERY if side == "switching" else STEPS))
    rate = {side: statistics.median(values) for side, values in samples.items()}
    mean = 2 / (1 / rate["float32"] + 1 / rate["bfloat16"])
    off = mean / rate["switching"] - 1
    print(f"{name}: " + ", ".join(f"{side} {value:.0f}/s" for side, value in rate.items())
          + f"; switching is {off:+.1%} slower than the weighted mean  {'ok' if off <= LARGEST_OFF else 'MISSED'}",
          flush=True)
    return off <= LARGEST_OFF


def memory() -> bool:
    """Of a small net that switches in every step."""
    def make() -> Any:
        x = torch.randn(32, 256, device="cuda")
        net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        return net, lambda model: model(x).float().square().mean()
    train = training(make, InTurns(1))
    train(20)
    before = torch.cuda.memory_allocated()
    train(SWITCHES)
    grown = torch.cuda.memory_allocated() - before
    print(f"memory after {SWITCHES} switches: {grown:+d} bytes  {'ok' if grown <= 0 else 'MISSED'}")
    return grown <= 0


if __name__ == "__main__":
    hvd.init()
    os.environ["HOROVOD_ELASTIC"] = "1"  # without it the optimizer of a world of one is a plain one
    met = [compare("ResNet-50", resnet50), compare("transformer, 85 M", transformer), memory()]
    sys.exit(0 if all(met) else 1)

"""Records when the gradients of a ResNet-50 become ready, for bench/replay.py.

    python bench/record_trace.py bench/resnet50_trace.json     # half a minute on quiet cores

A ResNet-50 (He et al. 2015, table 1) of torch.nn trains on random images on this CPU, without communication. A hook at
each parameter tells when its gradient is there. The trace has the medians over steps as shares of a step, from the
begin of forward to the last gradient: for each parameter when it is ready, and when forward ends.
"""
import argparse
import json
import statistics
import time
from pathlib import Path
from typing import List, Tuple

import torch
from shapes import resnet50
from where import heading, surroundings


class Bottleneck(torch.nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, projects: bool):
        super().__init__()
        self.narrow = convolution(width_in, width, 1, 1)
        self.middle = convolution(width, width, 3, stride)
        self.wide = convolution(width, 4 * width, 1, 1)
        self.shortcut = convolution(width_in, 4 * width, 1, stride) if projects else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.middle(torch.relu(self.narrow(x))))
        return torch.relu(self.wide(y) + self.shortcut(x))


class ResNet50(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 64, 7, 2)
        blocks, width_in = [], 64
        for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for block in range(count):
                blocks.append(Bottleneck(width_in, width, 2 if stage and block == 0 else 1, block == 0))
                width_in = 4 * width
        self.blocks = torch.nn.Sequential(*blocks)
        self.head = torch.nn.Linear(2048, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.stem(images)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def convolution(width_in: int, width: int, kernel: int, stride: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False),
                               torch.nn.BatchNorm2d(width))


def record(images: int, steps: int, threads: int) -> Tuple[float, List[float], List[float]]:
    """When forward ends and each gradient is ready, as shares of a step; and the seconds of each step."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    model, batch = ResNet50(), torch.randn(images, 3, 224, 224)
    labels = torch.arange(images)
    parameters = list(model.parameters())
    assert [tuple(p.shape) for p in parameters] == resnet50(), "these are not the parameters of a ResNet-50"
    ready = [0.0] * len(parameters)

    def note(index: int):
        def hook(_: torch.Tensor) -> None:
            ready[index] = time.perf_counter()
        return hook

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(note(index))
    forwards, shares, took = [], [], []
    for step in range(steps + 1):
        model.zero_grad()
        begin = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        forward = time.perf_counter() - begin
        loss.backward()
        if step:  # the first one warms up
            took.append(max(ready) - begin)
            forwards.append(forward / took[-1])
            shares.append([(moment - begin) / took[-1] for moment in ready])
    return statistics.median(forwards), [statistics.median(some) for some in zip(*shares)], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gets the trace")
    parser.add_argument("--images", type=int, default=8, help="a step; default %(default)s")
    parser.add_argument("--steps", type=int, default=7, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default %(default)s")
    args = parser.parse_args()
    where = heading(surroundings(1, [f"torch {torch.__version__}"]))
    forward, ready, took = record(args.images, args.steps, args.threads)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(json.dumps({
        "what": f"ResNet-50, {args.images} images of 224 x 224 a step, {args.threads} threads, medians of "
                f"{args.steps} steps; shares of a step from the begin of forward to the last gradient",
        "where": where, "step_s": round(statistics.median(took), 3), "forward": round(forward, 4),
        "ready": [round(share, 4) for share in ready]}).replace('", "', '",\n "') + "\n")
    print(f"{where}\nsteps of {min(took):.2f} to {max(took):.2f} s, forward {forward:.2f} of a step: {args.file}")


if __name__ == "__main__":
    main()

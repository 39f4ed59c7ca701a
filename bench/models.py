"""What bench/training.py trains: models that make gradients so fast that communication shows, and a small real one."""
import sys
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import torch
from shapes import TINY, Shape, resnet50

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from pytorch_synthetic_benchmark import mlp, resnet20  # noqa: E402  where examples are


class Quick(torch.nn.Module):
    """Parameters of any shapes. backward makes one gradient after the other, the last first, each in one pass over
    memory: the parameter times a number that differs between ranks and steps."""

    def __init__(self, shapes: List[Shape]):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        squares = [torch.dot(p.view(-1), p.detach().view(-1)) for p in self.weights]
        return torch.stack(squares).sum() * (1 + rank + step % 3)


class Convolutions(torch.nn.Module):
    """A small residual network on small images: 52 parameters, 2.8 million numbers, and honest work for each."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 3, padding=1)
        widths = [32, 32, 64, 64, 128, 128, 256, 256]
        self.blocks = torch.nn.ModuleList(self._block(a, b) for a, b in zip([32, *widths], widths))
        self.head = torch.nn.Linear(256, 10)

    @staticmethod
    def _block(width_in: int, width: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(
            torch.nn.Conv2d(width_in, width, 3, padding=1, stride=1 + (width != width_in), bias=False),
            torch.nn.GroupNorm(8, width), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, padding=1, bias=False),
            torch.nn.GroupNorm(8, width))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = self.stem(torch.randn(8, 3, 16, 16, generator=generator))
        for block in self.blocks:
            y = block(x)
            x = torch.relu(y + x if x.shape == y.shape else y)
        return torch.nn.functional.cross_entropy(self.head(x.mean((2, 3))), torch.arange(8) % 10)


class Images(torch.nn.Module):
    """A network of examples/pytorch_synthetic_benchmark.py, with a small batch of random images."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        images = torch.randn(8, 3, 32, 32, generator=generator)
        return torch.nn.functional.cross_entropy(self.network(images), torch.arange(8))


MODELS: Dict[str, Tuple[str, Callable[[], torch.nn.Module]]] = {
    "resnet50": ("gradients as large as ResNet-50's", lambda: Quick(resnet50())),
    "tiny": ("161 gradients of 16 numbers", lambda: Quick(TINY)),
    "convolutions": ("a small residual network", Convolutions),
    "resnet20": ("of examples/pytorch_synthetic_benchmark.py", lambda: Images(resnet20())),
    "mlp": ("of the same: large gradients for little work", lambda: Images(mlp())),
}


def make(name: str) -> torch.nn.Module:
    """The model, with the same parameters wherever it is made."""
    torch.manual_seed(1)
    return MODELS[name][1]()

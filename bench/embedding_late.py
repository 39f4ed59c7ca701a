"""What updates that come late cost a model, and what E.Pipeline's compensations give back.

    python bench/embedding_late.py          # two minutes

A planted problem: ids of users and items by Zipf's law, each with a row of 8 numbers that is known here; a rating is
the product of two rows and a little noise. The model learns such rows from batches of ratings. Printed is the mean
squared error of each batch before it is learned, over the last fifth of the steps, of which the noise alone is NOISE
squared: by optimizer and learning rate, on one rank, with one seed for all.
"""
import argparse
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from where import heading, surroundings

import lightcc.torch as hvd
from lightcc.torch import embedding as E

USERS, ITEMS, DIM, BATCH, NOISE = 2000, 500, 8, 64, 0.1
SIDES: List[Tuple[int, Optional[str]]] = [(0, None), (1, None), (1, "dc"), (1, "corr"), (2, None), (2, "dc"),
                                          (2, "corr")]
RATES: Dict[Any, Tuple[float, ...]] = {E.SGD: (0.5, 1.0, 2.0, 3.0, 4.0), E.Adagrad: (0.05, 0.1, 0.2, 0.4, 0.8)}


def batches(steps: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Users, items and ratings."""
    generator = np.random.default_rng(3)
    of_users, of_items = generator.normal(size=(USERS, DIM)), generator.normal(size=(ITEMS, DIM)) / DIM ** 0.5
    for _ in range(steps):
        users, items = (generator.zipf(1.2, BATCH) % count for count in (USERS, ITEMS))
        ratings = (of_users[users] * of_items[items]).sum(1) + NOISE * generator.normal(size=BATCH)
        yield torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(ratings)


def error(optimizer: Any, rate: float, depth: int, compensation: Optional[str], steps: int) -> float:
    """Infinite if the model diverges."""
    name = f"{optimizer.__name__} {rate} {depth} {compensation}"
    model = torch.nn.ModuleList([E.HashEmbedding(DIM, name=f"{one} {name}", dtype=torch.float64, init=E.Normal(0, 0.3))
                                 for one in ("user", "item")])
    sparse = E.Pipeline(optimizer(E.tables(model), lr=rate), depth, compensation)
    errors = []
    for users, items, ratings in batches(steps):
        of_users, of_items = E.lookup([(model[0], users), (model[1], items)])
        loss = ((of_users * of_items).sum(1) - ratings).square().mean()
        errors.append(loss.item())
        if not errors[-1] < 1e6:
            return float("inf")
        sparse.start()
        loss.backward()
        sparse.step()
    return float(np.mean(errors[-(steps // 5):]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    hvd.init()
    print(heading(surroundings(1, [f"torch {torch.__version__}"])))
    for optimizer, rates in RATES.items():
        print(f"\n| {optimizer.__name__}, lr | " + " | ".join(map(str, rates)) + " |")
        print("| --- |" + " --- |" * len(rates))
        for depth, compensation in SIDES:
            found = [error(optimizer, rate, depth, compensation, steps) for rate in rates]
            print(f"| depth {depth}, {compensation} | " + " | ".join(f"{one:.4f}" for one in found) + " |", flush=True)


if __name__ == "__main__":
    main()

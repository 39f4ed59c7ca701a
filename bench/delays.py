"""What gradients that come some steps late do to the loss, and whether compensation helps: handwritten digits, SGD.

    python bench/delays.py                        # one process, a minute; scikit-learn must be installed
    python bench/delays.py --delays 0 1 --lambdas 0 --seeds 5 --rate 0.03 --momentum 0.9

A perceptron learns scikit-learn's digits with hvd.DelayedGradients on one rank, where a delay means what it means on
many: each step applies the gradients of so many steps before. Printed is the loss on the training set at the end, mean
over the seeds. All batches are full ones: right after a step on the five examples that an epoch leaves over, the loss
would be that step's, which a delayed run has not made yet.
"""
import argparse
import statistics
from typing import List, Optional, Tuple

import torch
from sklearn.datasets import load_digits
from where import heading, surroundings, table_row

import lightcc
import lightcc.torch as hvd

BATCH, WIDTH = 64, 64


def data() -> Tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def loss_after(epochs: int, rate: float, momentum: float, delay: int, compensation: float, seed: int) -> float:
    """The loss on the training set after so many epochs; inf if it is not finite."""
    torch.manual_seed(seed)
    x, y = data()
    model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    optimizer = hvd.DelayedGradients(torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), delay,
                                     compensation)
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[:len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
    return loss if loss == loss else float("inf")


def main(given: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.0, 0.04, 0.4, 4.0])
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(given)
    hvd.init()
    print(heading(surroundings(1, [f"lightcc {lightcc.__version__}", f"torch {torch.__version__}"])))
    print(table_row("delay", *[f"lambda {factor:g}" for factor in args.lambdas]))
    print(table_row("---", *["---"] * len(args.lambdas)))
    for delay in args.delays:
        means = [statistics.mean(loss_after(args.epochs, args.rate, args.momentum, delay, factor, seed)
                                 for seed in range(args.seeds)) for factor in args.lambdas]
        print(table_row(str(delay), *[f"{mean:.3f}" for mean in means]), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

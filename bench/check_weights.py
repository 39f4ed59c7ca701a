"""What it costs to compare the ranks' weights (HOROVOD_CHECK_WEIGHTS), beside the training step that it belongs to.

    python bench/check_weights.py [--np 2] [--model resnet20] [--every 10]

Each repeat measures a step of DistributedOptimizer and a comparison of all parameters right behind it, in the same
processes, each as long as on the slowest rank; the medians, and what the comparison adds to a step if there is one
every so many.
"""
import argparse
import statistics
import tempfile
import time
from typing import List, Optional, Tuple

import models
import torch
from peers import own
from teams import Team, become_rank
from where import heading, surroundings

import lightcc.torch as hvd

GOAL = 0.01  # of a step


class Trainer:
    """A rank."""

    def __init__(self, rank: int, size: int, name: str, folder: str):
        torch.set_num_threads(1)
        self._rank, self._step = rank, 0
        become_rank(rank, size, folder)
        hvd.init()
        self._model = models.make(name)
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._model.parameters(), lr=1e-3),
                                                   self._model.named_parameters())
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)

    def train(self) -> Tuple[float, float]:
        """Seconds of a step, and of a comparison."""
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._rank, self._step).backward()
        self._optimizer.step()
        self._step += 1
        between = time.perf_counter()
        hvd.check_weights(self._model)
        return between - begin, time.perf_counter() - between

    def end(self) -> None:
        hvd.shutdown()


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks; default %(default)s")
    parser.add_argument("--model", choices=list(models.MODELS), default="resnet20", help="default %(default)s")
    parser.add_argument("--every", type=int, default=10, help="steps from one to the next; default %(default)s")
    parser.add_argument("--repeats", type=int, default=21, help="default %(default)s")
    args = parser.parse_args(arguments)
    print(heading(surroundings(args.np, [own.VERSION])), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        team = Team("check_weights", args.np, Trainer, (args.model, folder))
        try:
            team.ask("train")  # warms up
            repeats = [[max(times) for times in zip(*team.ask("train"))] for _ in range(args.repeats)]
        finally:
            team.end()
    step, comparison = (1e3 * statistics.median(times) for times in zip(*repeats))
    share = comparison / step / args.every
    print(f"{args.model}: {step:.2f} ms a step, {comparison:.2f} ms a comparison; every {args.every} steps: "
          f"{share:.4f} of a step, goal {GOAL:g}  {'ok' if share <= GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()

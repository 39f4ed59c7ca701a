"""What the digits examples share: data, their order, command line, and the comparison of a run with a reference.

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def load(seed, test_images=297):
    """Training and test set, each (images [n, 8, 8, 1] of float32 from -1 to 1, labels [n] of int32)."""
    data = load_digits()
    images, labels = data.images.astype(np.float32)[..., np.newaxis] / 8 - 1, data.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:test_images], order[test_images:]
    return (images[train], labels[train]), (images[test], labels[test])


def shard(step, images, batch, seed, rank, size):
    """Which images a rank sees in a step: its part of a slice of the epoch's permutation. It depends on nothing else,
    so any number of ranks sees the same global batch."""
    epoch, position = divmod(step, images // batch)
    order = np.random.default_rng(seed + 1 + epoch).permutation(images)
    return np.split(order[position * batch:(position + 1) * batch], size)[rank]


def outcome(settings, ranks, seconds, images, test_images, gradients, counted, losses, accuracies, **more):
    """What happened in a training. seconds, images: how long it took for how many; counted: what lightcc's counters
    counted meanwhile; losses: of each step; accuracies: [(step, accuracy)]."""
    steps = len(losses)
    return {"settings": settings, "ranks": ranks, "seconds": seconds, "images_per_second": images / seconds,
            "test_images": test_images, "gradients": gradients, "collectives_per_step": counted["collectives"] / steps,
            "fused_per_step": counted["fused_batches"] / steps, "losses": losses, "accuracies": accuracies, **more}


def report(run):
    print(f"test accuracy    {run['accuracies'][-1][1]:.2%} of {run['test_images']} images, after {len(run['losses'])} "
          "steps")
    print(f"speed            {run['images_per_second']:,.0f} images/s on {run['ranks']} rank(s), tests included")
    print(f"collectives      {run['collectives_per_step']:.2f} a step for {run['gradients']} gradients and the loss; "
          f"{run['fused_per_step']:.2f} of them carried several tensors")


def same(run, reference, bound):
    """Prints how far two loss curves are apart at most, relative to the larger loss; False if that is too far."""
    differences = [abs(a - b) / max(a, b) for a, b in zip(run["losses"], reference["losses"])]
    largest = max(differences)
    verdict = "same to float32 rounding" if largest <= bound else "DIFFERENT"
    print(f"{run['ranks']} rank(s) against {reference['ranks']}: {verdict}: losses of {len(differences)} steps differ "
          f"by at most {largest:.1e} (step {differences.index(largest) + 1}); bound {bound:.0e}")
    return largest <= bound


def arguments(description, folder, epochs, lr):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build", folder), metavar="DIR",
                        help="gets run.json, with the curves of loss and accuracy; default %(default)s")
    parser.add_argument("--reference", action="store_true",
                        help="repeat the run in DIR on one rank, its settings too; exit code 1 if the losses differ")
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training set; default %(default)s")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps, whatever --epochs says")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step; default %(default)s")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate a rank, at first; default %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="of weights, split and order; default %(default)s")
    return parser.parse_args()


def run(train, args, rank, size, bound, finish=lambda path, *runs: None):
    """Trains as asked for, and on rank 0 reports, writes run.json or reference.json and compares the two.

    train: a function (settings, workers, path) that returns what happened; workers: how many ranks' batches make a
    global batch; path: of what it writes, without suffix. bound: of the losses' difference. finish: what is to be done
    with a path and the runs, the reference last.
    """
    settings = {name: getattr(args, name) for name in ("epochs", "steps", "batch_size", "lr", "seed")}
    earlier = []
    if args.reference:
        if size > 1:
            sys.exit("--reference repeats a run in one process: start it without a launcher")
        earlier = [json.loads((args.output / "run.json").read_text())]
        settings = earlier[0]["settings"]
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / ("reference" if args.reference else "run")
    done = train(settings, earlier[0]["ranks"] if earlier else size, path)
    if rank != 0:
        return
    report(done)
    path.with_suffix(".json").write_text(json.dumps(done))
    finish(path, *earlier, done)
    print(f"curves           {path}.json")
    if earlier and not same(earlier[0], done, bound):
        sys.exit(1)

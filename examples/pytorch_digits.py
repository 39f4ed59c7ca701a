"""A small convolutional net learns to read handwritten digits, on as many processes as you like.

    lightccrun -np 2 python examples/pytorch_digits.py --output DIR
    python examples/pytorch_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
Plain `python` and `torchrun` start the script as well. For Horovod it would differ in the import and the counters.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from tqdm import tqdm

import lightcc.torch as hvd
from lightcc import _core  # the counters

TEST_IMAGES = 297
# Several processes add up a batch's gradients in another order than one does. In float32 that moves a loss by some
# 1e-7, and each step builds on the last: 2 to 4 ranks stayed within 1e-6 of one. Mistakes pass the bound: no broadcast
# at step 1, a sum for the average at step 2, the gradient of one bias that is lost on one rank at step 32.
LARGEST_DIFFERENCE = 2e-5  # of two losses, relative to the larger


class Net(torch.nn.Module):
    """Two convolutions, two layers. No batch norm: its statistics would depend on how the batch is sharded."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = torch.nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1)
        self.hidden = torch.nn.Linear(64 * 4 * 4, 128)
        self.digit = torch.nn.Linear(128, 10)

    def forward(self, images):
        features = F.gelu(self.conv2(F.gelu(self.conv1(images)))).flatten(1)
        return self.digit(F.gelu(self.hidden(features)))


def load(seed):
    """Training and test set, each (images, labels)."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def shard(step, images, batch, seed):
    """Which images this rank sees in this step: its part of a slice of the epoch's permutation. It depends on nothing
    else, so any number of ranks sees the same global batch."""
    epoch, position = divmod(step, images // batch)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed + epoch))
    return order[position * batch:(position + 1) * batch].chunk(hvd.size())[hvd.rank()]


class HookClock:
    """Time that lightcc's hooks spend in backward. Hooks run in the order of registration: start, lightcc's, stop."""

    def __init__(self):
        self.seconds = 0.0

    def start(self, parameter):
        self.seconds -= time.perf_counter()

    def stop(self, parameter):
        self.seconds += time.perf_counter()


def train(settings, workers):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    (images, labels), (test_images, test_labels) = load(settings["seed"])
    batch = settings["batch_size"] * workers
    steps_per_epoch = len(images) // batch
    steps = settings["steps"] or settings["epochs"] * steps_per_epoch

    torch.manual_seed(settings["seed"] + hvd.rank())  # every rank starts elsewhere, until rank 0 sends its parameters
    model, clock = Net(), HookClock()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clock.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"] * workers, momentum=0.9, weight_decay=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clock.stop)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)

    losses, accuracies = [], []
    before, begin = _core.counters(), time.perf_counter()
    progress = tqdm(range(1, steps + 1), unit="step", mininterval=1, disable=hvd.rank() != 0)
    for step in progress:
        mine = shard(step - 1, len(images), batch, settings["seed"])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], label_smoothing=0.1)
        loss.backward()  # sends each gradient as soon as it is ready
        optimizer.step()  # waits for the averages
        schedule.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())  # equal shards: the mean of the global batch

        if step % steps_per_epoch == 0 or step == steps:
            mine = slice(hvd.rank(), None, hvd.size())
            with torch.no_grad():
                right = (model(test_images[mine]).argmax(1) == test_labels[mine]).sum()
            accuracies.append((step, hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test_labels)))
            progress.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1][1]:.1%}", refresh=False)
    seconds = time.perf_counter() - begin
    done = {name: count - before[name] for name, count in _core.counters().items()}
    return {"ranks": hvd.size(), "settings": settings, "seconds": seconds, "images_per_second": steps * batch / seconds,
            "waiting": done["wait_ns"] * 1e-9 / seconds, "hooks": clock.seconds / seconds,
            "collectives_per_step": done["collectives"] / steps, "fused_per_step": done["fused_batches"] / steps,
            "accuracies": accuracies, "losses": losses}


def report(run):
    hooks, waiting, gradients = run["hooks"], run["waiting"], len(list(Net().parameters()))
    print(f"test accuracy    {run['accuracies'][-1][1]:.2%} of {TEST_IMAGES} images, after {len(run['losses'])} steps")
    print(f"speed            {run['images_per_second']:,.0f} images/s on {run['ranks']} rank(s), tests included")
    print(f"communication    {hooks + waiting:.1%} of rank 0's time: {hooks:.1%} in hooks, which copy and send "
          f"gradients; {waiting:.1%} waiting, for data or for a rank that still computes")
    print(f"collectives      {run['collectives_per_step']:.2f} a step for {gradients} gradients and the loss; "
          f"{run['fused_per_step']:.2f} of them carried several tensors")


def plot(path, *runs):
    import matplotlib
    matplotlib.use("Agg")  # draws into files, needs no screen
    from matplotlib import pyplot
    figure, loss = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    accuracy = loss.twinx()
    for run, style in zip(runs, ("-", "--")):
        label = f"{run['ranks']} rank(s)"
        loss.plot(range(1, len(run["losses"]) + 1), run["losses"], style, color=f"C{style == '--':d}", label=label)
        accuracy.plot(*zip(*run["accuracies"]), style, color="gray")
    loss.set(xlabel="step", ylabel="loss of the global batch", ylim=(0, None))
    accuracy.set(ylabel="test accuracy (gray)", ylim=(0, 1))
    loss.legend(loc="center right")
    figure.savefig(path, dpi=120)


def same(run, reference):
    """Prints how far two loss curves are apart at most; False if that is too far."""
    differences = [abs(a - b) / max(a, b) for a, b in zip(run["losses"], reference["losses"])]
    largest = max(differences)
    verdict = "same to float32 rounding" if largest <= LARGEST_DIFFERENCE else "DIFFERENT"
    print(f"{run['ranks']} rank(s) against {reference['ranks']}: {verdict}: losses of {len(differences)} steps differ "
          f"by at most {largest:.1e} (step {differences.index(largest) + 1}); bound {LARGEST_DIFFERENCE:.0e}")
    return largest <= LARGEST_DIFFERENCE


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/digits"), metavar="DIR",
                        help="gets run.json and run.png (curves of loss and accuracy); default %(default)s")
    parser.add_argument("--reference", action="store_true",
                        help="repeat the run in DIR on one rank, its settings too; exit code 1 if the losses differ")
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training set; default %(default)s")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps, whatever --epochs says")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step; default %(default)s")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate a rank, at first; default %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="of parameters, split and order; default %(default)s")
    return parser.parse_args()


def main():
    args = arguments()
    settings = {name: getattr(args, name) for name in ("epochs", "steps", "batch_size", "lr", "seed")}
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    if args.reference:
        if hvd.size() > 1:
            sys.exit("--reference repeats a run in one process: start it without a launcher")
        earlier = json.loads((args.output / "run.json").read_text())
        settings = earlier["settings"]
    run = train(settings, workers=earlier["ranks"] if args.reference else hvd.size())
    if hvd.rank() != 0:
        return
    report(run)
    args.output.mkdir(parents=True, exist_ok=True)
    name = "reference" if args.reference else "run"
    (args.output / f"{name}.json").write_text(json.dumps(run))
    plot(args.output / f"{name}.png", *([earlier, run] if args.reference else [run]))
    print(f"curves           {args.output / name}.png, {args.output / name}.json")
    if args.reference and not same(earlier, run):
        sys.exit(1)


if __name__ == "__main__":
    main()

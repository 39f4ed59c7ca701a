"""A small convolutional net learns to read handwritten digits, on as many processes as you like.

    lightccrun -np 2 python examples/pytorch_digits.py --output DIR
    python examples/pytorch_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats on one process what the first
did on two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
Plain `python` and `torchrun` start it as well. A script for horovod.torch differs in the import alone.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from sklearn.datasets import load_digits
from tqdm import tqdm

import lightcc.torch as hvd
from lightcc import _core  # for the counters of the report; training needs no more than hvd

TEST_IMAGES = 297
# One process adds the gradients of a batch in another order than several do. In float32 that moves a loss by about 1e-7
# at once, and training on doubles such a difference now and then: 1 to 4 processes came out at most 6e-6 apart. A
# forgotten rank, a factor that is wrong or one image in the wrong place shows as 1e-2 within a few steps.
LARGEST_DIFFERENCE = 1e-4  # relative to the larger of the two losses


class Net(torch.nn.Module):
    """Two convolutions, two layers. Smooth and without batch norm, whose statistics would depend on the batch's shards."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden, self.digit = torch.nn.Linear(32 * 4 * 4, 64), torch.nn.Linear(64, 10)

    def forward(self, images):
        features = F.gelu(self.conv2(F.gelu(self.conv1(images)))).flatten(1)
        return self.digit(F.gelu(self.hidden(features)))


def digits(seed):
    """Training and test set, each (images, labels)."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return (images[train], labels[train]), (images[test], labels[test])


def shard(step, images, batch, seed):
    """Which images this rank sees in this step: its part of a slice of the epoch's permutation. No state, so that any
    number of ranks sees the same global batch."""
    epoch, position = divmod(step, images // batch)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed + epoch))
    return order[position * batch:(position + 1) * batch].chunk(hvd.size())[hvd.rank()]


class HookClock:
    """The time that lightcc's hooks spend in backward: our hooks run before and after them, in order of registration."""

    def __init__(self):
        self.seconds = 0.0

    def start(self, parameter):
        self.seconds -= time.perf_counter()

    def stop(self, parameter):
        self.seconds += time.perf_counter()


def train(args, workers):
    """Trains, and returns on every rank the losses, accuracies and costs. workers: ranks of the run to be repeated."""
    torch.manual_seed(args.seed + hvd.rank())  # ranks start differently until the broadcast below
    (images, labels), (test_images, test_labels) = digits(args.seed)
    batch = args.batch_size * workers
    steps_per_epoch = len(images) // batch
    steps = min(args.epochs * steps_per_epoch, args.steps or sys.maxsize)

    model = Net()
    parameters, clock = list(model.parameters()), HookClock()
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(clock.start)
    optimizer = torch.optim.SGD(parameters, lr=args.lr * workers, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(clock.stop)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses, accuracies, seconds, before = [], [], 0.0, _core.counters()
    waited_ns = 0
    for step in tqdm(range(steps), unit="step", disable=hvd.rank() != 0, mininterval=0.5):
        begin = time.perf_counter()
        mine = shard(step, len(images), batch, args.seed)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())  # shards are equal: the global batch's mean
        seconds += time.perf_counter() - begin

        if (step + 1) % steps_per_epoch == 0 or step + 1 == steps:
            mine = slice(hvd.rank(), None, hvd.size())
            with torch.no_grad():
                right = (model(test_images[mine]).argmax(1) == test_labels[mine]).sum()
            accuracies.append((step + 1, hvd.allreduce(right, op=hvd.Sum).item() / len(test_labels)))
    done = {name: value - before[name] for name, value in _core.counters().items()}
    return {
        "ranks": hvd.size(), "settings": vars(args), "losses": losses, "accuracies": accuracies,
        "images_per_second": steps * batch / seconds,
        "waiting_share": done["wait_ns"] * 1e-9 / seconds, "hooks_share": clock.seconds / seconds,
        "collectives_per_step": done["collectives"] / steps, "fused_per_step": done["fused_batches"] / steps,
    }

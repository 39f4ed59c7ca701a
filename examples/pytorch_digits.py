"""A small convolutional net learns to read handwritten digits, on as many processes as you like.

    lightccrun -np 2 python examples/pytorch_digits.py --output DIR
    python examples/pytorch_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
Plain `python` and `torchrun` start the script as well. For Horovod it would differ in the import and the counters.
"""
import time

import torch
from torch.nn import functional as F
from tqdm import tqdm

import digits
import lightcc.torch as hvd
from lightcc.core import lib  # the counters

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


def tensors(images, labels):
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()


class HookClock:
    """Time that lightcc's hooks spend in backward. Hooks run in the order of registration: start, lightcc's, stop."""

    def __init__(self):
        self.seconds = 0.0

    def start(self, parameter):
        self.seconds -= time.perf_counter()

    def stop(self, parameter):
        self.seconds += time.perf_counter()


def train(settings, workers, path):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    train_set, test_set = digits.load(settings["seed"])
    (images, labels), (test_images, test_labels) = tensors(*train_set), tensors(*test_set)
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
    before, begin = lib.counters(), time.perf_counter()
    progress = tqdm(range(1, steps + 1), unit="step", mininterval=1, disable=hvd.rank() != 0)
    for step in progress:
        mine = digits.shard(step - 1, len(images), batch, settings["seed"], hvd.rank(), hvd.size())
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
    counted = {name: count - before[name] for name, count in lib.counters().items()}
    return digits.outcome(settings, hvd.size(), seconds, steps * batch, len(test_labels),
                          len(list(model.parameters())), counted, losses, accuracies,
                          waiting=counted["wait_ns"] * 1e-9 / seconds, hooks=clock.seconds / seconds)


def finish(path, *runs):
    """Says what communication took, and draws the curves."""
    hooks, waiting = runs[-1]["hooks"], runs[-1]["waiting"]
    print(f"communication    {hooks + waiting:.1%} of rank 0's time: {hooks:.1%} in hooks, which copy and send "
          f"gradients; {waiting:.1%} waiting, for data or for a rank that still computes")
    plot(path.with_suffix(".png"), *runs)


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


def main():
    args = digits.arguments(__doc__, "digits", epochs=25, lr=0.02)
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    digits.run(train, args, hvd.rank(), hvd.size(), LARGEST_DIFFERENCE, finish)


if __name__ == "__main__":
    main()

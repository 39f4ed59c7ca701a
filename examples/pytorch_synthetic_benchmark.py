"""How many images a second a network trains on, with random data: nothing but training and communication counts.

    lightccrun -np 2 python examples/pytorch_synthetic_benchmark.py
    lightccrun -np 2 python examples/pytorch_synthetic_benchmark.py --model mlp --batch-size 64 --fp16-allreduce

The flags are those that Horovod's users know from its synthetic benchmarks. resnet20 and mlp are defined here and take
images of 32 x 32; any other name is looked up in torchvision, if it is installed, with images of 224 x 224.
For Horovod the script would differ in the import only.
"""
import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

import lightcc.torch as hvd

CLASSES = 10


class Block(nn.Module):
    """Two convolutions and a way around them (He et al. 2015)."""

    def __init__(self, width_in, width):
        super().__init__()
        stride = 1 if width_in == width else 2
        self.first = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x):
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.around(x))


def resnet20():
    """Nine blocks in three widths: 272,282 parameters in 61 tensors."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(width_in, width) for width_in, width in zip(widths, widths[1:])]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def mlp():
    """Three wide layers: many parameters for little work, so that communication shows."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                         nn.Linear(1024, CLASSES))


MODELS = {"resnet20": resnet20, "mlp": mlp}


def make(name):
    """The network, and the width of the images that it takes."""
    if name in MODELS:
        return MODELS[name](), 32
    try:
        from torchvision import models
    except ImportError:
        raise SystemExit(f"--model {name}: there are {', '.join(MODELS)}; for others install torchvision.") from None
    if not hasattr(models, name):
        raise SystemExit(f"--model {name}: torchvision has no such model.")
    return getattr(models, name)(), 224


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20", help="resnet20, mlp or one of torchvision; default %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and batch; default %(default)s")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="to warm up; default %(default)s")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="a measurement; default %(default)s")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements; default %(default)s")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps with Adasum instead of gradients")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even if there is a GPU")
    return parser.parse_args()


def main():
    args = parse()
    hvd.init()
    torch.set_num_threads(1)
    device, kind = torch.device("cpu"), "CPU"
    if torch.cuda.is_available() and not args.no_cuda:
        device, kind = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()), "GPU"
        torch.cuda.set_device(device)
    model, width = make(args.model)
    model = model.to(device)
    rate = 0.01 if args.use_adasum else 0.01 * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(args.batch_size, 3, width, width, device=device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=device)

    def train(batches):
        """Seconds."""
        begin = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if kind == "GPU":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    say(f"Model: {args.model}\nBatch size: {args.batch_size}\nNumber of {kind}s: {hvd.size()}")
    train(args.num_warmup_batches)
    speeds = []
    for i in range(args.num_iters):
        speeds.append(args.batch_size * args.num_batches_per_iter / train(args.num_batches_per_iter))
        say(f"Iter #{i}: {speeds[-1]:.1f} img/sec per {kind}")
    of_all = hvd.allgather(torch.tensor([speeds]), name="speeds")  # a row for each rank
    for what, values in ((f"Img/sec per {kind}", of_all.mean(0)),
                         (f"Total img/sec on {hvd.size()} {kind}(s)", of_all.sum(0))):
        say(f"{what}: {values.mean():.1f} +-{1.96 * values.std(correction=0):.1f}")


if __name__ == "__main__":
    main()

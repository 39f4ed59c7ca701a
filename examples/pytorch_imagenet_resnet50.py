"""ResNet-50 on ImageNet, with the learning rates of Goyal et al. 2017: as many ranks as there are GPUs, or on CPUs.

    lightccrun -np 8 -H node1:4,node2:4 python examples/pytorch_imagenet_resnet50.py --train-dir DIR --val-dir DIR
    lightccrun -np 2 python examples/pytorch_imagenet_resnet50.py --synthetic 64 --image-size 64 --epochs 2

The flags are mostly those of Horovod's example; --synthetic N trains on N random images a rank: nothing is downloaded,
and torchvision is not needed. A checkpoint of each epoch is in --checkpoint-folder, where the next start goes on. For
Horovod the script would differ in the import only.
"""
import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lightcc.torch as hvd

CLASSES = 1000


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a way around them (He et al. 2015)."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        width_out = 4 * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width_out, 1, bias=False), nn.BatchNorm2d(width_out))
        nn.init.zeros_(self.convolutions[-1].weight)  # each block begins as the way around it
        self.around = nn.Identity() if width_in == width_out else nn.Sequential(
            nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out))

    def forward(self, x):
        return torch.relu(self.convolutions(x) + self.around(x))


def resnet50():
    """25,557,032 parameters in 161 tensors."""
    layers = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(width_in, width, 2 if block == 0 and width > 64 else 1))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, CLASSES))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-dir", type=Path, help="a folder for each class, in it images; needs torchvision")
    parser.add_argument("--val-dir", type=Path, help="the same, for validation")
    parser.add_argument("--synthetic", type=int, default=0, metavar="N", help="random images a rank, in place of files")
    parser.add_argument("--image-size", type=int, default=224, help="width of the images; default %(default)s")
    parser.add_argument("--checkpoint-folder", type=Path,
                        help="default build/imagenet, with random images build/imagenet-synthetic")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--batches-per-allreduce", type=int, default=1,
                        help="batches whose gradients a rank adds up before they travel; default %(default)s")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps with Adasum instead of gradients")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and batch; default %(default)s")
    parser.add_argument("--val-batch-size", type=int, default=32, help="images a rank and batch; default %(default)s")
    parser.add_argument("--epochs", type=int, default=90, help="default %(default)s")
    parser.add_argument("--base-lr", type=float, default=0.0125, help="for one rank's batch; default %(default)s")
    parser.add_argument("--warmup-epochs", type=float, default=5, help="until all ranks' rate; default %(default)s")
    parser.add_argument("--momentum", type=float, default=0.9, help="default %(default)s")
    parser.add_argument("--wd", type=float, default=5e-5, help="weight decay; default %(default)s")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even if there is a GPU")
    parser.add_argument("--seed", type=int, default=42, help="default %(default)s")
    args = parser.parse_args()
    if not args.synthetic and not (args.train_dir and args.val_dir):
        parser.error("give --train-dir and --val-dir, or --synthetic N")
    if not args.checkpoint_folder:
        args.checkpoint_folder = Path("build", "imagenet-synthetic" if args.synthetic else "imagenet")
    return args


def data_of(args, training):
    """Batches of this rank's part, and what shuffles them."""
    if args.synthetic:
        random = torch.Generator().manual_seed(args.seed + training)
        count = args.synthetic * hvd.size() if training else args.val_batch_size * hvd.size()
        data = torch.utils.data.TensorDataset(
            torch.randn(count, 3, args.image_size, args.image_size, generator=random),
            torch.randint(CLASSES, (count,), generator=random))
    else:
        from torchvision import datasets
        from torchvision import transforms as T
        normal = [T.ToTensor(), T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
        cut = ([T.RandomResizedCrop(args.image_size), T.RandomHorizontalFlip()] if training else
               [T.Resize(args.image_size * 8 // 7), T.CenterCrop(args.image_size)])
        data = datasets.ImageFolder(args.train_dir if training else args.val_dir, T.Compose([*cut, *normal]))
    sampler = torch.utils.data.distributed.DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=training)
    batch = args.batch_size * args.batches_per_allreduce if training else args.val_batch_size
    return torch.utils.data.DataLoader(data, batch, sampler=sampler, num_workers=0 if args.synthetic else 4,
                                       pin_memory=not args.no_cuda and torch.cuda.is_available(),
                                       drop_last=training), sampler


def rate_of(args, epoch):
    """The learning rate at a moment, in epochs: of all ranks' batches after a linear warm-up, a tenth from epochs 30,
    60 and 80 on. Adasum adds up steps itself, so it takes the rate of one rank."""
    ranks = 1 if args.use_adasum else hvd.size()
    most = args.base_lr * args.batches_per_allreduce * ranks
    if epoch < args.warmup_epochs:
        return most * (1 + epoch * (ranks - 1) / args.warmup_epochs) / ranks
    return most * 0.1 ** sum(epoch >= end for end in (30, 60, 80))


class Mean:
    """Of a number over all batches of all ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, torch.zeros(()), 0

    def add(self, value):
        self.sum, self.count = self.sum + value.detach().float().cpu(), self.count + 1

    def result(self):
        return hvd.allreduce(self.sum / max(self.count, 1), name=self.name).item()


def right(output, labels):
    return (output.argmax(1) == labels).float().mean()


def main():
    args = parse()
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    (batches, sampler), (tests, _) = data_of(args, True), data_of(args, False)
    if not len(batches):
        raise SystemExit(f"Each rank has {len(sampler)} images, and a batch of it has "
                         f"{args.batch_size * args.batches_per_allreduce}: give more images or a smaller --batch-size.")
    model = resnet50().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.base_lr, args.momentum, weight_decay=args.wd),
        named_parameters=model.named_parameters(), backward_passes_per_step=args.batches_per_allreduce,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average)

    args.checkpoint_folder.mkdir(parents=True, exist_ok=True)
    done = sorted(args.checkpoint_folder.glob("epoch-*.pt")) if hvd.rank() == 0 else []
    begin = hvd.broadcast_object(int(done[-1].stem[6:]) if done else 0, 0, name="begin")  # rank 0 alone may see files
    if done:
        print(f"goes on from {done[-1]}" if begin < args.epochs else f"all {args.epochs} epochs are done: {done[-1]}")
        saved = torch.load(done[-1], map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(begin, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        loss_of, right_of = Mean("train loss"), Mean("train accuracy")
        for i, (images, labels) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(args, epoch + i / len(batches))
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            for some, of in zip(images.split(args.batch_size), labels.split(args.batch_size)):
                output = model(some)
                loss = F.cross_entropy(output, of)
                (loss * len(of) / len(labels)).backward()
                loss_of.add(loss)
                right_of.add(right(output, of))
            optimizer.step()
        model.eval()
        test_loss, test_right = Mean("validation loss"), Mean("validation accuracy")
        with torch.no_grad():
            for images, labels in tests:
                output, labels = model(images.to(device)), labels.to(device)
                test_loss.add(F.cross_entropy(output, labels))
                test_right.add(right(output, labels))
        found = [mean.result() for mean in (loss_of, right_of, test_loss, test_right)]
        if hvd.rank() == 0:
            print("epoch {}: loss {:.3f}, {:.1%} right; validation loss {:.3f}, {:.1%} right; rate {:.4f}".format(
                epoch + 1, *found, optimizer.param_groups[0]["lr"]), flush=True)
            path = args.checkpoint_folder / f"epoch-{epoch + 1:03}.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # so that a checkpoint is always whole


if __name__ == "__main__":
    main()

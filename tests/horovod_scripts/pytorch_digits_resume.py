"""Warm-up, checkpoints and resumption: a PyTorch script for Horovod, in the way that Horovod's documentation shows.

    horovodrun -np 2 python pytorch_digits_resume.py --checkpoint-format 'checkpoint-{epoch}.pt'
"""
import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data
import torch.utils.data.distributed
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="PyTorch digits with Horovod, which can be resumed")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pt", help="checkpoint file format")
parser.add_argument("--batches-per-allreduce", type=int, default=1,
                    help="number of batches processed locally before executing allreduce across workers")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.02, help="learning rate for a single worker")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--decay-epoch", type=int, default=4, help="epoch from which the rate is a tenth")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

hvd.init()
torch.manual_seed(args.seed + hvd.rank())
torch.set_num_threads(1)
verbose = hvd.rank() == 0
allreduce_batch_size = args.batch_size * args.batches_per_allreduce

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

# Horovod: broadcast resume_from_epoch from rank 0 (which will have checkpoints) to other ranks.
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

digits = load_digits()
train_dataset = torch.utils.data.TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16,
                                               torch.tensor(digits.target))
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler,
                                           drop_last=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

# Horovod: scale learning rate by the number of workers. Gradient accumulation: scale it by batches_per_allreduce.
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
                      momentum=args.momentum, weight_decay=args.wd)

# Horovod: wrap optimizer with DistributedOptimizer.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     backward_passes_per_step=args.batches_per_allreduce)

# Restore from a previous checkpoint, if resume_from_epoch is set.
# Horovod: restore on the first worker which will broadcast weights to other workers.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


# Horovod: average metrics from distributed training.
class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.)
        self.n = torch.tensor(0.)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


# Horovod: using `lr = base_lr * hvd.size()` from the very beginning leads to worse final accuracy. Scale the learning
# rate `lr = base_lr` ---> `lr = base_lr * hvd.size()` during the first epochs.
def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1. / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1. if epoch < args.decay_epoch else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def accuracy(output, target):
    return output.max(1, keepdim=True)[1].eq(target.view_as(output[:, :1])).float().mean()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    train_accuracy = Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        # Split data into sub-batches of size batch_size.
        for i in range(0, len(data), args.batch_size):
            data_batch = data[i:i + args.batch_size]
            target_batch = target[i:i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            # Average gradients among sub-batches.
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        # Gradient is applied across all ranks.
        optimizer.step()
    if verbose:
        print(f"Epoch {epoch + 1} of {args.epochs}: loss {train_loss.avg.item():.9g} "
              f"accuracy {train_accuracy.avg.item():.4f} lr {optimizer.param_groups[0]['lr']:.6g}")


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


if verbose:
    print(f"Starts from epoch {resume_from_epoch} of {args.epochs}")
for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    save_checkpoint(epoch)

print(f"Rank {hvd.rank()} lr {optimizer.param_groups[0]['lr']:.6g} momentum "
      f"{sum(state['momentum_buffer'].double().sum().item() for state in optimizer.state.values()):.12g} parameters "
      f"{sum(parameter.double().sum().item() for parameter in model.parameters()):.12g}")

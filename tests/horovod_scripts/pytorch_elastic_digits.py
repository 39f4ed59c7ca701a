"""A net learns handwritten digits while workers come and go: a PyTorch script for Horovod's elastic training, in the
way that Horovod's documentation shows.

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python pytorch_elastic_digits.py
"""
import argparse
import hashlib

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Elastic PyTorch digits with Horovod")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--batches-per-commit", type=int, default=2)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()

torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train_dataset = torch.utils.data.TensorDataset(images[:-300], labels[:-300])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

# Horovod: initialize library.
hvd.init()

# Horovod: use an elastic sampler, which partitions what is left of the data among the workers.
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)

# Horovod: scale the learning rate by the number of workers, and wrap the optimizer.
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    # Horovod: the state says where to go on.
    while state.epoch < args.epochs:
        state.model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            optimizer.step()
            # Horovod: note which part of the data has been seen, and commit now and then.
            state.train_sampler.record_batch(batch_idx, args.batch_size)
            state.batch = batch_idx
            if batch_idx % args.batches_per_commit == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch} workers {hvd.size()} loss {loss.item():.4f}", flush=True)
        state.epoch += 1
        state.train_sampler.set_epoch(state.epoch)
        state.batch = 0
        state.commit()


def on_state_reset():
    # Horovod: the number of workers has changed, and the learning rate with it.
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

with torch.no_grad():
    accuracy = (model(images[-300:]).argmax(dim=1) == labels[-300:]).float().mean().item()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"Rank {hvd.rank()} of {hvd.size()} parameters: {digest}", flush=True)
if hvd.rank() == 0:
    print(f"Test accuracy: {100 * accuracy:.2f}%", flush=True)

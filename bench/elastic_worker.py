"""A worker of bench/elastic.py and elastic_timeline.py: steps of a small model for ever, each committed; rank 0 says
when each was done. Its argument: the seconds that a step takes beside the processor's time."""
import sys

import torch
from elastic_steps import steps_for_ever

import lightcc.torch as hvd

DEVICE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.005

torch.set_num_threads(1)
# What takes time comes before init(), from which on the others count on a newcomer: the first optimizer of a process
# takes more than a second.
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, goals = torch.randn(32, 64), torch.randn(32, 8)
torch.nn.functional.mse_loss(model(inputs), goals).backward()
optimizer.step()
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def step():
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), goals).backward()
    optimizer.step()


@hvd.elastic.run
def train(state):
    steps_for_ever(state, step, len(inputs), hvd, DEVICE_S)


train(hvd.elastic.TorchState(model, optimizer, step=0))

"""How often a gradient is copied on its way over two hosts of two ranks, as the core counts it."""
import ast

import pytest

from emulated import Hosts
from watched import ByHand

pytest.importorskip("torch")

PROGRAM = """
import torch
import lightcc.torch as hvd
from lightcc.core import lib

STEPS = 5
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), groups=1)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).sum().backward()
        optimizer.step()
    hvd.barrier()

train(3)
before = lib.counters()
train(STEPS)
gradients = STEPS * sum(4 * p.numel() for p in model.parameters())
print({name: (lib.counters()[name] - before[name]) / gradients
       for name in ("payload_bytes", "copied_bytes", "staged_bytes")})
hvd.shutdown()
"""


# Else the job would take from the cache what another test's job has measured on slow cables of hosts of these names.
NOT_MEASURED = [{"LIGHTCC_CALIBRATION": "0"}] * 4


@pytest.mark.slow
def test_gradients_are_exchanged_where_they_lie():
    """They lie in slots that the ranks of a host map. Of their bytes, a rank copies the half that its neighbour owns,
    and sets aside what the other host has not yet received at the end."""
    with Hosts(2) as hosts, ByHand(["h0", "h0", "h1", "h1"], PROGRAM, "h0:4810", NOT_MEASURED, hosts) as job:
        said = [job.finish(rank) for rank in range(4)]
    for rank, text in enumerate(said):
        print(f"rank {rank}: {text}")
        counted = ast.literal_eval(text.strip().splitlines()[-1])
        assert 1 <= counted["payload_bytes"] < 1.01
        assert 0.45 < counted["copied_bytes"] < 0.55
        assert counted["staged_bytes"] < 0.25

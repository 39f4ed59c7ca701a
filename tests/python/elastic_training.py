"""A worker of test_elastic_jobs.py: trains a linear model for some passes over a few samples, or until there is a file
FOLDER/stop, commits each batch, and ends by printing what the job has seen. Deaths are ordered by files: a worker that
finds FOLDER/kill.<point> at that point of the loop takes it away and is gone."""
import os
import signal
import sys
import time

import torch

import lightcc.torch as hvd

FOLDER, PASSES, SAMPLES, BATCH = sys.argv[1], float(sys.argv[2]), 48, 2
PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))


def point(name):
    """Where a worker may have to die; rank 0 only if the order says so."""
    for order in (f"kill.{name}", f"kill.{name}.{hvd.rank()}" if hvd.is_initialized() else ""):
        try:
            os.unlink(os.path.join(FOLDER, order))
        except (FileNotFoundError, IsADirectoryError):
            continue
        os.kill(os.getpid(), signal.SIGKILL)


point("start")
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())  # a newcomer's own weights must never count
data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7))
goal = data.sum(dim=1, keepdim=True)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
                                     named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, passes=0, batches=0, stop=False, seen=[],
                               sizes=[])
state.register_reset_callbacks([lambda: point("reset")])


@hvd.elastic.run
def train(state):
    while state.passes < PASSES and not state.stop:
        mine = list(state.sampler)
        for begin in range(0, len(mine), BATCH):
            chosen = mine[begin:begin + BATCH]
            point("batch")
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(data[chosen]), goal[chosen])
            loss.backward()
            point("backward")
            optimizer.step()
            state.sampler.record_batch(0, len(chosen))
            state.seen = state.seen + [(state.passes, i) for part in hvd.allgather_object(chosen) for i in part]
            state.sizes = state.sizes + [hvd.size()]
            state.batches += 1
            point("commit")
            state.commit()
            if hvd.rank() == 0:
                print("batch", state.batches, "size", hvd.size(), flush=True)
            time.sleep(PAUSE_S)
        state.passes += 1
        state.sampler.set_epoch(state.passes)
        state.stop = hvd.broadcast_object(os.path.exists(os.path.join(FOLDER, "stop")), 0)
        state.commit()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return all(torch.equal(weights, other) for other in hvd.allgather_object(weights))


same = train(state)
with torch.no_grad():
    loss = torch.nn.functional.mse_loss(model(data), goal).item()
seen = [sorted(i for at, i in state.seen if at == passes) for passes in range(state.passes)]
extra = sum(len(one) - SAMPLES for one in seen)
complete = all(sorted(set(one)) == list(range(SAMPLES)) for one in seen)
if hvd.rank() == 0:
    print("end", "complete" if complete else "LOST", "extra", extra, "same" if same else "DIFFER", "loss", loss,
          "sizes", ",".join(map(str, state.sizes)), flush=True)

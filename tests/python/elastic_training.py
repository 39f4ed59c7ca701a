"""A worker of test_elastic_jobs.py: trains a small net for some passes over a few samples, or until there is a file
FOLDER/stop, commits each batch, and ends by printing what the job has trained and the weights. Its deaths are
ordered by files (deaths.py)."""
import json
import os
import sys
import time

import deaths
import torch

import elastic_model
import lightcc.torch as hvd
from lightcc.core import lib

FOLDER, PASSES = sys.argv[1], float(sys.argv[2])
LEEWAY = 6  # connections are made when they are first used
PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))


def point(name):
    deaths.point(FOLDER, name, hvd.rank() if hvd.is_initialized() else None)


def before(name, function):
    """The function, with such a point before it."""
    def called(*arguments):
        point(name)
        return function(*arguments)
    return called


class State(hvd.elastic.TorchState):
    sync = before("sync", hvd.elastic.TorchState.sync)  # others wait in the broadcast of the state
    check_host_updates = before("broadcast", hvd.elastic.TorchState.check_host_updates)  # behind this rank's commit


point("start")
lib.init_at = before("meeting", lib.init_at)
torch.set_num_threads(1)
hvd.init()
seed = hvd.rank()  # a newcomer's own weights must never count
model = elastic_model.network(seed)
optimizer = hvd.DistributedOptimizer(elastic_model.optimizer(model), named_parameters=model.named_parameters())
# The gradients of the later layer have been sent by then.
model[0].weight.register_post_accumulate_grad_hook(lambda parameter: point("allreduce"))
sampler = hvd.elastic.ElasticSampler(range(elastic_model.SAMPLES))
# history: a line a batch, the samples of each rank, and an empty one behind a pass. Of a text a commit costs little.
state = State(model, optimizer, sampler=sampler, seed=seed, history="", passes=0, batches=0, stop=False)
state.register_reset_callbacks([lambda: point("reset")])


held = {}  # by the form of a world: descriptors and threads behind its first batch


def expect_nothing_left():
    """Of the worlds before this one."""
    now = [len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task")]
    first = held.setdefault((hvd.size(), hvd.local_size()), now)
    assert all(n <= at_first + LEEWAY for n, at_first in zip(now, first)), f"descriptors, threads: {now} after {first}"


@hvd.elastic.run
def train(state):
    assert hvd.local_rank() == int(os.environ["HOROVOD_LOCAL_RANK"]), "a worker keeps its slot"
    is_first = True
    while state.passes < PASSES and not state.stop:
        mine = list(state.sampler)
        for begin in range(0, len(mine), elastic_model.BATCH):
            chosen = mine[begin:begin + elastic_model.BATCH]
            point("batch")
            optimizer.zero_grad()
            elastic_model.loss(model, chosen).backward()
            point("backward")
            optimizer.step()
            state.sampler.record_batch(0, len(chosen))
            state.history += f"{json.dumps(hvd.allgather_object(chosen))}\n"
            state.batches += 1
            point("commit")
            state.commit()
            if is_first:
                expect_nothing_left()
                is_first = False
            if hvd.rank() == 0:
                print("batch", state.batches, "size", hvd.size(), flush=True)
            time.sleep(PAUSE_S)
        state.history += "\n"
        state.passes += 1
        state.sampler.set_epoch(state.passes)
        state.stop = hvd.broadcast_object(os.path.exists(os.path.join(FOLDER, "stop")), 0)
        state.commit()
    weights = elastic_model.weights(model)
    return all(torch.equal(weights, other) for other in hvd.allgather_object(weights))


same = train(state)
if hvd.rank() == 0:
    print("end", json.dumps({"seed": state.seed, "history": state.history, "same": same,
                             "weights": elastic_model.weights(model).tolist()}), flush=True)

"""A worker of test_elastic_jobs.py: trains a small net for some passes over a few samples, or until there is a file
FOLDER/stop, commits each batch, and ends by printing what the job has trained and the weights. Its deaths are
ordered by files (deaths.py). TEST_FRAMEWORK: torch or numpy (elastic_with_torch.py, elastic_with_numpy.py)."""
import importlib
import json
import os
import sys
import time

import deaths

from lightcc.core import lib

FRAMEWORK = os.environ.get("TEST_FRAMEWORK", "numpy")
kit = importlib.import_module(f"elastic_with_{FRAMEWORK}")
hvd = kit.hvd
FOLDER, PASSES = sys.argv[1], float(sys.argv[2])
LEEWAY = 6  # connections are made when they are first used
BATCH = 2
PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))


def point(name):
    deaths.point(FOLDER, name, hvd.rank() if hvd.is_initialized() else None)


def before(name, function):
    """The function, with such a point before it."""
    def called(*arguments):
        point(name)
        return function(*arguments)
    return called


class State(kit.Base):
    sync = before("sync", kit.Base.sync)  # others wait in the broadcast of the state
    check_host_updates = before("broadcast", kit.Base.check_host_updates)  # behind this rank's commit


point("start")
lib.init_at = before("meeting", lib.init_at)
hvd.init()
# seed: a newcomer's own weights must never count. history: a line a batch, the samples of each rank, and an empty one
# behind a pass. Of a text a commit costs little.
state = kit.state_of(State, point, seed=hvd.rank(), history="", passes=0, batches=0, stop=False)
state.register_reset_callbacks([lambda: point("reset")])


held = {}  # by the form of a world: descriptors and threads behind its first batch


def expect_nothing_left():
    """Of the worlds before this one."""
    now = [len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task")]
    first = held.setdefault((hvd.size(), hvd.local_size()), now)
    assert all(n <= at_first + LEEWAY for n, at_first in zip(now, first)), f"descriptors, threads: {now} after {first}"


@kit.run
def train(state):
    assert hvd.local_rank() == int(os.environ["HOROVOD_LOCAL_RANK"]), "a worker keeps its slot"
    is_first = True
    while state.passes < PASSES and not state.stop:
        mine = kit.samples_of(state)
        for begin in range(0, len(mine), BATCH):
            chosen = mine[begin:begin + BATCH]
            point("batch")
            kit.step(state, chosen, point)
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
        kit.begin_pass(state)
        state.stop = hvd.broadcast_object(os.path.exists(os.path.join(FOLDER, "stop")), 0)
        state.commit()
    weights = kit.weights(state)
    return all(weights == other for other in hvd.allgather_object(weights))


same = train(state)
if hvd.rank() == 0:
    print("end", json.dumps({"framework": FRAMEWORK, "seed": state.seed, "history": state.history, "same": same,
                             "weights": kit.weights(state)}), flush=True)

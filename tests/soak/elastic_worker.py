"""A worker of soak/elastic.py: FOLDER. Takes steps, commits each, and does what the file FOLDER/order says: "stop", or
how which workers shall fail, "kill 1 3". A worker that shall fail does so wherever it next looks, in a step or a reset,
so it is in no further world."""
import os
import signal
import sys
from pathlib import Path

from elastic_functions import step, worker

import lightcc.numpy as hvd
from lightcc.core.elastic_state import ObjectState, run_fn

ORDER = Path(sys.argv[1]) / "order"
STEPS_UNTIL_SAID = 3  # by then all have the state of the job and a commit


def ordered():
    """Whether the job shall stop; does not return in a worker that shall fail."""
    how, *workers = ORDER.read_text().split() if ORDER.exists() else [""]
    if str(worker()) in workers:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("ordered")
    return how == "stop"


def reset():
    ordered()
    hvd.shutdown()
    hvd.init()


def train(state):
    hosts = hvd.allgather_object(os.environ["HOROVOD_HOSTNAME"])
    steps = 0
    while not state.stop:
        state.stop = hvd.broadcast_object(ordered(), 0)
        step(state)
        steps += 1
        if steps == STEPS_UNTIL_SAID and hvd.rank() == 0:
            print("world", hvd.size(), *dict.fromkeys(hosts), flush=True)


hvd.init()
run_fn(train, reset)(ObjectState(hvd.broadcast_object, hvd.rank, steps=0, stop=False))

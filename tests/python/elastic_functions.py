"""Functions that test_elastic_run.py has run() call in elastic workers. In a file of their own, so that workers import
no pytest."""
import os
import signal
import time
from pathlib import Path

import numpy as np

import lightcc.numpy as hvd
from lightcc.core.elastic_state import ObjectState, run_fn

DEADLINE_S = 200


def worker():
    return int(os.environ["HOROVOD_RANK"])


def who():
    """Rank, size and the number of this worker."""
    return hvd.rank(), hvd.size(), worker()


def elastic(loop):
    """Calls loop(state) as hvd.elastic.run does, in a world; the state counts steps."""
    def reset():
        hvd.shutdown()
        hvd.init()

    hvd.init()
    return run_fn(loop, reset)(ObjectState(hvd.broadcast_object, hvd.rank, steps=0))


def step(state):
    hvd.allreduce(np.ones(1), name="x")
    state.steps += 1
    state.commit()


def count(steps):
    def loop(state):
        while state.steps < steps:
            step(state)
        return who()

    return elastic(loop)


def train(die, size, victim="worker"):
    """Worker `die`, or what has started it, is killed in step 3; the others return once they are so many again."""
    def loop(state):
        while state.steps < 5 or hvd.size() != size:
            step(state)
            if worker() == die and state.steps == 3:
                os.kill(os.getpid() if victim == "worker" else os.getppid(), signal.SIGKILL)
        return who()

    return elastic(loop)


def grow(hosts, text, size):
    """Rank 0 writes a new list of hosts in step 3; all return once they are so many."""
    def loop(state):
        while hvd.size() != size:
            step(state)
            if state.steps == 3:
                Path(f"{hosts}.new").write_text(text)
                os.rename(f"{hosts}.new", hosts)
        return who()

    return elastic(loop)


def raise_in(which):
    def loop(state):
        while True:
            step(state)
            if worker() == which and state.steps == 3:
                raise KeyError("the cause")

    return elastic(loop)


def after_the_first(follow):
    """Rank 0 returns, and once it is gone, rank 1 calls follow(state)."""
    def loop(state):
        pid = int(hvd.broadcast(np.array([os.getpid()]), 0)[0])
        if hvd.rank() == 0:
            return "first"
        deadline = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # its launcher waits later
            assert time.monotonic() < deadline, f"rank 0 has not ended for {DEADLINE_S} s"
            time.sleep(0.01)
        return follow(state)

    return elastic(loop)


def fail(state):
    raise KeyError("of rank 1")


def extended(data):
    """Megabytes there and back."""
    hvd.init()
    hvd.barrier()  # who is still in init() when the first returns has no result
    return data + bytes([hvd.rank()])

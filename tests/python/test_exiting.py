"""How a process ends: no thread of ours is left when Python comes to its end, and the others hear that a rank left."""
import subprocess
import sys
import uuid

import pytest

DEADLINE_S = 200


def run(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout
    return done.stdout


THREADS = """
import atexit, threading
# What is given first is called last.
atexit.register(lambda: print("left:", sorted(t.name for t in threading.enumerate() if t.daemon)))
import torch
import lightcc.torch as hvd
from lightcc import data
from lightcc.torch import futures

class Endless(data.AsyncDataLoaderMixin, data.BaseDataLoader):
    def _iterate(self):
        while True:
            yield torch.ones(100_000).sort().values

class Blocked(data.AsyncDataLoaderMixin, data.BaseDataLoader):
    def _iterate(self):
        yield 1
        threading.Event().wait()

hvd.init()
x = torch.ones(10)
future = futures.future_of(futures.Operation(hvd.allreduce_async_(x), x), x)
endless = iter(Endless(2))
next(endless)
if BLOCKED:
    data.data_loader_base._EXIT_S = 2.0
    blocked = iter(Blocked(2))
    next(blocked)
print("running:", sorted(t.name for t in threading.enumerate() if t.daemon))
"""


def test_no_thread_is_left_when_the_interpreter_ends():
    pytest.importorskip("torch")
    output = run("-c", THREADS.replace("BLOCKED", "False"))
    assert "running: ['lightcc data loader', 'lightcc-futures']" in output
    assert "left: []" in output


def test_an_iterator_that_blocks_delays_the_end_and_does_not_prevent_it():
    pytest.importorskip("torch")
    output = run("-c", THREADS.replace("BLOCKED", "True"))
    assert "left: ['lightcc data loader']" in output
    assert "_iterate has not come to its next batch" in output


RANKS = """
import multiprocessing, os, sys, threading, time
import numpy as np
import lightcc.numpy as hvd

def last(path):
    hvd.allreduce(np.ones(1), name="both")
    open(path, "w").close()
    while True:
        try:
            hvd.allreduce(np.ones(1), name="one")
        except hvd.HorovodInternalError as error:
            print("error:", error, flush=True)
            return

def rank(number, job, path):
    os.environ.update(HOROVOD_RANK=str(number), HOROVOD_SIZE="2", HOROVOD_LOCAL_RANK=str(number),
                      HOROVOD_LOCAL_SIZE="2", LIGHTCC_JOB_ID=job)
    hvd.init()
    if number == 0:
        hvd.allreduce(np.ones(1), name="both")
        while not os.path.exists(path):
            time.sleep(0.01)
    else:  # its thread goes on when this function has returned
        threading.Thread(target=last, args=(path,)).start()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=rank, args=(number, sys.argv[2], sys.argv[3])) for number in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_in_a_child_of_multiprocessing_leaves_and_does_not_die(method, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    output = run(script, method, uuid.uuid4().hex, tmp_path / "both")
    assert "rank 0 (pid" in output and "has left" in output, output
    assert "died" not in output

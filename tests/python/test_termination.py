"""Ends of all kinds: a killed rank, a stopped one, Ctrl-C, a rank that never comes. Whatever happens, the others
hear of it by name, and nothing is left behind.

Ranks are started here one by one, not by the launcher, which would end the survivors before they can tell.
"""
import os
import random
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from jobs import DEADLINE_S, wait_until

HEARD_S = 20.0  # seconds from the end of a rank to the exception on all others

LOOP = """
import os, sys, time
import numpy as np
import lightcc.numpy as hvd
hvd.init()
if "fork" in sys.argv and os.fork() == 0:  # a worker that outlives its rank and holds its descriptors
    time.sleep(20)
    os._exit(0)
arrays = [np.ones(n, np.float32) for n in (1, 1000, 100_000, 3_000_000)]
print("ready", flush=True)
try:
    while True:
        handles = [hvd.allreduce_async_(a, name=f"a{i}") for i, a in enumerate(arrays)]
        for handle in handles:
            hvd.synchronize(handle)
except hvd.HorovodInternalError as error:
    print("error", time.time(), error, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
hvd.shutdown()
print("threads", len(os.listdir("/proc/self/task")), flush=True)
"""


class Ranks:
    """Processes that form one world; each is asked for the lines it printed."""

    def __init__(self, size, program, *args, **variables):
        self.job = uuid.uuid4().hex
        self.processes = []
        for rank in range(size):
            env = dict(os.environ, HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size), HOROVOD_LOCAL_RANK=str(rank),
                       HOROVOD_LOCAL_SIZE=str(size), LIGHTCC_JOB_ID=self.job, OMP_NUM_THREADS="1", **variables)
            self.processes.append(subprocess.Popen(
                [sys.executable, "-c", program, *args], env=env, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()

    def wait_ready(self):
        for process in self.processes:
            line = process.stdout.readline()
            assert line == "ready\n", line + process.stdout.read()

    def kill(self, rank, sig=signal.SIGKILL):
        self.processes[rank].send_signal(sig)

    def wait_asleep(self, rank):
        """Until it waits in a collective: ready, it sleeps nowhere else. One that only lacks a core does not sleep."""
        process, looks = psutil.Process(self.processes[rank].pid), []

        def has_slept():
            looks.append(process.status() == psutil.STATUS_SLEEPING)
            return len(looks) > 10 and all(looks[-10:])
        wait_until(has_slept, f"rank {rank} to wait")

    def output(self, rank, timeout=DEADLINE_S):
        """What the rank printed since it was ready. A rank with a forked worker keeps its pipe open: read lines."""
        process, lines = self.processes[rank], []
        process.wait(timeout)
        while (line := process.stdout.readline()) and not line.startswith("threads"):
            lines.append(line)
        return "".join(lines) + line


def errors_of(ranks, survivors, since):
    for rank in survivors:
        text = ranks.output(rank)
        word, when, message = text.split(" ", 2)
        assert word == "error", text
        assert float(when) - since < HEARD_S, text
        yield message


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_killed_at_random_moments_is_named_by_all_others(size):
    for seed in range(25):
        print(f"size {size} seed {seed}")
        rng = random.Random(seed)
        with Ranks(size, LOOP, "fork") as ranks:
            ranks.wait_ready()
            time.sleep(rng.random() * 0.05)
            victim = rng.randrange(size)
            ranks.kill(victim)
            survivors = [r for r in range(size) if r != victim]
            for message in errors_of(ranks, survivors, time.time()):
                assert f"rank {victim} (pid {ranks.processes[victim].pid}) on host" in message and "died" in message
                assert "allreduce of tensor 'a" in message


def test_a_stopped_rank_is_warned_about_then_ended_and_hears_of_it_when_it_wakes():
    with Ranks(3, LOOP, HOROVOD_STALL_CHECK_TIME_SECONDS="0.5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1.5") as ranks:
        ranks.wait_ready()
        time.sleep(0.05)
        ranks.kill(0, signal.SIGSTOP)
        texts = [ranks.output(rank) for rank in (1, 2)]
        for text in texts:
            assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text and "rank 0 (pid" in text, text
        assert any("stall: allreduce of tensor 'a" in text for text in texts), texts
        ranks.kill(0, signal.SIGCONT)
        assert "stalled" in ranks.output(0)


STOPPED_WRITER = """
import sys
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib
hvd.init()
memory = lib.alloc(32 << 20)  # memory that ranks share: the owner of a shard writes all ranks' results
array = np.frombuffer(memory, np.float32, count=8 << 20)
print("ready", flush=True)
try:
    while True:
        array[:] = 1
        hvd.allreduce_(array, name="big", op=hvd.Max)
except hvd.HorovodInternalError as error:
    array[:] = 7  # the memory that the stopped rank was writing to, now ours alone
    print("mine", flush=True)
    sys.stdin.readline()
    print("intact" if (array == 7).all() else "overwritten", flush=True)
"""


def test_a_rank_that_was_stopped_inside_a_reduction_cannot_write_into_survivors_when_it_wakes():
    for seed in range(5):
        print(f"seed {seed}")
        variables = dict(HOROVOD_STALL_CHECK_TIME_SECONDS="0.3", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.6")
        with Ranks(2, STOPPED_WRITER, **variables) as ranks:
            ranks.wait_ready()
            time.sleep(0.2 + random.Random(seed).random() * 0.05)
            ranks.kill(1, signal.SIGSTOP)
            survivor = ranks.processes[0]
            while (line := survivor.stdout.readline()).startswith("[lightcc"):
                pass
            assert line == "mine\n", line
            ranks.kill(1, signal.SIGCONT)
            time.sleep(0.3)  # it finishes the block that it was stopped in
            survivor.stdin.write("\n")
            survivor.stdin.flush()
            assert survivor.stdout.readline() == "intact\n"


SYNCHRONIZE_WITHOUT_PEERS = """
import time
import numpy as np
import lightcc.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(1), name="together")
print("ready", flush=True)
try:
    hvd.allreduce(np.ones(1), name="alone" if hvd.rank() == 1 else "others")
except hvd.HorovodInternalError as error:
    print("error", time.time(), error, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_inside_synchronize_interrupts_this_rank_and_tells_the_others_why():
    with Ranks(3, SYNCHRONIZE_WITHOUT_PEERS) as ranks:
        ranks.wait_ready()
        ranks.wait_asleep(1)
        since = time.time()
        ranks.kill(1, signal.SIGINT)
        for message in errors_of(ranks, (0, 2), since):
            assert "KeyboardInterrupt on rank 1" in message
        assert ranks.output(1).startswith("interrupted")


STEP_WITHOUT_PEER = """
import time, torch
import lightcc.torch as hvd
hvd.init()
p = torch.ones(3, requires_grad=True)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
p.sum().backward()  # the first backward of a process takes long
optimizer.step()
print("ready", flush=True)
try:
    if hvd.rank() == 0:
        p.sum().backward()
        optimizer.step()
    else:
        hvd.allreduce(torch.ones(1), name="another")
except hvd.HorovodInternalError as error:
    print("error", time.time(), error, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_inside_step():
    with Ranks(2, STEP_WITHOUT_PEER) as ranks:
        ranks.wait_ready()
        ranks.wait_asleep(0)
        since = time.time()
        ranks.kill(0, signal.SIGINT)
        (message,) = errors_of(ranks, (1,), since)
        assert "KeyboardInterrupt on rank 0" in message
        assert ranks.output(0).startswith("interrupted")


def _sockets_of_any_job():
    with open("/proc/net/unix") as sockets:
        return [line for line in sockets if "lightcc" in line]


def test_after_shutdown_no_thread_is_left_and_after_death_no_socket_or_memory():
    with Ranks(2, LOOP) as ranks:
        ranks.wait_ready()
        ranks.kill(0)
        assert "threads 1\n" in ranks.output(1)
    deadline = time.monotonic() + DEADLINE_S
    while _sockets_of_any_job():  # others may run beside this one, and have some while they begin
        assert time.monotonic() < deadline, _sockets_of_any_job()
        time.sleep(0.05)
    assert not [name for name in os.listdir("/dev/shm") if "lightcc" in name]


ABSENT = """
import os, sys
import lightcc.numpy as hvd
if os.environ["HOROVOD_RANK"] == "2":
    sys.exit()
try:
    hvd.init()
except Exception as error:
    print("ready")
    print(error)
"""


def test_a_rank_that_never_comes_is_named_by_those_who_wait():
    with Ranks(3, ABSENT, HOROVOD_START_TIMEOUT="10") as ranks:
        for rank in (0, 1):
            text = ranks.processes[rank].communicate(timeout=DEADLINE_S)[0]
            assert "rank 2 did not come" in text, text

"""What many steps, idleness and a mere import cost: no memory, no descriptors, no CPU, no thread."""
import gc
import subprocess
import sys
import time

import psutil
import pytest
import torch

import lightcc.torch as hvd
import ranks

WARM_UP, STEPS = 2_000, 10_000
GROWTH_BYTES = 2 << 20  # 200 bytes a step would show
IDLE_S, IDLE_CPU_S = 3, 0.1


@pytest.mark.parametrize("np", (2, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np, only="" if np == 2 else "not thousand")


def test_import_starts_no_thread():
    program = """
import os, torch
before = os.listdir("/proc/self/task")
import lightcc.torch
assert os.listdir("/proc/self/task") == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def check_idleness_costs_nothing(job):
    hvd.allreduce(torch.ones(1))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(IDLE_S)
    assert time.process_time() - before < IDLE_CPU_S
    hvd.allreduce(torch.ones(1))


def everything(step):
    """One step of a program that uses all there is."""
    x = torch.full((2, 3), float(step % 7))
    hvd.allreduce_(x)
    hvd.allreduce(x, name="named")
    hvd.synchronize(hvd.allreduce_async(x))
    hvd.allgather(x[:1 + (step + hvd.rank()) % 2])
    hvd.broadcast_(x, step % hvd.size())
    if step % 10 == 0:
        hvd.alltoall(torch.ones(hvd.size()))
        hvd.reducescatter(x)
        hvd.grouped_allreduce([x, x[0]])
        hvd.barrier()
    if step % 100 == 0:
        hvd.allgather_object({"step": step})
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1 + hvd.rank()))
        with pytest.raises(ValueError):
            hvd.alltoall(torch.ones(1), [1] * (1 + hvd.size()))
        hvd.remove_process_set(hvd.add_process_set([0]))


def usage():
    """Private memory; descriptors and threads. What ranks share are rings of a fixed size, touched little by little."""
    gc.collect()
    process = psutil.Process()
    memory = process.memory_info()
    return memory.rss - memory.shared, (process.num_fds(), process.num_threads())


def check_ten_thousand_steps(job):
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.ones(1, 4) * (1 + hvd.rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if step % 5 == 0:
            everything(step // 5)
        if step == WARM_UP:
            memory, others = usage()
    more, others_now = usage()
    print(f"memory {memory} -> {more}", flush=True)
    assert others_now == others
    assert more - memory < GROWTH_BYTES
    every = hvd.allgather(model.weight.detach().unsqueeze(0))
    assert all(torch.equal(weight, every[0]) for weight in every)


def check_shutdown_gives_everything_back(job):
    hvd.shutdown()
    tensors = []

    def epoch():
        hvd.init()
        tensors[:] = [hvd.allgather(torch.ones(1000))]  # outlives the epoch
        hvd.allreduce(torch.ones(1000))
        hvd.shutdown()

    for _ in range(20):
        epoch()
    memory, others = usage()
    for _ in range(20):
        epoch()
    more, others_now = usage()
    print(f"memory {memory} -> {more}", flush=True)
    assert others_now == others
    assert more - memory < GROWTH_BYTES
    hvd.init()
    assert torch.equal(tensors[0], torch.ones(1000 * hvd.size()))

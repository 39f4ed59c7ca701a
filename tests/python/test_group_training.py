"""What torch builds on a process group, over lightcc: DistributedDataParallel, fully_shard, DistributedSampler,
checkpoints. The reference is DistributedDataParallel over gloo."""
import os
import shutil
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from test_ddp import OPTIONS, Words, expect_same, learn_words, train, wrap
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import lightcc.torch as hvd
import lightcc.torch.process_group  # noqa: F401  registers the backend
import ranks


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# First those of which gloo is the default group

@pytest.fixture(scope="module")
def group(job):
    """lightcc's group beside gloo's."""
    dist.init_process_group("gloo")
    yield dist.new_group(backend="lightcc")


@pytest.mark.parametrize("what", OPTIONS)
def check_ddp_same_as_over_gloo(group, what):
    options, side = OPTIONS[what]
    expect_same(train(wrap(None, process_group=group, **options), side), train(wrap(None, **options), side))


@pytest.mark.parametrize("divide_by_initial", (True, False))
def check_uneven_inputs(group, divide_by_initial):
    """With False C++ waits in backward for a Work that Python has long dropped."""
    def run(group):
        torch.manual_seed(1)
        wrapped = wrap(None, module=torch.nn.Linear(6, 2), process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with Join([wrapped], divide_by_initial_world_size=divide_by_initial):
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                wrapped(torch.full((1, 6), float(step + dist.get_rank()))).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in wrapped.parameters()]
    expect_same(run(group), run(None))


def check_sparse_gradients(group):
    expect_same(learn_words(wrap(None, module=Words(), process_group=group)), learn_words(wrap(None, module=Words())))


def check_errors_in_backward_leave_the_model_usable(group):
    """DDP asks for the future of each bucket's work; what it failed with comes out of backward."""
    if dist.get_world_size() == 1:
        return
    broken = [True]

    def hook(_, bucket):
        tensor = bucket.buffer()
        tensor = tensor[:len(tensor) - dist.get_rank()] if broken else tensor
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer())
    torch.manual_seed(1)
    wrapped = wrap(hook, module=torch.nn.Linear(6, 2), process_group=group)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
            wrapped(torch.ones(1, 6)).sum().backward()
    del broken[:]
    wrapped.zero_grad()
    wrapped(torch.ones(1, 6)).sum().backward()
    assert wrapped.module.bias.grad.tolist() == [dist.get_world_size()] * 2


def check_backward_does_not_wait_for_ever(group):
    """A rank that comes too late: backward ends with an error, and the buckets are reduced when it comes."""
    if dist.get_world_size() == 1:
        return
    torch.manual_seed(1)
    wrapped = wrap(None, module=torch.nn.Linear(6, 2), process_group=group)
    group.set_timeout(timedelta(seconds=0.4))
    try:
        if dist.get_rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match="Rank 0 has waited 0.4 s"):
                wrapped(torch.ones(1, 6)).sum().backward()
    finally:
        group.set_timeout(timedelta(seconds=60))
    hvd.barrier()
    if dist.get_rank() != 0:
        wrapped(torch.ones(1, 6)).sum().backward()
    wrapped.zero_grad()
    wrapped(torch.ones(1, 6)).sum().backward()
    assert wrapped.module.bias.grad.tolist() == [1, 1]


# Then those that want lightcc for the default group

@pytest.fixture(scope="module")
def world(group):
    dist.destroy_process_group()
    dist.init_process_group("lightcc")
    yield
    dist.destroy_process_group()


def perceptron():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def learn(model, make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)):
    optimizer = make_optimizer(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def check_hook_that_waits_for_futures_of_its_own(world):
    """PowerSGD waits for further collectives in the callbacks of the first one's future."""
    def run(group):
        wrapped = DistributedDataParallel(perceptron())
        state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=False)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return learn(wrapped)
    mine = run(None)
    every = hvd.allgather(torch.cat([p.reshape(-1) for p in mine]).unsqueeze(0))
    assert (every == every[0]).all() and every.isfinite().all()
    assert dist.get_world_size() == 1 or not torch.equal(mine[0], perceptron()[0].weight)


def check_fully_shard(world):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = perceptron()
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh)
    learn(sharded)
    expect_same([p.full_tensor().detach() for p in sharded.parameters()], learn(DistributedDataParallel(perceptron())))


def check_zero_redundancy_optimizer(world):
    mine = learn(DistributedDataParallel(perceptron()),
                 lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01))
    expect_same(mine, learn(DistributedDataParallel(perceptron()), lambda params: torch.optim.Adam(params, lr=0.01)))


def check_sampler(world):
    sampler = torch.utils.data.DistributedSampler(range(12), shuffle=True, seed=3)
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, list(sampler))
    assert sorted(i for part in everything for i in part) == list(range(12))


def check_checkpoint(world):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = perceptron()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    learn(model)
    trained = [p.full_tensor().clone() for p in model.parameters()]
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=os.path.join(folder[0], "saved"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=os.path.join(folder[0], "saved"))
    for p, q in zip(model.parameters(), trained):
        assert torch.equal(p.full_tensor(), q)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])

"""FSDP2 and ZeroRedundancyOptimizer over lightcc learn what DistributedDataParallel learns there, and it what one
process learns from the data of all ranks. tests/gpu/check_process_group.py has the same on GPUs."""
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightcc.torch as hvd
import ranks

STEPS = 4
pytestmark = pytest.mark.torch_sizes


@pytest.mark.parametrize("np", {2, 4}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(scope="module")
def world(job):
    dist.init_process_group("lightcc")
    yield
    dist.destroy_process_group()


def new_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 41), torch.nn.Tanh(), torch.nn.Linear(41, 2))


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, clip=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, hvd.rank())).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@functools.lru_cache(maxsize=None)
def learned(clip=None):
    """By one process."""
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() for rank in range(hvd.size())).div(hvd.size()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def sharded(*shape, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    shape, model = shape or (hvd.size(),), new_model()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicated", "sharded")[-len(shape):])
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    return model


def expect(parameters, expected, **tolerance):
    torch.testing.assert_close([parameter.detach() for parameter in parameters], expected, **tolerance)


def check_distributed_data_parallel(world):
    model = DistributedDataParallel(new_model())
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    expect(model.module.parameters(), learned())


@pytest.mark.parametrize("clip", [None, 0.05])
def check_fsdp2(world, clip):
    model = sharded()
    assert hvd.size() == 1 or all(p.to_local().numel() < p.numel() for p in model.parameters() if p.shape[0] > 1)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), clip)
    expect([parameter.full_tensor() for parameter in model.parameters()], learned(clip))


def check_fsdp2_in_mixed_precision(world):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    expect([parameter.full_tensor() for parameter in model.parameters()], learned(), rtol=5e-2, atol=5e-2)


def check_fsdp2_in_two_dimensions(world):
    """Sharded in pairs of ranks, replicated between them."""
    if hvd.size() != 4:
        return
    model = sharded(2, 2)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    expect([parameter.full_tensor() for parameter in model.parameters()], learned())


def check_state_of_fsdp2(world):
    """The whole state comes to rank 0, and from there to another model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    model, other = sharded(), sharded()
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if hvd.rank() == 0:
        expect(whole.values(), learned())
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    expect([parameter.full_tensor() for parameter in other.parameters()], learned())


@pytest.mark.parametrize("views", [False, True])
def check_zero_redundancy_optimizer(world, views):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=views)
    train(model, optimizer)
    expect(model.module.parameters(), learned())
    optimizer.consolidate_state_dict(0)
    if hvd.rank() == 0:
        assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3]

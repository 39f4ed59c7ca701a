"""torch.distributed over lightcc with tensors of a real GPU: its functions, futures and the order of streams; and that
DistributedDataParallel with and without comm_hook, FSDP2 and ZeroRedundancyOptimizer learn what one process learns from
the data of all ranks, as DistributedDataParallel does over torch's own backend. Every rank runs it, as
check_collectives.py.
"""
import functools
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from check_training import TOLERANCE, new_model
from test_process_group import collectives
from torch.nn.parallel import DistributedDataParallel

import lightcc.torch as hvd
import lightcc.torch.process_group  # noqa: F401  the backend "lightcc"
from lightcc.core.adapter import MixedDevicesError
from lightcc.torch import ddp

STEPS = 6
SMALL_MIB = 0.005  # so that the model has several buckets
SLEEP = 5_000_000  # cycles of the GPU, some milliseconds: who does not wait for it is too early
LONG_SLEEP = 1 << 30  # half a second
COUNT = 1 << 18
PEER = "nccl" if os.environ.get("LIGHTCC_NCCL") == "1" else "gloo"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def world(job):
    torch.zeros(1, device="cuda")  # the GPU that conftest.py has chosen stays the current one
    meeting = os.path.join(tempfile.gettempdir(), f"lightcc-{os.environ['LIGHTCC_JOB_ID']}")
    store = dist.FileStore(meeting, hvd.size())
    dist.init_process_group("lightcc", store=store, rank=hvd.rank(), world_size=hvd.size(),
                            device_id=torch.device("cuda", torch.cuda.current_device()))
    yield dist.group.WORLD
    dist.destroy_process_group()


# Functions

def check_every_function(world, device):
    def put(tensor):
        return tensor.to(f"cuda:{device}")
    for name in collectives(world, put):
        for use in (dist.Work.wait, lambda work: work.get_future().wait()):
            start, outputs, expected = collectives(world, put)[name]
            use(start())
            assert [t.to_dense().tolist() for t in outputs] == expected, name


def check_functional_collectives(world, device):
    import torch.distributed._functional_collectives as functional
    rank, size, group = hvd.rank(), hvd.size(), list(range(hvd.size()))
    x = torch.arange(2 * size, dtype=torch.float32, device=f"cuda:{device}")
    mine = x[2 * rank:2 * rank + 2].tolist()
    assert torch.equal(functional.all_reduce(x, "sum", group), size * x)
    assert functional.all_gather_tensor(x, 0, group).tolist() == x.tolist() * size
    assert functional.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [size * value for value in mine]
    assert functional.all_to_all_single(x, None, None, group).tolist() == mine * size


def check_coalesced_calls(world, device):
    xs = [torch.full((1000,), 1.0 + hvd.rank(), device=f"cuda:{device}") for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all((x == hvd.size() * (hvd.size() + 1) / 2).all() for x in xs)


def check_objects_and_groups(world, device):
    gathered = [None] * hvd.size()
    dist.all_gather_object(gathered, {"rank": hvd.rank()})
    assert [entry["rank"] for entry in gathered] == list(range(hvd.size()))
    assert dist.get_backend() == "lightcc"
    alone = dist.new_group(list(range(hvd.size())), backend="lightcc")
    x = torch.ones(3, device=f"cuda:{device}")
    dist.all_reduce(x, group=alone)
    assert (x == hvd.size()).all()
    dist.barrier(group=alone)


# Streams

@pytest.mark.parametrize("first", ["default", "another"])
def check_whoever_waits_goes_on_behind_it(world, device, double, first):
    """The stream of the submission, or another one that nothing else orders."""
    total = hvd.size() * (hvd.size() + 1) / 2
    begin, other = double.new_stream(device) if first == "another" else 0, double.new_stream(device)
    for turn in range(6):
        with double.on(device, begin):
            torch.cuda._sleep(SLEEP)
            x = torch.full((COUNT,), 1.0 + hvd.rank(), device=f"cuda:{device}")
            whole = torch.empty(hvd.size() * COUNT, device=f"cuda:{device}")
            gathered = dist.all_gather_into_tensor(whole, x.clone(), async_op=True)
            summed = dist.all_reduce(x, async_op=True)
        with double.on(device, other if turn % 2 else begin):
            summed.wait()
            gathered.wait()
            assert (x == total).all() and whole[::COUNT].tolist() == [1.0 + rank for rank in range(hvd.size())]
        del x, whole, gathered, summed


@pytest.mark.skipif(PEER != "nccl", reason="through the host an operation is done once the bytes are exchanged")
def check_the_stream_of_the_call_goes_on_meanwhile(world, device, double):
    """A kernel behind the call is done long before the result, for which the other rank's input is missing."""
    with double.on(device, double.new_stream(device)):
        x, y = (torch.ones(COUNT, device=f"cuda:{device}") for _ in range(2))
        for late in (False, True):  # once without, so that nothing is loaded or made the second time
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            if late and hvd.rank() == hvd.size() - 1:
                torch.cuda._sleep(LONG_SLEEP)
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                assert time.perf_counter() < begin + 30
            y.add_(1)
            torch.cuda.current_stream().synchronize()
            went_on = time.perf_counter() - begin
            work.wait()
            torch.cuda.current_stream().synchronize()
            done = time.perf_counter() - begin
    assert (x == hvd.size() ** 2).all()
    print(f"the stream went on after {went_on:.3f} s, the result was there after {done:.3f} s: ok")
    assert hvd.rank() > 0 or hvd.size() == 1 or went_on < done / 2


def check_futures(world, device, double):
    """A callback of PyTorch's own has a stream behind the result, and who waits for it goes on behind the callback."""
    total = hvd.size() * (hvd.size() + 1) / 2
    for stream in (0, double.new_stream(device)):
        with double.on(device, stream):
            for _ in range(4):
                torch.cuda._sleep(SLEEP)
                x = torch.full((COUNT,), 1.0 + hvd.rank(), device=f"cuda:{device}")
                doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda future: 2 * future.value()[0])
                assert (doubled.wait() == 2 * total).all()


def check_works_that_nobody_waits_for(world, device):
    """Their memory is used again at once by others, which find no stranger's bytes in it."""
    for turn in range(20):
        dist.all_reduce(torch.full((COUNT,), -1.0, device=f"cuda:{device}"), async_op=True)
        x = torch.full((COUNT,), float(turn), device=f"cuda:{device}")
        assert (x == turn).all()
    dist.barrier()


# Training

def batch(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@functools.lru_cache(maxsize=1)
def expected():
    """The parameters after training on the CPU, in one process with all data."""
    model = new_model("cpu")
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() for rank in range(hvd.size())).div(hvd.size()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model, optimizer, device):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, hvd.rank()).to(f"cuda:{device}")).square().mean().backward()
        optimizer.step()


def wrapped(device, group=None, hook=None, state=None, **options):
    model = DistributedDataParallel(new_model(f"cuda:{device}"), device_ids=[device], process_group=group,
                                    bucket_cap_mb=SMALL_MIB, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def with_ddp(device, **options):
    model = wrapped(device, **options)
    train(model, sgd(model.parameters()), device)
    return model.module.parameters()


def with_zero(device):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = wrapped(device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    train(model, optimizer, device)
    optimizer.consolidate_state_dict(0)
    return model.module.parameters()


def with_fsdp2(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh, model = init_device_mesh("cuda", (hvd.size(),)), new_model(f"cuda:{device}")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    train(model, sgd(model.parameters()), device)
    return [parameter.full_tensor() for parameter in model.parameters()]


WAYS = {
    "DDP": with_ddp,
    "DDP, hook": functools.partial(with_ddp, hook=ddp.comm_hook),
    "DDP, hook, views of buckets": functools.partial(with_ddp, hook=ddp.comm_hook, gradient_as_bucket_view=True),
    "DDP, hook, fp16": functools.partial(with_ddp, hook=ddp.comm_hook,
                                         state=ddp.Options(compression=hvd.Compression.fp16)),
    "ZeRO": with_zero,
    "FSDP2": with_fsdp2,
}


def expect_learned(parameters, tolerance):
    torch.testing.assert_close([parameter.detach().cpu() for parameter in parameters], expected(), **tolerance)
    start = [parameter.detach() for parameter in new_model("cpu").parameters()]
    assert any((x - y).abs().max() > 0.01 for x, y in zip(expected(), start)), "something was learned"


@pytest.mark.parametrize("way", WAYS)
def check_what_is_learned(world, device, way):
    expect_learned(WAYS[way](device), {"rtol": 1e-2, "atol": 1e-2} if "fp16" in way else TOLERANCE)


def check_torchs_own_backend_learns_it_too(world, device):
    """No collective of lightcc's may be on the GPU meanwhile."""
    torch.cuda.synchronize()
    group = dist.new_group(list(range(hvd.size())), backend=PEER)
    expect_learned(with_ddp(device, group=group), TOLERANCE)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group(group)


def check_sparse_gradients(world, device):
    model = DistributedDataParallel(torch.nn.Embedding(9, 4, sparse=True).to(f"cuda:{device}"), device_ids=[device])
    model.register_comm_hook(None, ddp.comm_hook)
    row = 1 + hvd.rank()
    model(torch.tensor([0, row, row], device=f"cuda:{device}")).sum().backward()
    found, rows = model.module.weight.grad.to_dense().cpu()[:, 0], torch.zeros(9)
    rows[0], rows[1:1 + hvd.size()] = 1, 2 / hvd.size()
    assert torch.equal(found, rows)


# Errors

def check_tensors_on_several_devices(world, device):
    here, there = torch.ones(4), torch.ones(4, device=f"cuda:{device}")
    for call in (lambda: dist.all_to_all_single(here, there), lambda: dist.all_to_all_single(there, here)):
        with pytest.raises(MixedDevicesError, match=f"rank {hvd.rank()}: tensor 1 of the call is on "):
            call()


def check_errors_leave_backward(world, device):
    model = wrapped(device, hook=ddp.comm_hook, state=17)
    for _ in range(2):
        with pytest.raises(TypeError, match="the state is a int"):
            model(batch(0, 0).to(f"cuda:{device}")).square().mean().backward()


def check_ranks_that_disagree(world, device):
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
        dist.all_reduce(torch.ones(1 + hvd.rank(), device=f"cuda:{device}"), async_op=True).wait()
    x = torch.ones(3, device=f"cuda:{device}")
    dist.all_reduce(x)
    assert (x == hvd.size()).all()

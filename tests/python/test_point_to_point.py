"""send, recv, isend, irecv and batch_isend_irecv of torch.distributed over lightcc."""
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_termination import Ranks

import lightcc.torch as hvd
import ranks
from lightcc.core import lib


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=pytest.mark.sizes)])
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(scope="module")
def world(job):
    dist.init_process_group("lightcc")
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def numbers(seed, count, dtype=torch.float32):
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", (*(getattr(torch, name) for name in lib.DTYPES), torch.complex64, torch.float8_e5m2),
                         ids=str)
def check_forth_and_back(world, dtype):
    rank, _ = world
    for count in (0, 1, 1000, 300_000):
        x = numbers(count, count, dtype)
        if rank == 0:
            dist.send(x, 1, tag=3)
            y = torch.zeros_like(x)
            assert dist.recv(y, 1) == 1
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        elif rank == 1:
            y = torch.zeros_like(x)
            dist.recv(y, 0, tag=3)
            dist.send(y, 0)


def check_all_to_all_of_sends(world):
    """Every pair, and each rank with itself; all submit their sends first. Tags tell what belongs together."""
    rank, size = world
    works, expected, received = [], [], []
    for peer in range(size):
        for tag in (2, 0, 1):
            works.append(dist.isend(torch.full((10 ** 5 * tag + 1,), 100. * rank + 10 * peer + tag), peer, tag=tag)
                         if peer != rank else _to_itself(torch.full((10 ** 5 * tag + 1,), 110. * rank + tag), tag))
    for tag in (1, 2, 0):
        for peer in range(size):
            into = torch.zeros(10 ** 5 * tag + 1)
            received.append(into)
            expected.append(100. * peer + 10 * rank + tag)
            works.append(dist.group.WORLD.recv([into], peer, tag))
    for work in reversed(works):
        work.wait()
    assert all((into == value).all() for into, value in zip(received, expected))
    assert all(work.is_completed() and work.is_success() for work in works)


def _to_itself(tensor, tag):
    return dist.group.WORLD.send([tensor], dist.get_rank(), tag)  # torch's own functions refuse the own rank


def check_strides_and_futures(world):
    rank, _ = world
    if rank == 0:
        dist.send(torch.arange(12.).view(3, 4).t(), 1)
    elif rank == 1:
        whole = torch.zeros(4, 6)
        work = dist.irecv(whole[:, ::2], 0)
        (came,) = work.get_future().wait()
        assert came.tolist() == torch.arange(12.).view(3, 4).t().tolist() == whole[:, ::2].tolist()
        assert (whole[:, 1::2] == 0).all()


def check_objects(world):
    rank, _ = world
    said = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "two"], 1)
    elif rank == 1:
        dist.recv_object_list(said, 0)
        assert said == [{"a": 1}, "two"]


def check_groups_of_the_same_ranks_do_not_mix(world):
    rank, size = world
    other = dist.new_group(list(range(size)))
    pair = dist.new_group([0, size - 1]) if size > 2 else other
    if rank == 0:
        for group, value in ((other, 2.), (pair, 3.), (dist.group.WORLD, 1.)):
            dist.isend(torch.full((5,), value), size - 1, group=group)
    elif rank == size - 1:
        into = torch.zeros(5)
        for group, value in ((dist.group.WORLD, 1.), (other, 2.), (pair, 3.)):
            dist.recv(into, 0, group=group)
            assert (into == value).all()
    dist.barrier()


def check_a_pipeline_of_two_stages_learns_what_one_process_learns(world):
    """Activations go forward and their gradients back, micro-batch by micro-batch; beside it the ranks all-reduce."""
    rank, size = world
    torch.manual_seed(1)
    stages = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh()), torch.nn.Linear(16, 1)]
    reference = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh()), torch.nn.Linear(16, 1)]
    for mine, theirs in zip(stages, reference):
        theirs.load_state_dict(mine.state_dict())
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(12)]
    step(reference, batches)
    if rank < 2:
        optimizer = torch.optim.SGD(stages[rank].parameters(), 0.1)
        for begin in range(0, len(batches), 4):
            micro = batches[begin:begin + 4]
            optimizer.zero_grad()
            train(rank, stages[rank], micro)
            optimizer.step()
            x = torch.ones(1)
            dist.all_reduce(x, group=dist.group.WORLD) if size == 2 else None
        for mine, theirs in zip(stages[rank].parameters(), reference[rank].parameters()):
            torch.testing.assert_close(mine, theirs)


def step(stages, batches):
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], 0.1)
    for begin in range(0, len(batches), 4):
        optimizer.zero_grad()
        for x, y in batches[begin:begin + 4]:
            torch.nn.functional.mse_loss(stages[1](stages[0](x)), y).backward()
        optimizer.step()


def train(rank, stage, micro):
    """One step of the pipeline: while a micro-batch is computed, the next one and the last one's gradient travel."""
    def exchange(*operations):
        return dist.batch_isend_irecv([dist.P2POp(verb, tensor, 1 - rank) for verb, tensor in operations])
    if rank == 0:
        sent, gradients = [], [torch.zeros(4, 16) for _ in micro]
        for (x, _), gradient in zip(micro, gradients):
            out = stage(x)
            sent.append((out, exchange((dist.isend, out.detach()), (dist.irecv, gradient))))
        for (out, works), gradient in zip(sent, gradients):
            for work in works:
                work.wait()
            out.backward(gradient)
        return
    inputs = [torch.zeros(4, 16) for _ in micro]
    receiving, sending = [exchange((dist.irecv, x)) for x in inputs], []
    for x, works, (_, y) in zip(inputs, receiving, micro):
        works[0].wait()
        x.requires_grad_()
        torch.nn.functional.mse_loss(stage(x), y).backward()
        sending += exchange((dist.isend, x.grad))
    for work in sending:
        work.wait()


# Errors

def check_tensors_that_differ(world):
    rank, _ = world
    text = ("ranks disagree on it: rank 0 .* sends 3 elements of float32, and rank 1 .* receives {}. Give both sides")
    for other, said in ((torch.zeros(4), "4 elements of float32"), (torch.zeros(3, dtype=torch.int64),
                                                                    "3 elements of int64")):
        if rank < 2:
            with pytest.raises(hvd.HorovodInternalError, match=text.format(said)):
                dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(other, 0)
        x = torch.full((3,), float(rank))
        if rank < 2:
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
            assert (x == 0).all()


def check_wrong_arguments(world):
    rank, size = world
    x = torch.ones(1)
    with pytest.raises(NotImplementedError, match="recv of any source: .*names the rank that it is from"):
        dist.recv(x)
    peer = (rank + 1) % size
    for tag in (-1, 1 << 24):
        with pytest.raises(ValueError, match=f"the tag must be from 0 to 16777215, not {tag}"):
            dist.group.WORLD.send([x], peer, tag)
    with pytest.raises(ValueError, match="takes one tensor, not 2"):
        dist.group.WORLD.send([x, x], peer, 0)
    with pytest.raises(ValueError, match="the peer is a rank within the process set"):
        dist.group.WORLD.recv([x], size, 0)
    with pytest.raises(ValueError, match="layout torch.sparse_coo"):
        dist.send(x.to_sparse(), peer)
    with pytest.raises(ValueError, match="send of a tensor: .*meta"):
        dist.group.WORLD.send([torch.empty(1, device="meta")], peer, 0)


def check_time_is_limited(world):
    rank, size = world
    x = torch.zeros(1)
    if rank == 0:
        work = dist.irecv(x, 1, tag=9)
        with pytest.raises(hvd.HorovodInternalError, match="Rank 0 has waited 0.3 s"):
            work.wait(timedelta(seconds=0.3))
    hvd.barrier()
    if rank == 1:
        dist.send(torch.ones(1), 0, tag=9)
    elif rank == 0:
        work.wait()
        assert x.item() == 1


KILLED = """
import torch
import torch.distributed as dist
import lightcc.torch as hvd
hvd.init()
dist.init_process_group("lightcc")
x = torch.zeros(10 ** 6)
dist.recv(x, 0) if dist.get_rank() else dist.send(x, 1)
print("ready", flush=True)
try:
    dist.recv(x, 1 - dist.get_rank(), tag=5)
except hvd.HorovodInternalError as error:
    print("told", error, flush=True)
"""


def test_a_killed_peer_is_named():
    with Ranks(2, KILLED) as job:
        job.wait_ready()
        job.kill(1)
        told = job.output(0)
        assert f"told recv from rank 1 (tag 5): rank 1 (pid {job.processes[1].pid}) on host" in told, told
        assert "died" in told, told

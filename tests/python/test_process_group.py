"""A process group over lightcc: works and futures, errors, groups, and how it begins and ends."""
import re
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import lightcc.torch as hvd
import ranks
from lightcc.torch import process_group


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has new names for some, 2.12 only the old


@pytest.fixture(scope="module")
def world(job):
    dist.init_process_group("lightcc")
    yield
    dist.destroy_process_group()


# Work

def check_works_and_futures(world):
    size = dist.get_world_size()
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.is_success() and work.exception() is None and work.wait() and (x == size).all()
    assert work.result()[0] is x
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]
    futures = [work.get_future() for work in works]
    doubled = [future.then(lambda future: 2 * future.value()[0]) for future in futures]
    assert all((future.wait() == 2 * size).all() for future in doubled)
    assert all(future.done() for future in futures)
    assert (torch.futures.collect_all(futures).wait()[0].wait()[0] == size).all()


def check_futures_come_in_any_order(world):
    """The second operation is done first; a rank starts the first one only when it knows that."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    other = dist.new_group(list(range(size)))  # else calls must be in the same order on all ranks
    x, y = torch.ones(1), torch.ones(1)
    if rank == 0:
        late = dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()[0])
    early = dist.all_reduce(y, async_op=True, group=other).get_future().then(lambda future: future.value()[0])
    assert early.wait().item() == size
    if rank != 0:
        late = dist.all_reduce(x, async_op=True).get_future()
    late.wait()
    assert x.item() == size


def check_time_is_limited(world):
    """A wait ends; the operation is still there, and is finished when the others come."""
    if dist.get_world_size() == 1:
        return
    x = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        begin = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match="Rank 0 has waited 0.3 s"):
            work.wait(timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - begin < 5
        work._timeout = timedelta(seconds=0.3)
        for waited in (work.get_future(), work.get_future().then(lambda future: future.value())):  # the second in C++
            with pytest.raises(RuntimeError, match="Rank 0 has waited 0.3 s"):
                waited.wait()
    hvd.barrier()
    if dist.get_rank() == 0:
        work.wait()
    else:
        dist.all_reduce(x)
    assert x.item() == dist.get_world_size()


def check_works_that_nobody_waits_for(world):
    from lightcc.core import request
    for _ in range(50):
        dist.all_reduce(torch.ones(10), async_op=True)
    dist.barrier()
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    assert len(request._pending) < 10


def collectives(group, put=lambda tensor: tensor):
    """All that returns a Work: a function that starts it, the tensors that it writes here, and what they are then.

    put: brings a tensor to where it is to be.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    last, each = size - 1, [[float(i)] for i in range(size)]
    total, numbers = sum(range(size)), [float(i) for i in range(size)]

    def rooted(kind):
        options = kind()
        options.rootRank = last
        return options

    def full(*shape):
        return put(torch.full(shape, float(rank)))

    def empty(count):
        return put(torch.zeros(count))
    x, sparse = [full(2) for _ in range(6)], put(torch.sparse_coo_tensor([[1]], [1.0], (2,), check_invariants=False))
    x[5] = full(2, 2).t()[0]
    one, all_ones = [empty(1) for _ in range(4)], [[empty(1) for _ in range(size)] for _ in range(4)]
    whole, every = [empty(size) for _ in range(3)], put(torch.arange(float(size)))
    gathered = all_ones[2] if rank == last else []
    return {
        "allreduce": (lambda: group.allreduce([x[0]]), [x[0]], [[total] * 2]),
        "allreduce of strides": (lambda: group.allreduce([x[5]]), [x[5]], [[total] * 2]),
        "allreduce of a sparse tensor": (lambda: group.allreduce([sparse]), [sparse], [[0, size]]),
        "allreduce_coalesced": (lambda: group.allreduce_coalesced(x[1:3]), x[1:3], [[total] * 2] * 2),
        "reduce": (lambda: group.reduce([x[3]], rooted(dist.ReduceOptions)), [x[3]],
                   [[total if rank == last else rank] * 2]),
        "broadcast": (lambda: group.broadcast([x[4]], rooted(dist.BroadcastOptions)), [x[4]], [[last] * 2]),
        "allgather": (lambda: group.allgather([all_ones[0]], [full(1)]), all_ones[0], each),
        "allgather_coalesced": (lambda: group.allgather_coalesced([[t] for t in all_ones[1]], [full(1)]), all_ones[1],
                                each),
        "all_gather_single": (lambda: group.all_gather_single(whole[0], full(1)), [whole[0]], [numbers]),
        "all_gather_single_coalesced": (lambda: group.all_gather_single_coalesced([whole[1]], [full(1)]), [whole[1]],
                                        [numbers]),
        "reduce_scatter": (lambda: group.reduce_scatter([one[0]], [list(every.split(1))]), [one[0]], [[size * rank]]),
        "reduce_scatter_single": (lambda: group.reduce_scatter_single(one[1], every), [one[1]], [[size * rank]]),
        "reduce_scatter_single_coalesced": (lambda: group.reduce_scatter_single_coalesced([one[2]], [every]), [one[2]],
                                            [[size * rank]]),
        "all_to_all_single": (lambda: group.all_to_all_single(whole[2], every, [], []), [whole[2]], [[rank] * size]),
        "alltoall": (lambda: group.alltoall(all_ones[3], list(every.split(1))), all_ones[3], [[rank]] * size),
        "gather": (lambda: group.gather([gathered], [full(1)], rooted(dist.GatherOptions)), gathered,
                   each[:len(gathered)]),
        "scatter": (lambda: group.scatter([one[3]], [list(every.split(1))], rooted(dist.ScatterOptions)), [one[3]],
                    [[rank]]),
        "barrier": (group.barrier, [], []),
    }


def check_works_that_python_has_dropped(world):
    """They are done all the same; C++ can wait for them at any time, and their futures come."""
    def values(outputs):
        return [t.to_dense().tolist() for t in outputs]
    for name in collectives(dist.group.WORLD):
        start, outputs, expected = collectives(dist.group.WORLD)[name]
        start()
        deadline = time.monotonic() + 60
        while values(outputs) != expected:
            assert time.monotonic() < deadline, f"{name}: {values(outputs)}"
            time.sleep(1e-3)
        for use in (dist.Work.wait, lambda work: work.get_future().wait()):
            start, outputs, expected = collectives(dist.group.WORLD)[name]
            in_cpp = start().boxed()
            use(dist.Work.unbox(in_cpp))
            assert values(outputs) == expected, name
            dist.Work.unbox(in_cpp).wait()  # done long ago
        start, outputs, expected = collectives(dist.group.WORLD)[name]
        assert start().get_future().then(lambda future: "done").wait() == "done"
        assert values(outputs) == expected, name


def check_a_dropped_work_that_fails(world, caplog):
    """C++ gets its error, too; the log has it if nobody waits."""
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        return
    for _ in range(2):
        in_cpp = dist.all_reduce(torch.ones(1 + rank), async_op=True).boxed()
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
                dist.Work.unbox(in_cpp).wait()
    dist.all_gather([torch.empty(1 + rank)] * 2, torch.ones(1 + rank, 1 + rank), async_op=True)
    deadline = time.monotonic() + 60
    while not any("nobody waits for has failed" in record.getMessage() for record in caplog.records):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    dist.barrier()


def check_all_of_torch_that_keeps_a_work_is_known():
    """Functions of C++ that are given a Work by Python, by their signatures."""
    found = set()
    cpp = torch._C._distributed_c10d
    for owner in [cpp, *(value for value in vars(cpp).values() if isinstance(value, type))]:
        for name, function in vars(owner).items():
            for arguments in re.findall(rf"^{name}\((.*)\) ->", getattr(function, "__doc__", None) or "", re.MULTILINE):
                if re.search(r"(?<!self): (?:c10d::|[\w.]*\.)Work\b", arguments):
                    found.add(name)
    assert found == {"_set_forward_pass_work_handle", "_register_work"}


def test_a_work_that_is_left_at_the_end_fails_nowhere():
    ranks.run_script("""
import time, torch, torch.distributed as dist, lightcc.torch.process_group
dist.init_process_group("lightcc")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1), async_op=True)
else:
    time.sleep(0.5)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
dist.destroy_process_group()
""", 2)


def check_barrier(world):
    for _ in range(3):
        dist.barrier()
        work = dist.barrier(async_op=True)
        work.wait()
        assert work.is_completed()
    if dist.get_rank() == 0:
        time.sleep(0.1)
    begin = time.monotonic()  # all ranks read one clock
    dist.barrier()
    begins, ends = zip(*hvd.allgather_object((begin, time.monotonic())))
    assert max(begins) <= min(ends)


# Errors

def check_what_it_cannot(world):
    x = torch.ones(2)
    with pytest.raises(NotImplementedError, match="recv of any source"):
        dist.recv(x)
    with pytest.raises(ValueError, match="SUM, AVG.*not .*BAND"):
        dist.all_reduce(x.int(), op=dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="float8_e5m2 is not supported"):
        dist.all_reduce(x.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="meta"):
        dist.all_reduce(x.to("meta"))
    for verb in (lambda: dist.reduce(x.to_sparse(), 0), lambda: dist.broadcast(x.to_sparse(), 0)):
        with pytest.raises(ValueError, match="layout torch.sparse_coo.*to_dense"):
            verb()
    size, there, every = dist.get_world_size(), x.to("meta"), torch.ones(dist.get_world_size())
    for verb in (lambda: dist.all_gather([there] * size, x), lambda: dist.reduce_scatter(there, [x] * size),
                 lambda: dist.all_to_all_single(every.to("meta"), every)):
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: tensor 1 .* is on meta, and tensor 0 on cpu"):
            verb()
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def check_ranks_that_disagree(world):
    if dist.get_world_size() == 1:
        return
    for asynchronous in (False, True):
        with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
            work = dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=asynchronous)
            work.wait()
    work = dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True)
    with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success() and "disagree" in str(work.exception())
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()


# Groups

def check_groups(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    for members in ([0], [size - 1, 0] if size > 1 else [0], list(range(1, size)), list(range(size))):
        if not members:
            continue
        for _ in range(2):  # a second group of the same ranks
            group = dist.new_group(members)
            if rank not in members:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert dist.get_process_group_ranks(group) == sorted(members) and group.size() == len(members)
            assert dist.get_rank(group) == sorted(members).index(rank) and dist.get_backend(group) == "lightcc"
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(members)
            dist.broadcast(x.fill_(rank), src=max(members), group=group)
            assert x.item() == max(members)
            gathered = [None] * len(members)
            dist.all_gather_object(gathered, rank, group=group)
            assert gathered == sorted(members)
            dist.barrier(group=group)
            dist.destroy_process_group(group)


def check_groups_that_cannot_be(world):
    if dist.get_world_size() < 3:
        return
    with pytest.raises(ValueError, match="order of ranks"):
        dist.new_group([1, 0], sort_ranks=False)
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="use_local_synchronization"):
            dist.new_group([0, 1], use_local_synchronization=True)
    dist.barrier()


def check_groups_of_other_backends(world):
    """torch makes them itself, or says that it cannot, as beside any default group; none is lightcc's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for backend in ("gloo", "cpu:gloo"):
        group = dist.new_group(backend=backend)
        assert dist.get_backend(group) == backend and type(group) is dist.ProcessGroup
        x = torch.tensor([3, 1 + rank])
        dist.all_reduce(x, dist.ReduceOp.BXOR, group=group)  # which lightcc has not
        assert x[0].item() == (3 if size % 2 else 0)
        if size > 1 and rank < 2:
            dist.send(x.fill_(7), 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
            assert x.tolist() == [7, 7]
        dist.barrier(group=group)
    alone = dist.new_group([size - 1], backend="gloo")
    assert (alone == dist.GroupMember.NON_GROUP_MEMBER) == (rank != size - 1)
    for backend, error, text in (("mpi", RuntimeError, "MPI"), ("nobodys", AssertionError, "nobodys"),
                                 ("cpu:lightcc,cuda:gloo", ValueError, "new_group.backend='gloo'"),
                                 ("cpu:lightcc,xpu:lightcc", ValueError, "not of xpu")):
        if backend == "mpi" and dist.is_mpi_available():
            continue
        with pytest.raises(error, match=text), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch does not know what devices the unknown one has
            dist.new_group(backend=backend)
    for backend in (None, "lightcc", "LIGHTCC", "cpu:lightcc", "cuda:lightcc", "cpu:lightcc,cuda:lightcc"):
        group = dist.new_group(backend=backend)
        assert type(group) is process_group.ProcessGroup
        dist.all_reduce(x.fill_(1), group=group)
        assert x.tolist() == [size, size]
    with pytest.raises(NotImplementedError, match="new_group"):
        group.split_group([0])


def check_device_mesh_with_a_dimension_of_another_backend(world):
    from torch.distributed.device_mesh import init_device_mesh
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"), backend_override={"a": "gloo"})
    assert [dist.get_backend(mesh.get_group(name)) for name in "ab"] == ["gloo", "lightcc"]
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.get_group("a"))
    dist.all_reduce(x, group=mesh.get_group("b"))
    assert x.item() == size


def check_device_mesh(world):
    size = dist.get_world_size()
    from torch.distributed.device_mesh import init_device_mesh
    shape = (2, 2) if size == 4 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.get_group("a"))
    dist.all_reduce(x, group=mesh.get_group("b"))
    assert x.item() == size


def check_functional_collectives(world):
    import torch.distributed._functional_collectives as functional
    size, group = dist.get_world_size(), list(range(dist.get_world_size()))
    x = torch.arange(2 * size, dtype=torch.float32)
    assert torch.equal(functional.all_reduce(x, "sum", group), size * x)
    assert functional.all_gather_tensor(x, 0, group).tolist() == x.tolist() * size
    rank = dist.get_rank()
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group), size * x[2 * rank:2 * rank + 2])
    assert functional.all_to_all_single(x, None, None, group).tolist() == x[2 * rank:2 * rank + 2].tolist() * size


def check_calls_that_go_together(world):
    size, rank = dist.get_world_size(), dist.get_rank()
    xs, wholes, parts = ([torch.full((count,), 1.0 + rank) for _ in range(3)] for count in (4, 4 * size, 4))
    together = dist.distributed_c10d._coalescing_manager
    for call in (lambda i: dist.all_gather_into_tensor(wholes[i], xs[i]),
                 lambda i: dist.reduce_scatter_tensor(parts[i], wholes[i]), lambda i: dist.all_reduce(xs[i])):
        with together(async_ops=True) as manager:
            for i in range(3):
                call(i)
        manager.wait()
    total = size * (size + 1) / 2
    assert all(whole[::4].tolist() == [1.0 + other for other in range(size)] for whole in wholes)
    assert all((part == size * (1 + rank)).all() and (x == total).all() for part, x in zip(parts, xs))
    with pytest.raises(NotImplementedError, match="leave out the device"), together(device=torch.device("cpu")):
        pass
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size, "calls after that error are done one by one"


def check_what_torch_asks_a_group(world):
    group = dist.group.WORLD
    assert group._device_types[0] == torch.device("cpu") and dist.distributed_c10d._device_capability()[0] == "cpu"
    backend = group._get_backend(torch.device("cpu"))
    assert not backend.supports_splitting and not backend.supports_tensor_alloc(torch.device("cpu"))


# Begin and end; the last check ends the group

def check_begin_and_end_by_torch_alone(world):
    dist.destroy_process_group()
    assert hvd.is_initialized()  # it was not init_process_group that initialised it
    hvd.barrier()
    hvd.shutdown()
    for backend in ("cpu:lightcc,cuda:gloo", "cuda:gloo,cpu:lightcc"):
        with pytest.raises(ValueError, match="shares no group with another backend"):
            dist.init_process_group(backend)
        assert not dist.is_initialized()
    for backend in ("lightcc", "cpu:lightcc,cuda:lightcc"):
        dist.init_process_group(backend)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == dist.get_world_size() == hvd.size()
        dist.destroy_process_group()
        assert not hvd.is_initialized()
    hvd.init()
    dist.init_process_group("lightcc")

"""The collectives of torch.distributed over lightcc: reductions against gloo's, the others against what is known."""
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


# torch 2.13 has new names for some, 2.12 only the old
pytestmark = [pytest.mark.torch_sizes, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def world(job):
    """The default group is lightcc's; beside it gloo's, as the reference. Returns both."""
    dist.init_process_group("lightcc")
    assert isinstance(dist.group.WORLD, process_group.ProcessGroup) and dist.get_backend() == "lightcc"
    store = dist.PrefixStore("reference", dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=60))
    yield dist.group.WORLD, gloo
    dist.destroy_process_group()


DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16)


def tensor(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def both(world, function):
    """What a function leaves in its tensors, over lightcc and over gloo; it returns (work, tensors)."""
    results = []
    for group in world:
        work, tensors = function(group)
        assert work.wait() is not False
        results.append(tensors)
    return results


def expect_equal(world, function):
    mine, theirs = both(world, function)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def options(kind, asynchronous=True, **values):
    result = kind()
    result.asyncOp = asynchronous
    for name, value in values.items():
        setattr(result, name, value)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ("SUM", "MIN", "MAX", "PRODUCT"))
@pytest.mark.parametrize("asynchronous", (True, False))
def check_reductions(world, dtype, op, asynchronous):
    op, size = getattr(dist.ReduceOp, op), dist.get_world_size()

    def allreduce(group):
        x = tensor(1, 5, 3, dtype=dtype)
        return group.allreduce([x], options(dist.AllreduceOptions, asynchronous, reduceOp=op)), [x]

    def reduce(group):
        x = tensor(2, 5, dtype=dtype)
        before = x.clone()
        opts = options(dist.ReduceOptions, asynchronous, reduceOp=op, rootRank=size - 1)
        return group.reduce([x], opts), [x if dist.get_rank() == size - 1 else before]

    def reduce_scatter(group):
        parts, output = [tensor(3 + i, 2, 2, dtype=dtype) for i in range(size)], torch.empty(2, 2, dtype=dtype)
        opts = options(dist.ReduceScatterOptions, asynchronous, reduceOp=op)
        return group.reduce_scatter([output], [parts], opts), [output]
    for function in (allreduce, reduce, reduce_scatter):
        expect_equal(world, function)


SPARSE = {  # by rank: how many entries, of which the first few places repeat
    "other numbers on each rank": lambda rank: 2 + 3 * rank,
    "none on one": lambda rank: 4 * rank,
    "none at all": lambda rank: 0,
}


@pytest.mark.parametrize("count", SPARSE)
@pytest.mark.parametrize("dense", ((), (3,), (2, 3)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64, torch.bfloat16), ids=str)
def check_sparse_sums(world, count, dense, dtype):
    """Coalesced or not, in place, and the result coalesced, as gloo has it."""
    count, rank = SPARSE[count](dist.get_rank()), dist.get_rank()
    indices = torch.tensor([[(rank + i) % 4 for i in range(count)], [i % 3 for i in range(count)]]).reshape(2, count)
    for coalesced in (False, rank % 2 == 0, True):
        for asynchronous in (True, False):
            def allreduce(group):
                x = torch.sparse_coo_tensor(indices, tensor(1, count, *dense, dtype=dtype), (4, 3, *dense),
                                            check_invariants=False)
                x = x.coalesce() if coalesced else x
                work = group.allreduce([x], options(dist.AllreduceOptions, asynchronous))
                work.wait()
                assert x.is_coalesced()
                return work, [x.indices(), x.values()]
            expect_equal(world, allreduce)


def check_sparse_tensors_that_gloo_does_not_sum(world):
    size = dist.get_world_size()

    def ones(dtype, *shape):
        return torch.sparse_coo_tensor([[1, 1]], torch.ones(2, dtype=dtype), *shape, check_invariants=False)
    x, y = ones(torch.float32, (3,)), ones(torch.float64, (4,))
    dist.group.WORLD.allreduce([x, y], options(dist.AllreduceOptions)).wait()
    assert x.to_dense().tolist() == [0, 2 * size, 0] and y.to_dense().tolist() == [0, 2 * size, 0, 0]
    for dtype in (torch.float16, torch.complex64):
        x = ones(dtype, (3,))
        work = dist.group.WORLD.allreduce([x], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG))
        assert work.result()[0].to_dense().tolist() == [0, 2, 0]
    x = torch.nn.Parameter(ones(torch.float32, (3,)))
    dist.all_reduce(x)
    assert x.detach().to_dense().tolist() == [0, 2 * size, 0]


def check_complex_numbers_have_a_sum_and_no_other_reduction(world):
    size = dist.get_world_size()
    x = torch.tensor([1 + 1j, 2 - 1j])
    dist.reduce(x, 0)
    assert dist.get_rank() != 0 or x.tolist() == [size * (1 + 1j), size * (2 - 1j)]
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        with pytest.raises(ValueError, match="no other reduction"):
            dist.reduce(x, 0, op=op)


def check_a_view_with_another_sign_than_its_memory(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    z = torch.tensor([complex(0, rank + 1)]).conj()
    outputs = [torch.empty(1) for _ in range(size)]
    dist.all_gather(outputs, z.imag)
    assert [x.item() for x in outputs] == [-float(i + 1) for i in range(size)]
    dist.all_reduce(z.imag)
    assert z.imag.item() == -size * (size + 1) / 2


def check_sparse_tensors_that_cannot_be_sent(world):
    x = torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), check_invariants=False)
    for text, call in (("sum or an average", lambda: dist.all_reduce(x, dist.ReduceOp.MAX)),
                       ("bool has no sum", lambda: dist.all_reduce(x.bool())),
                       ("layout torch.sparse_csr", lambda: dist.group.WORLD.allreduce([x.to_sparse_csr()])),
                       ("layout torch.strided", lambda: dist.group.WORLD.allreduce([x, torch.ones(2)])),
                       ("all_reduce only", lambda: dist.group.WORLD.allreduce([torch.ones(2), x])),
                       ("all_reduce only", lambda: dist.broadcast(x, 0)),
                       ("all_reduce only", lambda: dist.reduce(x, 0))):
        with pytest.raises(ValueError, match=text), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: CSR is in beta
            call()
    if dist.get_world_size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
            dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2 + dist.get_rank(),), check_invariants=False))
    dist.all_reduce(x)
    assert x.to_dense()[0, 0].item() == dist.get_world_size()


def check_average(world):
    x = tensor(1, 4)
    expected = torch.stack(hvd.allgather(x.reshape(1, -1)).unbind()).mean(0)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(x, expected)
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, torch.ones(2 * dist.get_world_size()), op=dist.ReduceOp.AVG)
    assert output.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", (*DTYPES, torch.bool, torch.complex64, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize("asynchronous", (True, False))
def check_moving_data(world, dtype, asynchronous):
    """Each through torch's own functions, and against what is known."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def of(sender, receiver=0):
        return torch.tensor([[sender % 2, receiver % 2, 1]]).to(dtype)

    def run(verb, *arguments, **named):
        work = verb(*arguments, async_op=asynchronous, **named)
        if asynchronous:
            work.wait()

    def expect(found, expected):
        assert found.dtype == dtype
        assert found.to(torch.complex64).tolist() == expected.to(torch.complex64).tolist()

    x = of(rank)
    run(dist.broadcast, x, src=size - 1)
    expect(x, of(size - 1))
    outputs = [torch.zeros(1, 3).to(dtype) for _ in range(size)]
    run(dist.all_gather, outputs, of(rank))
    expect(torch.cat(outputs), torch.cat([of(i) for i in range(size)]))
    outputs = [torch.zeros(1, 3).to(dtype) for _ in range(size)]
    run(dist.all_to_all, outputs, [of(rank, i) for i in range(size)])
    expect(torch.cat(outputs), torch.cat([of(i, rank) for i in range(size)]))
    for root in range(size):
        outputs = [torch.zeros(1, 3).to(dtype) for _ in range(size)] if rank == root else None
        run(dist.gather, of(rank), outputs, dst=root)
        if rank == root:
            expect(torch.cat(outputs), torch.cat([of(i) for i in range(size)]))
        x = torch.zeros(1, 3).to(dtype)
        run(dist.scatter, x, [of(root, i) for i in range(size)] if rank == root else None, src=root)
        expect(x, of(root, rank))
    if dtype in (torch.bool, torch.float8_e5m2):
        return
    whole = torch.zeros(size, 3).to(dtype)
    run(dist.all_gather_into_tensor, whole, of(rank))
    expect(whole, torch.cat([of(i) for i in range(size)]))


def check_all_to_all_of_unequal_parts(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    send, receive = [i + 1 for i in range(size)], [rank + 1] * size
    x, y = torch.full((sum(send), 2), float(rank)), torch.empty(sum(receive), 2)
    dist.all_to_all_single(y, x, receive, send)
    assert y[:, 1].tolist() == [float(i) for i in range(size) for _ in range(rank + 1)]
    with pytest.raises(ValueError, match="rows"):
        dist.all_to_all_single(y, x, receive, [1] * size + [5])
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((i + 1,), float(rank)) for i in range(size)])
    assert [t.tolist() for t in outputs] == [[float(i)] * (rank + 1) for i in range(size)]


def check_gathering_of_unequal_shapes_and_several_tensors(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(i + 1) for i in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert [t.tolist() for t in outputs] == [[float(i)] * (i + 1) for i in range(size)]
    with dist._coalescing_manager():
        tensors = [torch.ones(3), torch.ones(2, 2)]
        for t in tensors:
            dist.all_reduce(t)
    assert all((t == size).all() for t in tensors)
    with dist._coalescing_manager():
        gathered = [torch.empty(size, 2), torch.empty(size, 1)]
        for t in gathered:
            dist.all_gather_into_tensor(t, torch.full((1, t.shape[1]), float(rank)))
    assert all(t[:, 0].tolist() == list(range(size)) for t in gathered)
    with dist._coalescing_manager():
        parts = [torch.empty(2), torch.empty(1)]
        for t in parts:
            dist.reduce_scatter_tensor(t, torch.ones(size * len(t)))
    assert all((t == size).all() for t in parts)
    outputs = [[torch.empty(1), torch.empty(2)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [torch.full((1,), float(rank)), torch.full((2,), rank + 0.5)])
    assert all((a == i).all() and (b == i + 0.5).all() for i, (a, b) in enumerate(outputs))


def check_any_layout_and_gradients(world):
    size = dist.get_world_size()
    x = torch.ones(3, 4).t()
    dist.all_reduce(x)
    assert (x == size).all() and x.stride() == (1, 4)
    parameter = torch.nn.Parameter(torch.ones(4)[::2])
    with torch.no_grad():
        dist.all_reduce(parameter)
    assert (parameter == size).all()
    wide = torch.zeros(2, 2 * size)[:, ::2]
    dist.all_gather([wide[0, i:i + 1] for i in range(size)], torch.ones(1))
    assert (wide[0] == 1).all() and (wide[1] == 0).all()
    empty, scalar = torch.empty(0, 3), torch.tensor(1.0)
    dist.all_reduce(empty)
    dist.all_reduce(scalar)
    assert scalar.item() == size
    dist.broadcast(empty, 0)


def check_objects(world):
    rank, size = dist.get_rank(), dist.get_world_size()
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "long": "x" * 1000 * rank})
    assert [thing["rank"] for thing in everything] == list(range(size))
    things = [rank, "x"] if rank == 0 else [None, None]
    dist.broadcast_object_list(things, src=0)
    assert things == [0, "x"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert rank or gathered == list(range(size))
    mine = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None)
    assert mine == [rank]

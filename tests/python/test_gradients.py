"""The gradients of the collectives on torch tensors."""
import pytest
import torch

import lightcc.torch as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def weights(*shape):
    """A gradient from above, another one on each rank, and its mean over the ranks."""
    ramp = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return ramp * (1 + hvd.rank()), ramp * (1 + hvd.size()) / 2


def expect(x, values):
    torch.testing.assert_close(x.grad, values)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_allreduce(op):
    weight, mean = weights(2, 3)
    values = mean * (hvd.size() if op == "Sum" else 1) * 0.5 * 3
    options = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    x = leaf(2, 3)
    hvd.allreduce(x, **options).backward(weight)
    expect(x, values)
    x, y = leaf(2, 3), leaf(2, 3)
    torch.autograd.backward(hvd.grouped_allreduce([x, y], **options), [weight, 2 * weight])
    expect(x, values)
    expect(y, 2 * values)


def check_allreduce_of_an_expression():
    x = leaf(2)
    (hvd.allreduce(x * x, op=hvd.Sum).sum() * (1 + hvd.rank())).backward()
    expect(x, torch.full((2,), 2.0 * sum(1 + rank for rank in range(hvd.size()))))


def check_allreduce_compressed():
    x = leaf(4)
    hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
    assert x.grad.dtype == torch.float32
    expect(x, torch.full((4,), float(hvd.size())))


def check_allgather():
    rows = range(1, hvd.size() + 1)
    weight, mean = weights(sum(rows), 2)
    mine = mean.split(list(rows))[hvd.rank()]
    x = leaf(rows[hvd.rank()], 2)
    hvd.allgather(x).backward(weight)
    expect(x, mine)
    x, y = leaf(rows[hvd.rank()], 2), leaf(rows[hvd.rank()], 2)
    torch.autograd.backward(hvd.grouped_allgather([x, y]), [weight, -weight])
    expect(x, mine)
    expect(y, -mine)


def check_broadcast():
    weight, mean = weights(3)
    for root in range(hvd.size()):
        x = leaf(3)
        hvd.broadcast(x, root).backward(weight)
        expect(x, mean if hvd.rank() == root else torch.zeros(3))


def check_alltoall():
    x = leaf(2 * hvd.size(), 2)
    weight, _ = weights(2 * hvd.size(), 2)
    hvd.alltoall(x).backward(weight)
    ramp = (weight / (1 + hvd.rank())).chunk(hvd.size())[hvd.rank()]  # what each rank has above our rows
    expect(x, torch.cat([ramp * (1 + rank) for rank in range(hvd.size())]))


def check_alltoall_with_splits():
    size, me = hvd.size(), hvd.rank()
    x = leaf(size + 2, 2)  # a row to each rank, two to nobody
    output, received = hvd.alltoall(x, [1] * size)
    assert not received.requires_grad
    output.backward(torch.full((size, 2), 1.0 + me))
    expect(x, torch.tensor([[1.0 + rank] * 2 for rank in range(size)] + [[0.0, 0.0]] * 2))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_reducescatter(op):
    rows = [2] + [1] * (hvd.size() - 1)
    weight = torch.full((rows[hvd.rank()], 2), 1.0 + hvd.rank())
    values = torch.cat([torch.full((count, 2), 1.0 + rank) for rank, count in enumerate(rows)])
    values *= hvd.size() if op == "Sum" else 1
    x = leaf(hvd.size() + 1, 2)
    hvd.reducescatter(x, op=getattr(hvd, op)).backward(weight)
    expect(x, values)
    x, y = leaf(hvd.size() + 1, 2), leaf(hvd.size() + 1, 2)
    torch.autograd.backward(hvd.grouped_reducescatter([x, y], op=getattr(hvd, op)), [weight, -weight])
    expect(x, values)
    expect(y, -values)


def check_second_derivative():
    x = (torch.arange(3.0) + 1).requires_grad_()
    (first,) = torch.autograd.grad((hvd.allreduce(x) ** 3).sum(), x, create_graph=True)  # x is the same on all ranks
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * x ** 2)
    torch.testing.assert_close(second, 6 * x)


def check_no_graph_where_none_is_wanted():
    with torch.no_grad():
        assert not hvd.allreduce(leaf(2)).requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    assert hvd.allgather(leaf(2)).requires_grad


# Operations and factors

@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def check_other_reductions(op):
    """As in Horovod the gradient travels by the same operation, whatever calculus says."""
    weight, _ = weights(4)
    expected = hvd.allreduce(weight, op=getattr(hvd, op))
    x = leaf(4)
    hvd.allreduce(x, op=getattr(hvd, op)).backward(weight)
    expect(x, expected)
    x, y = leaf(4), leaf(4)
    torch.autograd.backward(hvd.grouped_allreduce([x, y], op=getattr(hvd, op)), [weight, weight])
    expect(x, expected)
    expect(y, expected)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_reducescatter_with_factors(op):
    weight = torch.full((1, 2), 1.0 + hvd.rank())
    values = torch.arange(1.0, 1 + hvd.size()).view(-1, 1).expand(-1, 2) * (hvd.size() if op == "Sum" else 1) * 1.5
    options = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    x, y = leaf(hvd.size(), 2), leaf(hvd.size(), 2)
    hvd.reducescatter(x, **options).backward(weight)
    expect(x, values)
    hvd.grouped_reducescatter([y], **options)[0].backward(weight)
    expect(y, values)


def check_deprecated_average():
    for average, factor in ((True, 1), (False, hvd.size())):
        x = leaf(2)
        with pytest.warns(DeprecationWarning):
            hvd.allreduce(x, average=average).sum().backward()
        expect(x, torch.full((2,), float(factor)))


# Shapes and dtypes

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (17,), (3, 5), (2, 3, 4)], ids=str)
def check_gradients_have_the_dtype_and_shape_of_their_tensor(dtype, shape):
    def one(size):
        return torch.ones(size, dtype=dtype, requires_grad=True)

    for run, result in ((lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.size()),
                        (lambda x: hvd.broadcast(x, 0), float(hvd.rank() == 0))):
        x = one(shape)
        run(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full(shape, result, dtype=dtype))
    if shape:
        shape = (shape[0] * hvd.size(), *shape[1:])
        for run in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            x = one(shape)
            run(x).sum().backward()
            torch.testing.assert_close(x.grad, torch.ones(shape, dtype=dtype))


def check_rows_of_every_kind():
    """allgather and alltoall with other rows on each rank, none on some."""
    size, me = hvd.size(), hvd.rank()
    x = leaf(2 * me, 3)  # rank 0 has no row
    hvd.allgather(x).backward(torch.ones(size * (size - 1), 3) * (1 + me))
    expect(x, torch.full((2 * me, 3), (1 + size) / 2))
    splits = [me + to for to in range(size)]
    x = leaf(sum(splits), 2)
    output, received = hvd.alltoall(x, torch.tensor(splits, dtype=torch.int32))
    assert received.tolist() == [me + source for source in range(size)]
    output.backward(torch.full(output.shape, 1.0 + me))
    expect(x, torch.cat([torch.full((rows, 2), 1.0 + to) for to, rows in enumerate(splits)]))
    x = leaf(size, 2)  # all rows go to rank 0
    output, _ = hvd.alltoall(x, [size] + [0] * (size - 1))
    output.backward(torch.full(output.shape, 5.0))
    expect(x, torch.full((size, 2), 5.0))


# Graphs

def check_double_use():
    x = leaf(3)
    (hvd.allreduce(x) + 2 * hvd.allreduce(x, op=hvd.Sum) + x).sum().backward()
    expect(x, torch.full((3,), 2.0 + 2 * hvd.size()))
    y = hvd.allgather(x)
    x.grad = None
    (y.sum() + (3 * y).sum()).backward()
    expect(x, torch.full((3,), 4.0))


def check_two_backwards():
    x = leaf(3)
    y = hvd.allreduce(x, op=hvd.Sum).sum()
    for times in (1, 2):
        y.backward(retain_graph=True)
        expect(x, torch.full((3,), float(times * hvd.size())))


def check_chains_of_collectives():
    x = leaf(hvd.size())
    y = hvd.broadcast(hvd.allreduce(x, op=hvd.Sum), 0)
    z = hvd.reducescatter(hvd.allgather(y), op=hvd.Average)
    z.sum().backward()
    expect(x, torch.ones(hvd.size()))  # only rank 0 has a gradient of y, and the sum over the ranks is that one


@pytest.mark.parametrize("verb", ["grouped_allreduce", "grouped_allgather", "grouped_reducescatter"])
def check_groups_of_which_some_need_gradients(verb):
    """Others may be integers, or of no use to the loss."""
    x, y, z = leaf(hvd.size()), torch.ones(hvd.size()), leaf(hvd.size(), 2)
    numbers = torch.arange(hvd.size())
    results = getattr(hvd, verb)([x, numbers, y, z])
    assert results[0].requires_grad and not results[1].requires_grad and results[1].dtype == numbers.dtype
    results[0].sum().backward()
    expect(x, torch.ones(hvd.size()))
    expect(z, torch.zeros(hvd.size(), 2))
    assert y.grad is None
    with torch.no_grad():
        assert not any(result.requires_grad for result in getattr(hvd, verb)([x, z]))


def check_gradients_that_are_not_contiguous():
    for run in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda x: hvd.broadcast(x, 0)):
        x = leaf(hvd.size(), 2)
        run(x).t().contiguous().sum().backward()
        assert x.grad.shape == x.shape
        x = leaf(hvd.size(), 2)
        run(x).sum().expand(3).sum().backward()
        assert x.grad.shape == x.shape


def check_of_a_parameter_and_of_a_result():
    parameter = torch.nn.Parameter(torch.ones(3))
    scaled = parameter * 2
    hvd.allreduce(scaled, op=hvd.Sum).sum().backward()
    expect(parameter, torch.full((3,), 2.0 * hvd.size()))


def check_what_returns_a_handle_has_no_gradient():
    for start in (hvd.allreduce_async, hvd.allgather_async, hvd.reducescatter_async,
                  lambda x: hvd.broadcast_async(x, 0)):
        assert not hvd.synchronize(start(leaf(hvd.size()))).requires_grad


def check_the_autograd_functions_by_their_names():
    """mpi_ops has them under Horovod's names, with Horovod's arguments."""
    from lightcc.torch import mpi_ops
    world = hvd.global_process_set
    for result in (mpi_ops.HorovodAllreduce.apply(leaf(2), None, None, hvd.Sum, 1.0, 1.0, world),
                   mpi_ops.HorovodGroupedAllreduce.apply(None, None, hvd.Sum, 1.0, 1.0, world, leaf(2))[0],
                   mpi_ops.HorovodAllgather.apply(leaf(2), None, world),
                   mpi_ops.HorovodGroupedAllgather.apply(None, world, leaf(2))[0],
                   mpi_ops.HorovodBroadcast.apply(leaf(2), 0, None, world),
                   mpi_ops.HorovodAlltoall.apply(leaf(hvd.size()), None, None, world)[0],
                   mpi_ops.HorovodReducescatter.apply(leaf(hvd.size()), None, hvd.Sum, world, 1.0, 1.0),
                   mpi_ops.HorovodGroupedReducescatter.apply(None, hvd.Sum, world, 1.0, 1.0, leaf(hvd.size()))[0]):
        assert result.requires_grad and result.grad_fn is not None


# Process sets

@pytest.fixture
def half(job):
    """A set with this rank in it: that of the even ranks, or that of the odd ones."""
    if hvd.size() == 1:
        yield hvd.global_process_set
        return
    halves = [hvd.add_process_set(range(first, hvd.size(), 2)) for first in (0, 1)]
    yield halves[hvd.rank() % 2]
    for process_set in halves:
        assert hvd.remove_process_set(process_set)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_process_sets(half, op):
    size, index, how = half.size(), half.rank(), {"op": getattr(hvd, op), "process_set": half}
    factor = size if op == "Sum" else 1
    mean = (1 + size) / 2  # of 1, 2, ... size
    x, y = leaf(2), leaf(3)
    hvd.allreduce(x, prescale_factor=2.0, **how).backward(torch.full((2,), 1.0 + index))
    expect(x, torch.full((2,), 2 * factor * mean))
    hvd.grouped_allreduce([y], **how)[0].backward(torch.full((3,), 1.0 + index))
    expect(y, torch.full((3,), factor * mean))
    x, y = leaf(size + 1, 2), leaf(size + 1)
    parts = [2] + [1] * (size - 1)
    above = torch.cat([torch.full((rows,), 1.0 + i) for i, rows in enumerate(parts)]) * factor
    hvd.reducescatter(x, **how).backward(torch.full((parts[index], 2), 1.0 + index))
    expect(x, above.view(-1, 1).expand(-1, 2))
    hvd.grouped_reducescatter([y], **how)[0].backward(torch.full((parts[index],), 1.0 + index))
    expect(y, above)


def check_process_sets_and_rows(half):
    size, index = half.size(), half.rank()
    x, y = leaf(1 + index, 2), leaf(1 + index)
    rows = size * (size + 1) // 2
    hvd.allgather(x, process_set=half).backward(torch.full((rows, 2), 1.0 + index))
    expect(x, torch.full((1 + index, 2), (1 + size) / 2))
    hvd.grouped_allgather([y], process_set=half)[0].backward(torch.full((rows,), 1.0 + index))
    expect(y, torch.full((1 + index,), (1 + size) / 2))
    x = leaf(size)
    hvd.alltoall(x, [1] * size, process_set=half)[0].backward(torch.full((size,), 1.0 + index))
    expect(x, torch.arange(1.0, 1 + size))
    for root in half.ranks:
        x = leaf(2)
        hvd.broadcast(x, root, process_set=half).backward(torch.full((2,), 1.0 + index))
        expect(x, torch.full((2,), (1 + size) / 2 if hvd.rank() == root else 0.0))

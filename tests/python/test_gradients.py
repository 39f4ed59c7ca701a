"""The gradients of the collectives: one body for all frameworks that have any."""
import numpy as np
import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.sizes]


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def expect(framework, call, shapes, above, values, dtype="float32"):
    """call(hvd, *ones of these shapes) is a list of tensors; where their gradients are `above`, those of the ones are
    `values`."""
    xs = [framework.tensor(np.ones(shape), dtype) for shape in shapes]
    gradients = framework.gradients(call, xs, [framework.tensor(a, dtype) for a in above])
    assert len(gradients) == len(values)
    for gradient, value in zip(gradients, values):
        framework.expect(gradient, value, dtype)


def weights(hvd, *shape):
    """A gradient from above, another one on each rank, and its mean over the ranks."""
    ramp = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    return ramp * (1 + hvd.rank()), ramp * (1 + hvd.size()) / 2


def full(shape, value):
    return np.full(shape, float(value))


# Each collective

@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_allreduce(differentiable, op):
    weight, mean = weights(differentiable.hvd, 2, 3)
    values = mean * (differentiable.hvd.size() if op == "Sum" else 1) * 0.5 * 3
    options = {"op": getattr(differentiable.hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x, **options)], [(2, 3)], [weight], [values])
    expect(differentiable, lambda hvd, x, y: hvd.grouped_allreduce([x, y], **options), [(2, 3), (2, 3)],
           [weight, 2 * weight], [values, 2 * values])


def check_allreduce_of_an_expression(differentiable):
    count = differentiable.hvd.size()
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x * x, op=hvd.Sum)], [2],
           [full(2, 1 + differentiable.hvd.rank())], [full(2, count * (count + 1))])


def check_allreduce_compressed(differentiable):
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum)], [4],
           [np.ones(4)], [full(4, differentiable.hvd.size())])


def check_allgather(differentiable):
    size, me = differentiable.hvd.size(), differentiable.hvd.rank()
    weight, mean = weights(differentiable.hvd, size * (size + 1) // 2, 2)
    mine = np.split(mean, np.cumsum(range(1, size)))[me]
    expect(differentiable, lambda hvd, x: [hvd.allgather(x)], [(1 + me, 2)], [weight], [mine])
    expect(differentiable, lambda hvd, x, y: hvd.grouped_allgather([x, y]), [(1 + me, 2)] * 2, [weight, -weight],
           [mine, -mine])


def check_broadcast(differentiable):
    weight, mean = weights(differentiable.hvd, 3)
    for root in range(differentiable.hvd.size()):
        expect(differentiable, lambda hvd, x: [hvd.broadcast(x, root)], [3], [weight],
               [mean if differentiable.hvd.rank() == root else np.zeros(3)])


def check_alltoall(differentiable):
    size, me = differentiable.hvd.size(), differentiable.hvd.rank()
    weight, _ = weights(differentiable.hvd, 2 * size, 2)
    ramp = np.split(weight / (1 + me), size)[me]  # what each rank has above our rows
    expect(differentiable, lambda hvd, x: [hvd.alltoall(x)], [(2 * size, 2)], [weight],
           [np.concatenate([ramp * (1 + rank) for rank in range(size)])])


def check_alltoall_with_splits(differentiable):
    """A row to each rank, two to nobody."""
    size, me = differentiable.hvd.size(), differentiable.hvd.rank()
    expect(differentiable, lambda hvd, x: [hvd.alltoall(x, [1] * size)[0]], [(size + 2, 2)], [full((size, 2), 1 + me)],
           [np.repeat([1.0 + rank for rank in range(size)] + [0.0, 0.0], 2).reshape(-1, 2)])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_reducescatter(differentiable, op):
    size, how = differentiable.hvd.size(), getattr(differentiable.hvd, op)
    rows = [2] + [1] * (size - 1)
    weight = full((rows[differentiable.hvd.rank()], 2), 1 + differentiable.hvd.rank())
    values = np.concatenate([full((count, 2), 1 + rank) for rank, count in enumerate(rows)])
    values *= size if op == "Sum" else 1
    expect(differentiable, lambda hvd, x: [hvd.reducescatter(x, op=how)], [(size + 1, 2)], [weight], [values])
    expect(differentiable, lambda hvd, x, y: hvd.grouped_reducescatter([x, y], op=how), [(size + 1, 2)] * 2,
           [weight, -weight], [values, -values])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_reducescatter_with_factors(differentiable, op):
    size = differentiable.hvd.size()
    weight = full((1, 2), 1 + differentiable.hvd.rank())
    values = np.repeat(np.arange(1.0, 1 + size), 2).reshape(-1, 2) * (size if op == "Sum" else 1) * 1.5
    options = {"op": getattr(differentiable.hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    expect(differentiable, lambda hvd, x: [hvd.reducescatter(x, **options)], [(size, 2)], [weight], [values])
    expect(differentiable, lambda hvd, x: hvd.grouped_reducescatter([x], **options), [(size, 2)], [weight], [values])


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def check_other_reductions(differentiable, op):
    """As in Horovod the gradient travels by the same operation, whatever calculus says."""
    weight, _ = weights(differentiable.hvd, 4)
    how = getattr(differentiable.hvd, op)
    values = differentiable.values(differentiable.hvd.allreduce(differentiable.tensor(weight, "float32"), op=how))
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x, op=how)], [4], [weight], [values])
    expect(differentiable, lambda hvd, x, y: hvd.grouped_allreduce([x, y], op=how), [4, 4], [weight] * 2, [values] * 2)


# Shapes and dtypes

@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def check_gradients_have_the_dtype_and_shape_of_their_tensor(differentiable, dtype):
    size, is_root = differentiable.hvd.size(), float(differentiable.hvd.rank() == 0)
    shapes = [(), (0,), (17,), (3, 5), (2, 3, 4)]
    ones = [np.ones(shape) for shape in shapes]
    expect(differentiable, lambda hvd, *xs: [hvd.allreduce(x, op=hvd.Sum) for x in xs], shapes, ones,
           [one * size for one in ones], dtype)
    expect(differentiable, lambda hvd, *xs: [hvd.broadcast(x, 0) for x in xs], shapes, ones,
           [one * is_root for one in ones], dtype)
    shapes = [(shape[0] * size, *shape[1:]) for shape in shapes[1:]]
    ones = [np.ones(shape) for shape in shapes]
    for verb, rows in (("allgather", size), ("alltoall", 1), ("reducescatter", 1 / size)):
        expect(differentiable, lambda hvd, *xs: [getattr(hvd, verb)(x) for x in xs], shapes,
               [np.ones((int(shape[0] * rows), *shape[1:])) for shape in shapes], ones, dtype)


def check_rows_of_every_kind(differentiable):
    """allgather and alltoall with other rows on each rank, none on some."""
    size, me = differentiable.hvd.size(), differentiable.hvd.rank()
    expect(differentiable, lambda hvd, x: [hvd.allgather(x)], [(2 * me, 3)],  # rank 0 has no row
           [full((size * (size - 1), 3), 1 + me)], [full((2 * me, 3), (1 + size) / 2)])
    splits = [me + to for to in range(size)]
    expect(differentiable, lambda hvd, x: [hvd.alltoall(x, splits)[0]], [(sum(splits), 2)],
           [full((sum(splits), 2), 1 + me)],
           [np.concatenate([full((rows, 2), 1 + to) for to, rows in enumerate(splits)])])
    expect(differentiable, lambda hvd, x: [hvd.alltoall(x, [size] + [0] * (size - 1))[0]], [(size, 2)],
           [full((size * size if me == 0 else 0, 2), 5)], [full((size, 2), 5)])  # all rows go to rank 0


# Graphs

def check_double_use(differentiable):
    size = differentiable.hvd.size()
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x) + 2 * hvd.allreduce(x, op=hvd.Sum) + x], [3], [np.ones(3)],
           [full(3, 2 + 2 * size)])

    def call(hvd, x):
        y = hvd.allgather(x)
        return [y, 3 * y]

    expect(differentiable, call, [3], [np.ones(3 * size)] * 2, [full(3, 4)])


def check_chains_of_collectives(differentiable):
    def call(hvd, x):
        y = hvd.broadcast(hvd.allreduce(x, op=hvd.Sum), 0)
        return [hvd.reducescatter(hvd.allgather(y), op=hvd.Average)]

    size = differentiable.hvd.size()
    expect(differentiable, call, [size], [np.ones(size)], [np.ones(size)])


def check_groups_of_which_some_need_gradients(differentiable):
    """Others are integers, or of no use to the loss."""
    framework, size = differentiable, differentiable.hvd.size()
    numbers = framework.tensor(np.arange(size), "int32")
    for verb in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
        rows = {"grouped_allreduce": size, "grouped_allgather": size * size, "grouped_reducescatter": 1}[verb]
        expect(framework, lambda hvd, x, y: getattr(hvd, verb)([x, numbers, y])[:1], [size, (size, 2)],
               [np.ones(rows)], [np.ones(size), np.zeros((size, 2))])


# Process sets

@pytest.fixture
def half(job):
    """A set with this rank in it: that of the even ranks, or that of the odd ones."""
    if job.size() == 1:
        yield job.global_process_set
        return
    halves = [job.add_process_set(range(first, job.size(), 2)) for first in (0, 1)]
    yield halves[job.rank() % 2]
    for process_set in halves:
        assert job.remove_process_set(process_set)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def check_process_sets(differentiable, half, op):
    size, index, how = half.size(), half.rank(), {"op": getattr(differentiable.hvd, op), "process_set": half}
    factor = size if op == "Sum" else 1
    mean = (1 + size) / 2  # of 1, 2, ... size
    expect(differentiable, lambda hvd, x: [hvd.allreduce(x, prescale_factor=2.0, **how)], [2], [full(2, 1 + index)],
           [full(2, 2 * factor * mean)])
    expect(differentiable, lambda hvd, x: hvd.grouped_allreduce([x], **how), [3], [full(3, 1 + index)],
           [full(3, factor * mean)])
    parts = [2] + [1] * (size - 1)
    rows = np.concatenate([full(count, 1 + i) for i, count in enumerate(parts)]) * factor
    expect(differentiable, lambda hvd, x: [hvd.reducescatter(x, **how)], [(size + 1, 2)],
           [full((parts[index], 2), 1 + index)], [np.repeat(rows, 2).reshape(-1, 2)])
    expect(differentiable, lambda hvd, x: hvd.grouped_reducescatter([x], **how), [size + 1],
           [full(parts[index], 1 + index)], [rows])


def check_process_sets_and_rows(differentiable, half):
    size, index = half.size(), half.rank()
    rows, mean = size * (size + 1) // 2, (1 + size) / 2
    expect(differentiable, lambda hvd, x: [hvd.allgather(x, process_set=half)], [(1 + index, 2)],
           [full((rows, 2), 1 + index)], [full((1 + index, 2), mean)])
    expect(differentiable, lambda hvd, x: hvd.grouped_allgather([x], process_set=half), [1 + index],
           [full(rows, 1 + index)], [full(1 + index, mean)])
    expect(differentiable, lambda hvd, x: [hvd.alltoall(x, [1] * size, process_set=half)[0]], [size],
           [full(size, 1 + index)], [np.arange(1.0, 1 + size)])
    for root in half.ranks:
        expect(differentiable, lambda hvd, x: [hvd.broadcast(x, root, process_set=half)], [2], [full(2, 1 + index)],
               [full(2, mean if differentiable.hvd.rank() == root else 0)])

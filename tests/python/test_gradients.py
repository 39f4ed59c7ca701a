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

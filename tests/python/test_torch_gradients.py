"""What autograd has beyond the gradients that every framework has (test_gradients.py)."""
import pytest
import torch

import lightcc.torch as hvd
import ranks

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def expect(x, values):
    torch.testing.assert_close(x.grad, values)


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


def check_deprecated_average():
    for average, factor in ((True, 1), (False, hvd.size())):
        x = leaf(2)
        with pytest.warns(DeprecationWarning):
            hvd.allreduce(x, average=average).sum().backward()
        expect(x, torch.full((2,), float(factor)))


def check_two_backwards():
    x = leaf(3)
    y = hvd.allreduce(x, op=hvd.Sum).sum()
    for times in (1, 2):
        y.backward(retain_graph=True)
        expect(x, torch.full((3,), float(times * hvd.size())))


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

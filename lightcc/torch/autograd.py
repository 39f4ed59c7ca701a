"""The collectives as autograd functions. Their gradients are those of the mean of the ranks' losses, as in Horovod.

Each backward runs a collective itself, through the differentiable functions of mpi_ops, so that create_graph works.
"""
import torch

from lightcc import ops
from lightcc.common.process_sets import ProcessSet


class HorovodAllreduce(torch.autograd.Function):
    """The gradient of an allreduce is the allreduce of the gradients, with the same operation and factors."""

    @staticmethod
    def forward(ctx, tensor, average, name, op, prescale_factor, postscale_factor, process_set):
        ctx.reduction = ops.reduce_op(op, average), prescale_factor, postscale_factor, process_set
        return ops.allreduce(tensor, None, name, *ctx.reduction)

    @staticmethod
    def backward(ctx, grad_output):
        return _mpi_ops().allreduce(grad_output.contiguous(), op=ctx.reduction[0], prescale_factor=ctx.reduction[1],
                                    postscale_factor=ctx.reduction[2],
                                    process_set=ctx.reduction[3]), None, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    """HorovodAllreduce for a list of tensors."""

    @staticmethod
    def forward(ctx, average, name, op, prescale_factor, postscale_factor, process_set: ProcessSet, *tensors):
        ctx.reduction = ops.reduce_op(op, average), prescale_factor, postscale_factor, process_set
        return tuple(ops.grouped_allreduce(tensors, None, name, *ctx.reduction))

    @staticmethod
    def backward(ctx, *grad_output):
        grads = _mpi_ops().grouped_allreduce([grad.contiguous() for grad in grad_output], op=ctx.reduction[0],
                                             prescale_factor=ctx.reduction[1], postscale_factor=ctx.reduction[2],
                                             process_set=ctx.reduction[3])
        return (None, None, None, None, None, None, *grads)


class HorovodAllgather(torch.autograd.Function):
    """The gradient of an allgather is this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(ctx, tensor, name, process_set: ProcessSet):
        ctx.rows, ctx.process_set = tensor.shape[:1], process_set
        return ops.allgather(tensor, name, process_set)

    @staticmethod
    def backward(ctx, grad_output):
        average = _mpi_ops().allreduce(grad_output.contiguous(), process_set=ctx.process_set)
        return _own_rows([average], ctx.rows, ctx.process_set)[0], None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """HorovodAllgather for a list of tensors."""

    @staticmethod
    def forward(ctx, name, process_set: ProcessSet, *tensors):
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(ops.grouped_allgather(tensors, name, process_set))

    @staticmethod
    def backward(ctx, *grad_output):
        averages = _mpi_ops().grouped_allreduce([grad.contiguous() for grad in grad_output],
                                                process_set=ctx.process_set)
        return (None, None, *_own_rows(averages, ctx.rows, ctx.process_set))


class HorovodBroadcast(torch.autograd.Function):
    """The gradient of a broadcast is the averaged gradient on the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set: ProcessSet):
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return ops.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx, grad_output):
        grad = _mpi_ops().allreduce(grad_output.contiguous(), process_set=ctx.process_set)
        return grad if _mpi_ops().rank() == ctx.root_rank else torch.zeros_like(grad), None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """The gradient of an alltoall is the alltoall that sends the rows back."""

    @staticmethod
    def forward(ctx, tensor, splits, name, process_set: ProcessSet):
        output, received = ops.synchronize(ops.alltoall_async(tensor, splits, name, process_set))
        ctx.rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, *dead_gradients):
        grad, _ = _mpi_ops().alltoall(grad_output.contiguous(), ctx.received, process_set=ctx.process_set)
        unsent = ctx.rows - grad.shape[0]
        return torch.cat([grad, grad.new_zeros(unsent, *grad.shape[1:])]) if unsent else grad, None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """The gradient of a reducescatter is the allgather of the gradients; times the number of ranks for Sum."""

    @staticmethod
    def forward(ctx, tensor, name, op, process_set, prescale_factor, postscale_factor):
        ctx.factor = _reducescatter_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.process_set = process_set
        return ops.reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)

    @staticmethod
    def backward(ctx, grad_output):
        grad = _mpi_ops().allgather((grad_output * ctx.factor).contiguous(), process_set=ctx.process_set)
        return grad, None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """HorovodReducescatter for a list of tensors."""

    @staticmethod
    def forward(ctx, name, op, process_set, prescale_factor, postscale_factor, *tensors):
        ctx.factor = _reducescatter_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.process_set = process_set
        return tuple(ops.grouped_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor))

    @staticmethod
    def backward(ctx, *grad_output):
        grads = _mpi_ops().grouped_allgather([(grad * ctx.factor).contiguous() for grad in grad_output],
                                             process_set=ctx.process_set)
        return (None, None, None, None, None, *grads)


def _mpi_ops():
    from lightcc.torch import mpi_ops  # late: mpi_ops is built on this module
    return mpi_ops


def _own_rows(tensors, rows, process_set):
    """Of each gathered tensor the rows that came from this rank; `rows` says how many."""
    counts = ops.allgather(torch.tensor(list(rows), device="cpu"), None, process_set).view(-1, len(tensors))
    before = counts[:process_set.rank()].sum(0).tolist()
    return [tensor[first:first + count] for tensor, first, count in zip(tensors, before, rows)]


def _reducescatter_factor(op, process_set, prescale_factor, postscale_factor) -> float:
    if op not in (None, ops.ReduceOps.Sum, ops.ReduceOps.Average):
        raise ValueError("reducescatter has a gradient for Sum and Average only; give it tensor.detach().")
    ranks = process_set.size() if op == ops.ReduceOps.Sum else 1
    return ranks * prescale_factor * postscale_factor

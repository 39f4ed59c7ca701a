"""The collectives that return a new tensor; all are differentiable. Their gradients are those of the mean of the ranks'
losses, as in Horovod. A tensor that needs no gradient takes the short way, past autograd.

Each backward runs a collective itself, through the functions here, so that create_graph works.
"""
import torch

from lightcc.compress import codec
from lightcc.compress.compressors import CoreCompressor, refuse_core
from lightcc.core import ops
from lightcc.core.basics import HorovodBasics
from lightcc.core.ops import Average
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.torch.compression import Compression

_basics = HorovodBasics(__file__)


def _needs_grad(tensor) -> bool:
    try:
        return tensor.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise TypeError(f"A {type(tensor).__name__} cannot be sent: give a torch.Tensor.") from None


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
              postscale_factor=1.0, process_set=global_process_set):
    """Reduces a tensor over the ranks of the set and returns the result; differentiable.

    compression: what travels, e.g. hvd.Compression.fp16. Compression.topk(...) and .int8() want a name, op Average or
    Sum, and the same object each time, else ValueError or nothing fed back; the gradient travels dense. The other
    arguments and errors: lightcc.core.ops.allreduce.

    >>> hvd.allreduce(torch.ones(3))
    tensor([1., 1., 1.])
    """
    if isinstance(compression, CoreCompressor):
        return CompressedAllreduce.apply(compression, name, ops.reduce_op(op, average), prescale_factor,
                                         postscale_factor, process_set, tensor)[0]
    if compression is not Compression.none:
        tensor, ctx = compression.compress(tensor)
        return compression.decompress(allreduce(tensor, average, name, Compression.none, op, prescale_factor,
                                                postscale_factor, process_set), ctx)
    if _needs_grad(tensor):
        return HorovodAllreduce.apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return ops.allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
                      postscale_factor=1.0, process_set=global_process_set):
    """Reduces a list of tensors as one unit and returns a list; differentiable.

    With Compression.topk(...) or .int8() it travels compressed if each of its tensors would; see allreduce.

    >>> hvd.grouped_allreduce([torch.ones(1), torch.ones(2)])
    [tensor([1.]), tensor([1., 1.])]
    """
    if isinstance(compression, CoreCompressor):
        return list(CompressedAllreduce.apply(compression, name, ops.reduce_op(op, average), prescale_factor,
                                              postscale_factor, process_set, *tensors))
    compressed = [compression.compress(tensor) for tensor in tensors]
    tensors = [tensor for tensor, _ in compressed]
    if any(map(_needs_grad, tensors)):
        results = HorovodGroupedAllreduce.apply(average, name, op, prescale_factor, postscale_factor, process_set,
                                                *tensors)
    else:
        results = ops.grouped_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed)]


def allgather(tensor, name=None, process_set=global_process_set):
    """Concatenates the tensors of all ranks of the set along dimension 0; differentiable. See core/ops.py.

    >>> hvd.allgather(torch.ones(2, 3)).shape[0] == 2 * hvd.size()
    True
    """
    if _needs_grad(tensor):
        return HorovodAllgather.apply(tensor, name, process_set)
    return ops.allgather(tensor, name, process_set)


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """Gathers a list of tensors as one unit and returns a list; differentiable.

    >>> len(hvd.grouped_allgather([torch.ones(1), torch.ones(2, 2)]))
    2
    """
    if any(map(_needs_grad, tensors)):
        return list(HorovodGroupedAllgather.apply(name, process_set, *tensors))
    return ops.grouped_allgather(tensors, name, process_set)


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """Returns the root's tensor on every rank of the set; differentiable. root_rank is a world rank.

    >>> hvd.broadcast(torch.tensor([hvd.rank()]), root_rank=0)
    tensor([0])
    """
    if _needs_grad(tensor):
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return ops.broadcast(tensor, root_rank, name, process_set)


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Sends slices of dimension 0 to the ranks of the set; differentiable. See lightcc.core.ops.alltoall.

    Returns the tensor; with splits (tensor, rows received from each rank), the latter where splits is.

    >>> hvd.alltoall(torch.arange(hvd.size())).tolist() == [hvd.rank()] * hvd.size()
    True
    """
    if _needs_grad(tensor):
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
        return output if splits is None else (output, received)
    return ops.alltoall(tensor, splits, name, process_set)


def reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """Reduces, then gives rank i of the set the i-th part of dimension 0; differentiable.

    >>> hvd.reducescatter(torch.ones(hvd.size()))
    tensor([1.])
    """
    refuse_core(compression, "reducescatter")
    tensor, ctx = compression.compress(tensor)
    if _needs_grad(tensor):
        result = HorovodReducescatter.apply(tensor, name, op, process_set, prescale_factor, postscale_factor)
    else:
        result = ops.reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(result, ctx)


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                          prescale_factor=1.0, postscale_factor=1.0):
    """reducescatter of a list of tensors as one unit; returns a list; differentiable.

    >>> hvd.grouped_reducescatter([torch.ones(hvd.size())])
    [tensor([1.])]
    """
    refuse_core(compression, "grouped_reducescatter")
    compressed = [compression.compress(tensor) for tensor in tensors]
    tensors = [tensor for tensor, _ in compressed]
    if any(map(_needs_grad, tensors)):
        results = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)
    else:
        results = ops.grouped_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed)]


# As autograd functions

class HorovodAllreduce(torch.autograd.Function):
    """The gradient of an allreduce is the allreduce of the gradients, with the same operation and factors."""

    @staticmethod
    def forward(ctx, tensor, average, name, op, prescale_factor, postscale_factor, process_set):
        ctx.reduction = ops.reduce_op(op, average), prescale_factor, postscale_factor, process_set
        return ops.allreduce(tensor, None, name, *ctx.reduction)

    @staticmethod
    def backward(ctx, grad_output):
        return allreduce(grad_output.contiguous(), op=ctx.reduction[0], prescale_factor=ctx.reduction[1],
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
        grads = grouped_allreduce([grad.contiguous() for grad in grad_output], op=ctx.reduction[0],
                                             prescale_factor=ctx.reduction[1], postscale_factor=ctx.reduction[2],
                                             process_set=ctx.reduction[3])
        return (None, None, None, None, None, None, *grads)


class CompressedAllreduce(torch.autograd.Function):
    """HorovodGroupedAllreduce through lightcc.compress.codec; the gradients, which have no names, travel dense."""

    @staticmethod
    def forward(ctx, compression: CoreCompressor, name, op, prescale_factor, postscale_factor, process_set, *tensors):
        ctx.reduction = op, prescale_factor, postscale_factor, process_set
        return tuple(codec.allreduce(tensors, compression, name, *ctx.reduction))

    backward = staticmethod(HorovodGroupedAllreduce.backward)


class HorovodAllgather(torch.autograd.Function):
    """The gradient of an allgather is this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(ctx, tensor, name, process_set: ProcessSet):
        ctx.rows, ctx.process_set = tensor.shape[:1], process_set
        return ops.allgather(tensor, name, process_set)

    @staticmethod
    def backward(ctx, grad_output):
        average = allreduce(grad_output.contiguous(), process_set=ctx.process_set)
        return _own_rows([average], ctx.rows, ctx.process_set)[0], None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """HorovodAllgather for a list of tensors."""

    @staticmethod
    def forward(ctx, name, process_set: ProcessSet, *tensors):
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(ops.grouped_allgather(tensors, name, process_set))

    @staticmethod
    def backward(ctx, *grad_output):
        averages = grouped_allreduce([grad.contiguous() for grad in grad_output],
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
        grad = allreduce(grad_output.contiguous(), process_set=ctx.process_set)
        return grad if _basics.rank() == ctx.root_rank else torch.zeros_like(grad), None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """The gradient of an alltoall is the alltoall that sends the rows back."""

    @staticmethod
    def forward(ctx, tensor, splits, name, process_set: ProcessSet):
        output, received = ops.synchronize(ops.alltoall_async(tensor, splits, name, process_set))
        size = process_set.size()
        ctx.sent = [tensor.shape[0] // size] * size if splits is None else \
            splits.tolist() if hasattr(splits, "tolist") else list(splits)
        ctx.rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, *dead_gradients):
        grad, came = alltoall(grad_output.contiguous(), ctx.received, process_set=ctx.process_set)
        return _in_place(grad, came.tolist(), ctx.sent, ctx.rows), None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """The gradient of a reducescatter is the allgather of the gradients; times the number of ranks for Sum."""

    @staticmethod
    def forward(ctx, tensor, name, op, process_set, prescale_factor, postscale_factor):
        ctx.factor = _reducescatter_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return ops.reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)

    @staticmethod
    def backward(ctx, grad_output):
        grad = allgather((grad_output * ctx.factor).contiguous(), process_set=ctx.process_set)
        return _parts_in_place([grad], [ctx.rows], ctx.process_set)[0], None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """HorovodReducescatter for a list of tensors."""

    @staticmethod
    def forward(ctx, name, op, process_set, prescale_factor, postscale_factor, *tensors):
        ctx.factor = _reducescatter_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(ops.grouped_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor))

    @staticmethod
    def backward(ctx, *grad_output):
        grads = grouped_allgather([(grad * ctx.factor).contiguous() for grad in grad_output],
                                             process_set=ctx.process_set)
        return (None, None, None, None, None, *_parts_in_place(grads, ctx.rows, ctx.process_set))


def _own_rows(tensors, rows, process_set):
    """The rows of each gathered tensor that came from this rank; `rows` says how many."""
    me = process_set.rank()
    counts = ops.allgather(torch.tensor([[me, *rows]], device="cpu"), None, process_set)  # ranks that joined send none
    before = counts[counts[:, 0] < me, 1:].sum(0).tolist()
    return [tensor[first:first + count] for tensor, first, count in zip(tensors, before, rows)]


def _parts_in_place(gathered, rows, process_set):
    """Parts of tensors of so many rows, gathered from the ranks that reducescatter cuts them for; zeros for ranks that
    have joined."""
    if all(tensor.shape[0] == count for tensor, count in zip(gathered, rows)):
        return gathered  # on all ranks alike
    size = process_set.size()
    _, there = ops.alltoall(torch.zeros(size, device="cpu"), [1] * size, None, process_set)  # joined ranks send none
    results = []
    for tensor, count in zip(gathered, rows):
        of_ranks = [count // size + (rank < count % size) for rank in range(size)]
        results.append(_in_place(tensor, [part * is_there for part, is_there in zip(of_ranks, there.tolist())],
                                 of_ranks, count))
    return results


def _in_place(tensor, came, of_ranks, rows):
    """A tensor of so many rows whose first ones are of the ranks in turn; zeros where none came. came: how many rows
    of `tensor` are of each rank, either all of them or none."""
    if tensor.shape[0] == rows:
        return tensor
    parts = [part if len(part) == count else tensor.new_zeros(count, *tensor.shape[1:])
             for part, count in zip(tensor.split(came), of_ranks)]
    return torch.cat([*parts, tensor.new_zeros(rows - sum(of_ranks), *tensor.shape[1:])])


def _reducescatter_factor(op, process_set, prescale_factor, postscale_factor) -> float:
    if op not in (None, ops.ReduceOps.Sum, ops.ReduceOps.Average):
        raise ValueError("reducescatter has a gradient for Sum and Average only; give it tensor.detach().")
    ranks = process_set.size() if op == ops.ReduceOps.Sum else 1
    return ranks * prescale_factor * postscale_factor

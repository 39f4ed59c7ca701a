"""The collectives on torch tensors, by the names and signatures of horovod.torch.mpi_ops.

The functions with a handle and those in place are the ones of lightcc.ops. Those that return a new tensor are here,
because they are differentiable; a tensor that needs no gradient takes the short way, past autograd.
"""
import torch

from lightcc import ops
from lightcc.common.basics import HorovodBasics
from lightcc.common.exceptions import HorovodInternalError  # noqa: F401
from lightcc.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set  # noqa: F401
from lightcc.common.util import (  # noqa: F401
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from lightcc.ops import (  # noqa: F401
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    handle_average_backwards_compatibility,
    join,
    poll,
    reducescatter_async,
    synchronize,
)
from lightcc.torch.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
)
from lightcc.torch.compression import Compression
from lightcc.torch.sparse import sparse_allreduce_async  # noqa: F401

_basics = HorovodBasics(__file__)

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product

is_initialized = _basics.is_initialized
size, rank = _basics.size, _basics.rank
local_size, local_rank = _basics.local_size, _basics.local_rank
cross_size, cross_rank = _basics.cross_size, _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled, mpi_built = _basics.mpi_enabled, _basics.mpi_built
gloo_enabled, gloo_built = _basics.gloo_enabled, _basics.gloo_built
nccl_built, ddl_built, ccl_built = _basics.nccl_built, _basics.ddl_built, _basics.ccl_built
cuda_built, rocm_built = _basics.cuda_built, _basics.rocm_built
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline


def init(*args, **kwargs):
    """Meets the other ranks; the arguments are those of HorovodBasics.init (comm, process_sets).

    >>> hvd.init()
    """
    _basics.init(*args, **kwargs)


def shutdown(*args, **kwargs):
    """Leaves the job; operations in flight are given up.

    >>> hvd.init(); hvd.shutdown(); hvd.init()
    """
    _basics.shutdown(*args, **kwargs)


def _needs_grad(tensor) -> bool:
    try:
        return tensor.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise TypeError(f"A {type(tensor).__name__} cannot be sent: give a torch.Tensor.") from None


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
              postscale_factor=1.0, process_set=global_process_set):
    """Reduces a tensor over the ranks of the set and returns the result; differentiable.

    compression: what travels, e.g. hvd.Compression.fp16. The other arguments and errors: lightcc.ops.allreduce.

    >>> hvd.allreduce(torch.ones(3))
    tensor([1., 1., 1.])
    """
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

    >>> hvd.grouped_allreduce([torch.ones(1), torch.ones(2)])
    [tensor([1.]), tensor([1., 1.])]
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    tensors = [tensor for tensor, _ in compressed]
    if any(map(_needs_grad, tensors)):
        results = HorovodGroupedAllreduce.apply(average, name, op, prescale_factor, postscale_factor, process_set,
                                                *tensors)
    else:
        results = ops.grouped_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed)]


def allgather(tensor, name=None, process_set=global_process_set):
    """Concatenates the tensors of all ranks of the set along dimension 0; differentiable. See lightcc.ops.allgather.

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
    """Sends slices of dimension 0 to the ranks of the set; differentiable. See lightcc.ops.alltoall.

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
    compressed = [compression.compress(tensor) for tensor in tensors]
    tensors = [tensor for tensor, _ in compressed]
    if any(map(_needs_grad, tensors)):
        results = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)
    else:
        results = ops.grouped_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed)]

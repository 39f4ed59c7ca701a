"""Every collective for NumPy arrays and PyTorch tensors: lightcc.numpy and lightcc.torch re-export these functions.

Each verb comes as: `verb` (waits, returns a new tensor), `verb_` (waits, in place), `verb_async` and `verb_async_`
(return a handle for poll and synchronize), `grouped_verb...` (a list of tensors as one unit).

What holds for all of them:
  tensors   a contiguous torch.Tensor on the CPU or a CUDA GPU, numpy.ndarray or cupy.ndarray; integers of 8 to 64
            bits, signed or not, float16, float32, float64, bool or bfloat16; any shape, also without elements.
            One operation's tensors are on one device, and on all ranks on the CPU or on all on GPUs. A GPU's are read
            and written in the order of the stream that is the caller's at the call, and that of synchronize goes on
            behind the outputs; no call waits for what the stream gets after it (docs/gpu.md).
  name      what the ranks meet by; may be in flight once per process set, that of a handle until synchronize
            (docs/errors.md). None: numbered in the order of the calls.
  ValueError            this rank's call is wrong (also: unknown process set, not a member, name in flight).
  HorovodInternalError  not initialised or shut down, a rank is lost; or the ranks disagree, which every rank is told,
                        and the next operation works.
  source    horovod.torch.mpi_ops.
The examples stand on their own after `import lightcc.numpy as hvd, numpy as np; hvd.init()`, on any number of ranks.
"""
from operator import index
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

from lightcc.core import lib
from lightcc.core.adapter import adapter_of
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.request import (
    adopt,
    adopt_list,
    complete,
    id_of,
    new_list,
    poll,
    register,
    submit,
    submit_barrier,
    submit_join,
    submit_list,
    synchronize,
)
from lightcc.core.splits import pack
from lightcc.core.util import get_average_backwards_compatibility_fun

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join", "poll",
    "reducescatter", "reducescatter_async", "synchronize",
]

Tensor = TypeVar("Tensor")  # any of these, and the same comes back


class ReduceOps:
    """How a reduction combines values; the same numbers as in the core."""

    Average, Sum, Adasum, Min, Max, Product = lib.OPS


Average = ReduceOps.Average
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(ReduceOps)


def reduce_op(op: Optional[int], average: Optional[bool] = None) -> int:
    """The reduce operation that a call asks for: `op`, or the deprecated `average`, or Average."""
    if op is None and average is None:
        return lib.AVERAGE
    return handle_average_backwards_compatibility(op, average)


def _scatter_op(op: Optional[int]) -> int:
    """reduce_op of a reducescatter."""
    op = reduce_op(op)
    if op == ReduceOps.Adasum:  # Horovod's exception; the core's would be a ValueError
        raise HorovodInternalError("reducescatter has no adasum, which combines whole tensors; use allreduce.")
    return op


# Allreduce

def allreduce(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> Tensor:
    """Reduces a tensor over the ranks of the set, element by element, and returns the result on all of them.

    op: Average (default; integers truncate towards zero), Sum, Adasum, Min, Max, Product. The factors multiply before
    and after the reduction. average is the deprecated form of op; both: ValueError.
    Adasum keeps what the ranks' tensors share and adds up what they do not: a, a gives a; orthogonal a, b give a + b
    (Maleki et al. 2021; docs/design.md). Any number of ranks, any process set; ValueError for integers and bool.

    >>> hvd.allreduce(np.ones(3))
    array([1., 1., 1.])
    """
    adapter = adapter_of(tensor)
    output = adapter.empty_like(tensor)
    return complete(submit(lib.ALLREDUCE, adapter, tensor, output, name, process_set, lib.BLOCK,
                           reduce_op(op, average), prescale_factor, postscale_factor), output)


def allreduce_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> Tensor:
    """allreduce in place: overwrites the tensor and returns it.

    >>> x = np.ones(3); hvd.allreduce_(x) is x
    True
    """
    return complete(submit(lib.ALLREDUCE, adapter_of(tensor), tensor, tensor, name, process_set, lib.BLOCK,
                           reduce_op(op, average), prescale_factor, postscale_factor), tensor)


def allreduce_async(tensor: Any, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:
    """Starts an allreduce and returns its handle at once; the tensor must not change until synchronize.

    >>> hvd.synchronize(hvd.allreduce_async(np.ones(2), op=hvd.Max))
    array([1., 1.])
    """
    adapter = adapter_of(tensor)
    output = adapter.empty_like(tensor)
    return register(submit(lib.ALLREDUCE, adapter, tensor, output, name, process_set, 0, reduce_op(op, average),
                           prescale_factor, postscale_factor), tensor, output, None, "allreduce", name)


def allreduce_async_(tensor: Any, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> int:
    """Starts an allreduce in place and returns its handle; the tensor must not be used until synchronize.

    >>> x = np.ones(2); hvd.synchronize(hvd.allreduce_async_(x)) is x
    True
    """
    return register(submit(lib.ALLREDUCE, adapter_of(tensor), tensor, tensor, name, process_set, 0,
                           reduce_op(op, average), prescale_factor, postscale_factor), tensor, tensor, None,
                    "allreduce", name)


def grouped_allreduce(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                      op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:
    """Reduces a list of tensors as one unit; returns a list. Arguments as for allreduce; dtypes may differ.

    >>> hvd.grouped_allreduce([np.ones(1), np.ones(2)])
    [array([1.]), array([1., 1.])]
    """
    outputs = new_list(tensors)
    return complete(submit_list(lib.ALLREDUCE, tensors, outputs, name, process_set, lib.BLOCK,
                                reduce_op(op, average), prescale_factor, postscale_factor), outputs)


def grouped_allreduce_(tensors: Sequence[Tensor], average: Optional[bool] = None, name: Optional[str] = None,
                       op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> List[Tensor]:
    """grouped_allreduce in place: overwrites the tensors and returns them in a list.

    >>> x = np.ones(2); hvd.grouped_allreduce_([x])[0] is x
    True
    """
    return complete(submit_list(lib.ALLREDUCE, tensors, tensors, name, process_set, lib.BLOCK,
                                reduce_op(op, average), prescale_factor, postscale_factor), list(tensors))


def grouped_allreduce_async(tensors: Sequence[Any], average: Optional[bool] = None, name: Optional[str] = None,
                            op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:
    """Starts a grouped_allreduce and returns one handle for the list.

    >>> hvd.synchronize(hvd.grouped_allreduce_async([np.ones(2)]))
    [array([1., 1.])]
    """
    outputs = new_list(tensors)
    return register(submit_list(lib.ALLREDUCE, tensors, outputs, name, process_set, 0, reduce_op(op, average),
                                prescale_factor, postscale_factor), list(tensors), outputs, None, "grouped allreduce",
                    name)


def grouped_allreduce_async_(tensors: Sequence[Any], average: Optional[bool] = None, name: Optional[str] = None,
                             op: Optional[int] = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:
    """Starts a grouped_allreduce in place and returns one handle for the list.

    >>> x = np.ones(2); hvd.synchronize(hvd.grouped_allreduce_async_([x]))[0] is x
    True
    """
    return register(submit_list(lib.ALLREDUCE, tensors, tensors, name, process_set, 0, reduce_op(op, average),
                                prescale_factor, postscale_factor), list(tensors), list(tensors), None,
                    "grouped allreduce", name)


# Allgather

def allgather(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the tensors of all ranks of the set along dimension 0, in rank order.

    Dimension 0 may differ between ranks, the others not. A tensor without dimensions: HorovodInternalError.

    >>> hvd.allgather(np.ones((2, 3))).shape == (2 * hvd.size(), 3)
    True
    """
    adapter = adapter_of(tensor)
    return complete(submit(lib.ALLGATHER, adapter, tensor, None, name, process_set, lib.BLOCK), None,
                    adopt(adapter, tensor))


def allgather_async(tensor: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an allgather and returns its handle.

    >>> hvd.synchronize(hvd.allgather_async(np.ones(1))).size == hvd.size()
    True
    """
    adapter = adapter_of(tensor)
    return register(submit(lib.ALLGATHER, adapter, tensor, None, name, process_set, 0), tensor, None,
                    adopt(adapter, tensor), "allgather", name)


def grouped_allgather(tensors: Sequence[Tensor], name: Optional[str] = None,
                      process_set: ProcessSet = global_process_set) -> List[Tensor]:
    """Gathers a list of tensors as one unit; returns a list.

    >>> len(hvd.grouped_allgather([np.ones(1), np.ones((2, 2))]))
    2
    """
    return complete(submit_list(lib.ALLGATHER, tensors, None, name, process_set, lib.BLOCK), None,
                    adopt_list(tensors))


def grouped_allgather_async(tensors: Sequence[Any], name: Optional[str] = None,
                            process_set: ProcessSet = global_process_set) -> int:
    """Starts a grouped_allgather and returns one handle for the list.

    >>> len(hvd.synchronize(hvd.grouped_allgather_async([np.ones(1)])))
    1
    """
    return register(submit_list(lib.ALLGATHER, tensors, None, name, process_set, 0), list(tensors), None,
                    adopt_list(list(tensors)), "grouped allgather", name)


# Broadcast

def broadcast(tensor: Tensor, root_rank: int, name: Optional[str] = None,
              process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the root's tensor on every rank of the set; shapes and dtypes must be equal.

    root_rank: a rank of the world, also with a process set; ValueError if it is not a member.

    >>> hvd.broadcast(np.full(2, hvd.rank()), root_rank=0)
    array([0, 0])
    """
    adapter = adapter_of(tensor)
    output = adapter.empty_like(tensor)
    return complete(submit(lib.BROADCAST, adapter, tensor, output, name, process_set, lib.BLOCK,
                           root=index(root_rank)), output)


def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
               process_set: ProcessSet = global_process_set) -> Tensor:
    """broadcast in place: overwrites the tensor with the root's and returns it.

    >>> x = np.full(2, hvd.rank()); hvd.broadcast_(x, root_rank=0) is x
    True
    """
    return complete(submit(lib.BROADCAST, adapter_of(tensor), tensor, tensor, name, process_set, lib.BLOCK,
                           root=index(root_rank)), tensor)


def broadcast_async(tensor: Any, root_rank: int, name: Optional[str] = None,
                    process_set: ProcessSet = global_process_set) -> int:
    """Starts a broadcast and returns its handle.

    >>> hvd.synchronize(hvd.broadcast_async(np.full(2, hvd.rank()), root_rank=0))
    array([0, 0])
    """
    adapter = adapter_of(tensor)
    output = adapter.empty_like(tensor)
    return register(submit(lib.BROADCAST, adapter, tensor, output, name, process_set, 0, root=index(root_rank)),
                    tensor, output, None, "broadcast", name)


def broadcast_async_(tensor: Any, root_rank: int, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> int:
    """Starts a broadcast in place and returns its handle.

    >>> x = np.full(2, hvd.rank()); hvd.synchronize(hvd.broadcast_async_(x, root_rank=0)) is x
    True
    """
    return register(submit(lib.BROADCAST, adapter_of(tensor), tensor, tensor, name, process_set, 0,
                           root=index(root_rank)), tensor, tensor, None, "broadcast", name)


# Alltoall

def alltoall(tensor: Any, splits: Any = None, name: Optional[str] = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Sends slices of dimension 0 to the ranks of the set, and returns what they sent, in rank order.

    splits: how many rows go to each rank, a list or a one-dimensional int32 tensor; they may add up to less than there
    are. None: equal parts. With splits, returns (tensor, rows received from each rank as an int32 tensor).
    ValueError for splits of another dtype, length or sum, or rows that cannot be cut equally.

    >>> hvd.alltoall(np.arange(hvd.size())).tolist() == [hvd.rank()] * hvd.size()
    True
    """
    submitted = _alltoall(tensor, splits, name, process_set, lib.BLOCK)
    output, received = complete(submitted[0], *submitted[1:])
    return output if splits is None else (output, received)


def alltoall_async(tensor: Any, splits: Any = None, name: Optional[str] = None,
                   process_set: ProcessSet = global_process_set) -> int:
    """Starts an alltoall and returns its handle; synchronize returns (tensor, rows received from each rank).

    >>> hvd.synchronize(hvd.alltoall_async(np.arange(hvd.size())))[0].size == hvd.size()
    True
    """
    handle, result, finish = _alltoall(tensor, splits, name, process_set, 0)
    return register(handle, tensor, result, finish, "alltoall", name)


def _alltoall(tensor: Any, splits: Any, name: Optional[str], process_set: ProcessSet,
              flags: int) -> Tuple[int, Any, Callable[[int], Any]]:
    adapter = adapter_of(tensor)
    if not lib.initialized():
        submit(lib.ALLTOALL, adapter, tensor, None, name, process_set, flags)  # raises, saying why
    group = id_of(process_set)
    packed, rows = pack(splits, tensor.shape, process_set.size() or 0, name)
    handle = submit(lib.ALLTOALL, adapter, tensor, None, name, process_set, flags, splits=packed, rows=rows)

    def finish(handle: int) -> Tuple[Any, Any]:
        output = adapter.output(handle, 0, tensor)
        return output, adapter.vector(lib.received_splits(handle, 0, group), splits)
    return handle, None, finish


# Reducescatter

def reducescatter(tensor: Tensor, name: Optional[str] = None, op: Optional[int] = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Tensor:
    """Reduces, then gives rank i of the set the i-th part of dimension 0; the first `rows % size` ranks get one more.

    op: Average or Sum; HorovodInternalError for the others. Factors as for allreduce. ValueError for a tensor without
    dimensions.

    >>> hvd.reducescatter(np.ones(hvd.size()))
    array([1.])
    """
    adapter = adapter_of(tensor)
    return complete(submit(lib.REDUCESCATTER, adapter, tensor, None, name, process_set, lib.BLOCK, _scatter_op(op),
                           prescale_factor, postscale_factor), None, adopt(adapter, tensor))


def reducescatter_async(tensor: Any, name: Optional[str] = None, op: Optional[int] = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> int:
    """Starts a reducescatter and returns its handle.

    >>> hvd.synchronize(hvd.reducescatter_async(np.ones(hvd.size())))
    array([1.])
    """
    adapter = adapter_of(tensor)
    return register(submit(lib.REDUCESCATTER, adapter, tensor, None, name, process_set, 0, _scatter_op(op),
                           prescale_factor, postscale_factor), tensor, None, adopt(adapter, tensor),
                    "reducescatter", name)


def grouped_reducescatter(tensors: Sequence[Tensor], name: Optional[str] = None, op: Optional[int] = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> List[Tensor]:
    """reducescatter of a list of tensors as one unit; returns a list.

    >>> hvd.grouped_reducescatter([np.ones(hvd.size())])
    [array([1.])]
    """
    return complete(submit_list(lib.REDUCESCATTER, tensors, None, name, process_set, lib.BLOCK, _scatter_op(op),
                                prescale_factor, postscale_factor), None, adopt_list(tensors))


def grouped_reducescatter_async(tensors: Sequence[Any], name: Optional[str] = None, op: Optional[int] = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:
    """Starts a grouped_reducescatter and returns one handle for the list.

    >>> hvd.synchronize(hvd.grouped_reducescatter_async([np.ones(hvd.size())]))
    [array([1.])]
    """
    return register(submit_list(lib.REDUCESCATTER, tensors, None, name, process_set, 0, _scatter_op(op),
                                prescale_factor, postscale_factor), list(tensors), None, adopt_list(list(tensors)),
                    "grouped reducescatter", name)


# Barrier

def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once all ranks of the set have called it. ValueError if this rank is not a member.

    >>> hvd.barrier()
    """
    complete(submit_barrier(process_set), None)


# Join

def join(device: int = -1) -> int:
    """Says that this rank has no more data, and returns once all ranks have said so: the rank that did so last.

    Until then the collectives of the other ranks, in every process set, go on without this one, which stands by:
      allreduce, reducescatter   it adds zeros, and Average still divides by all ranks of the set; Min, Max and Product
                                 are those of the ranks that have data
      allgather, alltoall        it sends no rows; what is sent to it is dropped
      broadcast                  works, but from this rank: HorovodInternalError on those that call it
      barrier                    does not wait for it
      add_process_set, remove_process_set   HorovodInternalError: they need all ranks
    What this rank has started before takes part with its data. Afterwards the numbering of operations without a name
    begins anew. device is ignored: this rank's part is done by the CPU.
    ValueError for any operation of this rank (from another thread) meanwhile, and with a table of lightcc.embedding:
    use its serve(). HorovodInternalError if a rank leaves or dies. Ctrl-C ends the job on all ranks.
    Source: horovod.torch.mpi_ops (where only allreduce goes on).

    >>> hvd.join() in range(hvd.size())
    True
    """
    return complete(submit_join(), None, lib.last_joined)

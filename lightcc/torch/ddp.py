"""lightcc under torch's own DistributedDataParallel: one line, and its gradients are averaged by lightcc.

    model = torch.nn.parallel.DistributedDataParallel(model)      # over gloo, or over lightcc (process_group)
    model.register_comm_hook(None, lightcc.torch.ddp.comm_hook)

The buckets travel while backward goes on, on GPUs too. DistributedDataParallel's process group is then only asked for
the rest: buffers and, with find_unused_parameters, which parameters were used.
"""
from dataclasses import dataclass
from typing import Any, Callable, Optional, Set, Tuple

import torch
import torch.distributed as dist

from lightcc import _torch_backend
from lightcc.compress.compressors import refuse_core
from lightcc.core import lib
from lightcc.core.adapter import adapter_of
from lightcc.core.ops import ReduceOps
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.request import submit, submit_list
from lightcc.core.wrapper_arguments import check_predivide
from lightcc.torch.compiling import keep_out
from lightcc.torch.compression import Compression
from lightcc.torch.futures import Operation, future_of
from lightcc.torch.sparse import SUMS
from lightcc.torch.sparse_sum import entries, summed

__all__ = ["Options", "comm_hook"]


@dataclass(frozen=True)
class Options:
    """What comm_hook may be told: its `state`.

    op: Average, Sum, Adasum, Min, Max or Product, over buckets. compression: hvd.Compression.none, .fp16 or .bf16, or
    another Compressor, but not topk or int8, as buckets change. gradient_predivide_factor: with Average, divide by it
    before the sum and by size / factor after.
    process_set: the ranks of the model's process group, if that is not the world. name: tells the buckets of models
    apart whose backward passes are not in the same order on all ranks.

    >>> Options(compression=hvd.Compression.fp16, name="generator").op == hvd.Average
    True
    """

    op: int = ReduceOps.Average
    compression: Any = Compression.none
    gradient_predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    name: str = "ddp"

    def __post_init__(self):
        check_predivide(self.gradient_predivide_factor, self.op)
        refuse_core(self.compression, "comm_hook, whose buckets change,")


_default = Options()
_in_flight: Set[str] = set()  # names
_Submitted = Tuple[int, Any, Callable[[int], None]]  # the handle, what is sent, and what to do when it has come


def comm_hook(state: Optional[Options], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DistributedDataParallel.register_comm_hook: averages a bucket with lightcc's allreduce.

    state: None, or Options. bucket: gradients on the CPU or a CUDA GPU, dense or one that is sparse (sparse_coo; op:
    Average or Sum).
    Returns a future of the bucket's reduced buffer, of the same shape, dtype and device, which is complete at the end
    of backward at the latest. On a GPU it is complete when the work is queued there: who waits for it has the current
    stream go on behind the result, and the stream of backward goes on meanwhile.
    Errors leave backward, after DistributedDataParallel is done with its buckets, which then hold this rank's own
    gradients; the model stays usable. HorovodInternalError: not initialised, a rank is lost, the ranks disagree;
    ValueError: a tensor that lightcc cannot send, ranks other than those of the process group.
    Source: torch.distributed.algorithms.ddp_comm_hooks.

    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))  # doctest: +SKIP
    >>> model.register_comm_hook(None, comm_hook)  # doctest: +SKIP
    """
    options = _default if state is None else state
    buffer = bucket.buffer()
    try:
        operation = _start(options, buffer, bucket.index())
    except Exception as error:
        operation = Operation(0, error=error)
    if torch._C._current_graph_task_id() == -1:  # torch's Join calls it for a rank without data
        operation.wait()
    return future_of(operation, buffer)


def _start(options: Options, buffer: torch.Tensor, index: int) -> Operation:
    if not isinstance(options, Options):
        raise TypeError(f"register_comm_hook: the state is a {type(options).__name__}; give None or "
                        "lightcc.torch.ddp.Options(...).")
    if options.process_set is global_process_set and lib.initialized() and dist.get_world_size() != lib.size():
        raise ValueError(f"comm_hook: torch.distributed has {dist.get_world_size()} ranks, lightcc {lib.size()}; "
                         "they must be the same, or Options(process_set=...) name those of the model's group.")
    name = f"{options.name}.{index}"
    while name in _in_flight:  # of another model in the same backward pass
        name += "'"
    submitted = _submit_dense if buffer.layout is torch.strided else _submit_sparse
    handle, sent, finish = submitted(options, buffer, name)
    _in_flight.add(name)
    tensors = [*sent, buffer] if isinstance(sent, list) else [sent, buffer]
    return Operation(handle, sent, finish, at_end=lambda: _in_flight.discard(name), tensors=tensors)


def _submit_dense(options: Options, buffer: torch.Tensor, name: str) -> _Submitted:
    sent, context = options.compression.compress(buffer)
    factor = options.gradient_predivide_factor
    handle = submit(lib.ALLREDUCE, adapter_of(sent), sent, sent, name, options.process_set, lib.UNORDERED,
                    options.op, 1.0 / factor, factor)

    def finish(_: int) -> None:
        if sent is not buffer:
            buffer.copy_(options.compression.decompress(sent, context))
    return handle, sent, finish


def _submit_sparse(options: Options, grad: torch.Tensor, name: str) -> _Submitted:
    """A bucket of one sparse gradient: its entries are gathered, so a factor that is divided by first has no use."""
    if options.op not in SUMS:
        raise ValueError("comm_hook: a sparse gradient can be averaged or summed, but has no other op; "
                         "hvd.DistributedOptimizer(..., sparse_as_dense=True) has them.")
    sent = entries(grad, options.op, "comm_hook")
    sent[1], context = options.compression.compress(sent[1])
    handle = submit_list(lib.ALLGATHER, sent, None, name, options.process_set, lib.UNORDERED)

    def finish(handle: int) -> None:
        came = [adapter_of(part).output(handle, i, part) for i, part in enumerate(sent)]
        came[1] = options.compression.decompress(came[1], context)
        grad.copy_(summed(came, grad, options.op, options.process_set.size()))
    return handle, sent, finish


_torch_backend.register()
keep_out()

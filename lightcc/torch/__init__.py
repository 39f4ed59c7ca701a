"""lightcc for PyTorch: `import lightcc.torch as hvd`, and the rest of a script written for horovod.torch stays."""
from importlib import import_module as _import_module

from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lightcc.core.util import check_extension
from lightcc.torch.compiling import keep_out as _keep_out
from lightcc.torch.compression import Compression
from lightcc.torch.delayed import DelayedGradients
from lightcc.torch.diloco import DiLoCo
from lightcc.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from lightcc.torch.local_sgd import LocalSGD
from lightcc.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    metrics,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
    write_metrics,
)
from lightcc.torch.optimizer import DistributedOptimizer
from lightcc.torch.residuals import compression_stats, gather_residuals
from lightcc.torch.sync_batch_norm import SyncBatchNorm
from lightcc.torch.weights import check_weights

__all__ = [
    "Adasum", "Average", "Compression", "DelayedGradients", "DiLoCo", "DistributedOptimizer",
    "HorovodInternalError", "LocalSGD", "Max", "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm",
    "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "ccl_built", "check_extension", "check_weights", "compression_stats", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "gather_residuals", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "metrics", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async",
    "remove_process_set", "rocm_built", "shutdown", "size", "sparse_allreduce_async", "start_timeline",
    "stop_timeline", "synchronize", "write_metrics",
]


def __getattr__(name: str):
    if name in ("amp", "elastic", "embedding"):  # loaded only where they are used
        return _import_module(f"lightcc.torch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_keep_out()

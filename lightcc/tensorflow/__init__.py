"""lightcc for TensorFlow: `import lightcc.tensorflow as hvd`, and the rest of a script written for horovod.tensorflow
stays.
"""
from importlib import import_module as _import_module

from lightcc.compress.variable_compression import (
    compression_state,
    compression_stats,
    gather_residuals,
    load_compression_state,
)
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lightcc.core.util import check_extension, gpu_available, split_list
from lightcc.tensorflow import gradients  # noqa: F401  registers them
from lightcc.tensorflow.compression import Compression
from lightcc.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from lightcc.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from lightcc.tensorflow.gradient_reducer import _make_allreduce_grads_fn  # noqa: F401  programs reach for it
from lightcc.tensorflow.hooks import BroadcastGlobalVariablesHook, broadcast_global_variables
from lightcc.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    handle_average_backwards_compatibility,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    metrics,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from lightcc.tensorflow.optimizer import DistributedOptimizer
from lightcc.tensorflow.periodic import DiLoCo, LocalSGD
from lightcc.tensorflow.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from lightcc.tensorflow.summary import write_metrics
from lightcc.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from lightcc.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs  # noqa: F401
from lightcc.tensorflow.weights import check_weights

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression", "DiLoCo", "DistributedGradientTape",
    "DistributedOptimizer", "HorovodInternalError", "LocalGradientAggregationHelper", "LocalSGD", "Max", "Min",
    "PartialDistributedGradientTape", "ProcessSet", "Product", "Sum", "SyncBatchNormalization", "add_process_set",
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "ccl_built",
    "check_extension", "check_num_rank_power_of_2", "check_weights", "compression_state", "compression_stats",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "gather_residuals", "global_process_set", "gloo_built",
    "gloo_enabled", "gpu_available", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "handle_average_backwards_compatibility", "init", "is_homogeneous", "is_initialized", "join",
    "load_compression_state", "local_rank", "local_rank_op", "local_size", "local_size_op", "metrics", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "refs_to_vars", "remove_process_set", "rocm_built", "shutdown", "size", "size_op", "split_list",
    "start_timeline", "stop_timeline", "vars_to_refs", "write_metrics",
]


def __getattr__(name: str):
    if name == "SyncBatchNormalization":  # its base class is Keras's, which takes a second to import
        from lightcc.tensorflow.sync_batch_norm import SyncBatchNormalization
        globals()[name] = SyncBatchNormalization
        return SyncBatchNormalization
    if name in ("amp", "elastic"):  # loaded only where they are used
        return _import_module(f"lightcc.tensorflow.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""lightcc for numpy arrays: `import lightcc.numpy as hvd`.

The functions are those of lightcc.core.ops, and their examples run here as they stand.
"""
import numpy  # noqa: F401  so that a missing numpy is named here

from lightcc.core import lib
from lightcc.core.basics import HorovodBasics
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.objects import allgather_object, broadcast_object
from lightcc.core.ops import *  # noqa: F401,F403
from lightcc.core.ops import __all__ as _verbs
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

_basics = HorovodBasics(__file__)
lib.name_package("lightcc.numpy")
Average, Sum, Adasum, Min, Max, Product = (_basics.Average, _basics.Sum, _basics.Adasum, _basics.Min, _basics.Max,
                                           _basics.Product)
init, shutdown, is_initialized = _basics.init, _basics.shutdown, _basics.is_initialized
rank, size = _basics.rank, _basics.size
local_rank, local_size = _basics.local_rank, _basics.local_size
cross_rank, cross_size = _basics.cross_rank, _basics.cross_size
is_homogeneous = _basics.is_homogeneous
mpi_built, mpi_enabled, mpi_threads_supported = _basics.mpi_built, _basics.mpi_enabled, _basics.mpi_threads_supported
gloo_built, gloo_enabled = _basics.gloo_built, _basics.gloo_enabled
nccl_built, ddl_built, ccl_built = _basics.nccl_built, _basics.ddl_built, _basics.ccl_built
cuda_built, rocm_built = _basics.cuda_built, _basics.rocm_built
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline

__all__ = _verbs + [
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather_object", "broadcast_object", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "remove_process_set",
    "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]

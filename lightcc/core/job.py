"""HorovodBasics as functions, which the packages of all frameworks have: one object, whose methods have names here.
`import *` takes what each of these packages has; what only some have is imported by name.
"""
from typing import Any

from lightcc.core.basics import HorovodBasics
from lightcc.core.metrics import metrics, write_metrics

__all__ = [
    "Average", "Sum", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled",
    "is_initialized", "local_rank", "local_size", "metrics", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "rank", "rocm_built", "size", "start_timeline", "stop_timeline", "write_metrics",
]

basics = HorovodBasics(__file__)

Average, Sum, Adasum = basics.Average, basics.Sum, basics.Adasum
Min, Max, Product = basics.Min, basics.Max, basics.Product
shutdown, is_initialized = basics.shutdown, basics.is_initialized
size, rank = basics.size, basics.rank
local_size, local_rank = basics.local_size, basics.local_rank
cross_size, cross_rank = basics.cross_size, basics.cross_rank
is_homogeneous = basics.is_homogeneous
mpi_threads_supported, mpi_enabled, mpi_built = basics.mpi_threads_supported, basics.mpi_enabled, basics.mpi_built
gloo_enabled, gloo_built = basics.gloo_enabled, basics.gloo_built
nccl_built, ddl_built, ccl_built = basics.nccl_built, basics.ddl_built, basics.ccl_built
cuda_built, rocm_built = basics.cuda_built, basics.rocm_built
start_timeline, stop_timeline = basics.start_timeline, basics.stop_timeline


def init(*args: Any, **kwargs: Any) -> None:
    """Meets the other ranks; the arguments are those of HorovodBasics.init (comm, process_sets).

    >>> hvd.init(); hvd.size() >= 1
    True
    """
    basics.init(*args, **kwargs)

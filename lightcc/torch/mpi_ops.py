"""The collectives on torch tensors, by the names and signatures of horovod.torch.mpi_ops.

The functions with a handle and those in place are the ones of lightcc.core.ops. Those that return a new tensor are
differentiable (differentiable.py).
"""
from lightcc.core import lib
from lightcc.core.basics import HorovodBasics
from lightcc.core.exceptions import HorovodInternalError  # noqa: F401
from lightcc.core.ops import (  # noqa: F401
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
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set  # noqa: F401
from lightcc.core.util import (  # noqa: F401
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from lightcc.torch.compression import Compression  # noqa: F401
from lightcc.torch.differentiable import (  # noqa: F401
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from lightcc.torch.sparse import sparse_allreduce_async  # noqa: F401

_basics = HorovodBasics(__file__)
lib.name_package("lightcc.torch")

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

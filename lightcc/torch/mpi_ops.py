"""The collectives on torch tensors, by the names and signatures of horovod.torch.mpi_ops.

The functions with a handle and those in place are the ones of lightcc.core.ops. Those that return a new tensor are
differentiable (differentiable.py).
"""
from lightcc.core import lib
from lightcc.core.exceptions import HorovodInternalError  # noqa: F401
from lightcc.core.job import *  # noqa: F401,F403
from lightcc.core.job import Adasum, HorovodBasics, Max, Min, Product, init, is_homogeneous  # noqa: F401
from lightcc.core.job import basics as _basics  # noqa: F401
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

lib.name_package("lightcc.torch")


def shutdown(*args, **kwargs):
    """Leaves the job; operations in flight are given up.

    >>> hvd.init(); hvd.shutdown(); hvd.init()
    """
    _basics.shutdown(*args, **kwargs)

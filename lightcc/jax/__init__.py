"""lightcc carries what JAX's processes on CPUs tell each other: `import lightcc.jax` before jax, in a program that
lightccrun, mpirun, srun or another launcher starts.

    import lightcc.jax
    import jax

    mesh = lightcc.jax.mesh()  # of the devices of all processes

Programs do not change otherwise: psum, shard_map, jit with shardings and what is built on them run over lightcc.
`lightccrun --jax` does the import. docs/jax.md says more.
"""
from lightcc.core import lib
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.objects import allgather_object as _allgather_object
from lightcc.core.objects import broadcast_object as _broadcast_object
from lightcc.jax import children as _children
from lightcc.jax import collectives as _collectives

_is_ours = not _children.is_of_rank() and _collectives.choose()  # before any module that imports jax

# ruff: noqa: E402
from lightcc.jax import processes as _processes
from lightcc.jax.meshes import mesh
from lightcc.jax.processes import init, local_rank, rank, shutdown, size
from lightcc.jax.trees import broadcast_parameters

__all__ = ["HorovodInternalError", "allgather_object", "broadcast_object", "broadcast_parameters", "init", "local_rank",
           "mesh", "rank", "shutdown", "size"]

lib.name_package("lightcc.jax")


def broadcast_object(obj, root_rank=0):
    """Returns the root's object on every process; on the others `obj` is not looked at.

    obj: anything that cloudpickle can pickle. root_rank: a process's rank. Errors: HorovodInternalError if a process is
    lost; if the object cannot be pickled, the root raises what pickling raised, and the others ValueError. Source:
    horovod.torch.functions.

    >>> lightcc.jax.broadcast_object({"epoch": lightcc.jax.rank()})
    {'epoch': 0}
    """
    init()
    return _broadcast_object(obj, root_rank, "jax.broadcast_object")


def allgather_object(obj):
    """Returns the objects of all processes, by rank. obj and errors: as of broadcast_object.

    >>> lightcc.jax.allgather_object(lightcc.jax.rank()) == list(range(lightcc.jax.size()))
    True
    """
    init()
    return _allgather_object(obj, "jax.allgather_object")


if _is_ours:
    _processes.begin()

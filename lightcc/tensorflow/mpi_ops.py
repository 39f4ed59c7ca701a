"""The collectives on TensorFlow's tensors, by the names and signatures of horovod.tensorflow.mpi_ops.

They work at once, in tf.function and in graphs of TensorFlow 1. Those that move data run when their inputs are there,
in any order and many at a time; in a graph the node's name is what the ranks meet by, so they build the same graph.

What holds for all of them:
  tensors  tf.Tensor or what can be made one; integers of 8 to 64 bits, signed or not, float16, float32, float64, bool
           or bfloat16; any shape, also without elements. On a GPU they are copied to the host and back.
  name     None: in a graph made from the tensor's name; at once, numbered in the order of the calls.
  ignore_name_scope  in a graph: the ranks meet by the last part of the node's name.
  ValueError                         of the call itself: the process set is not registered, or not any more.
  tf.errors.InvalidArgumentError     this rank's call is wrong; also: no member of the process set, name in flight; a
                                     graph that runs after the process set was removed.
  tf.errors.FailedPreconditionError  the ranks disagree, which every rank is told; or lightcc is not initialised.
  tf.errors.UnknownError             a rank is lost, or lightcc was shut down; at once also a HorovodInternalError.
"""
import re
import struct

import tensorflow as tf

from lightcc.core import lib, request
from lightcc.core.exceptions import HorovodInternalError  # noqa: F401
from lightcc.core.job import *  # noqa: F401,F403
from lightcc.core.job import Adasum, Average, HorovodBasics, Max, Min, Product, Sum, init, is_homogeneous, shutdown  # noqa: F401
from lightcc.core.job import basics as _basics  # noqa: F401
from lightcc.core.ops import ReduceOps, handle_average_backwards_compatibility  # noqa: F401
from lightcc.core.process_sets import (  # noqa: F401
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    require_registered,
)
from lightcc.core.request import encoded, id_of
from lightcc.core.util import (  # noqa: F401
    check_installed_version,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
    gpu_available,
    num_rank_is_power_2,
)
from lightcc.tensorflow._library import operations as MPI_LIB
from lightcc.tensorflow._library import run
from lightcc.tensorflow.util import tf_variable

check_num_rank_power_of_2 = num_rank_is_power_2

lib.name_package("lightcc.tensorflow")


def _normalize_name(name: str) -> str:
    """The name with what TensorFlow does not allow in the names of nodes replaced by underscores."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _named(kind, tensors, name):
    """The tensors as such, and the name of their operation."""
    tensors = [tensor if isinstance(tensor, tf.Tensor) else tf.convert_to_tensor(tensor) for tensor in tensors]
    if tf.executing_eagerly():
        return tensors, name
    if name is None:
        return tensors, f"Horovod{kind}_{_normalize_name(tensors[0].name)}" if tensors else None
    return tensors, re.sub(r"^[^A-Za-z0-9.]|[^A-Za-z0-9_.\\/>-]", "_", name)


def _bits(factor: float) -> int:
    return struct.unpack("<q", struct.pack("<d", factor))[0]


def _group(process_set) -> int:
    """The id of a process set; ValueError if there is no such set now. An operation that runs in a graph, later, looks
    again."""
    group = id_of(process_set)
    if group and lib.initialized():
        require_registered(process_set)
    return group


def _run(operation, kind, tensors, name, process_set, ignore_name_scope, *arguments, **attributes):
    if attributes.get("codec") and not tf.executing_eagerly():
        attributes["tensor_name"] = name  # else it would be the node's, which may be another when it is traced again
    group = _group(process_set)
    if name is not None:
        encoded(name)  # or TypeError or ValueError
    tensors, name = _named(kind, tensors, name)
    return run(operation, tensors if "Grouped" in kind else tensors[0], *arguments, name=name, process_set_id=group,
               ignore_name_scope=int(ignore_name_scope), **attributes)


def _reduction(op, prescale_factor, postscale_factor):
    return {"reduce_op": op, "prescale_factor": _bits(prescale_factor), "postscale_factor": _bits(postscale_factor)}


def _allreduce(tensor, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0, ignore_name_scope=False,
               process_set=global_process_set, codec="", set_=0):
    """Reduces a dense tensor over the ranks of the process set; the result is on all of them. Differentiable.

    codec: how it is compressed, csrc/api/tensorflow/codec.h; it needs a name then. set_: of core.request.new_set(),
    if it is one of several that each run of a graph submits together; 0: it is not.
    """
    return _run(MPI_LIB.horovod_allreduce, "Allreduce", [tensor], name, process_set, ignore_name_scope, codec=codec,
                set=set_, **_reduction(op, prescale_factor, postscale_factor))


def _grouped_allreduce(tensors, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0, ignore_name_scope=False,
                       process_set=global_process_set, codec="", set_=0):
    """Reduces several dense tensors, whose dtypes may differ, as one unit; returns a list. Differentiable."""
    return list(_run(MPI_LIB.horovod_grouped_allreduce, "GroupedAllreduce", tensors, name, process_set,
                     ignore_name_scope, codec=codec, set=set_, **_reduction(op, prescale_factor, postscale_factor)))


def allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Concatenates the tensors of all ranks of the set along dimension 0, in rank order; differentiable.

    Dimension 0 may differ between ranks, the others not. A tensor without dimensions: InvalidArgumentError, while a
    graph is built ValueError.

    >>> hvd.allgather(tf.ones((2, 3))).shape == (2 * hvd.size(), 3)
    True
    """
    return _run(MPI_LIB.horovod_allgather, "Allgather", [tensor], name, process_set, ignore_name_scope)


def grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Gathers several tensors as one unit; returns a list. Arguments as for allgather; dtypes may differ.

    >>> len(hvd.grouped_allgather([tf.ones(1), tf.ones((2, 2))]))
    2
    """
    return list(_run(MPI_LIB.horovod_grouped_allgather, "GroupedAllgather", tensors, name, process_set,
                     ignore_name_scope))


def broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Returns the root's tensor on every rank of the set; shapes and dtypes must be equal; differentiable.

    root_rank: a rank of the world, also with a process set; InvalidArgumentError if it is not a member.

    >>> int(hvd.broadcast(tf.constant(hvd.rank()), root_rank=0))
    0
    """
    return _run(MPI_LIB.horovod_broadcast, "Broadcast", [tensor], name, process_set, ignore_name_scope,
                root_rank=root_rank)


def broadcast_(variables, root_rank, name=None, process_set=global_process_set):
    """broadcast_variables that returns the new values, a list of tensors.

    name: of what travels, "<name>.0" and so on; default "broadcast_variables".

    >>> x = tf.Variable([hvd.rank()]); hvd.broadcast_([x], root_rank=0)[0].numpy(), x.numpy()
    (array([0], dtype=int32), array([0], dtype=int32))
    """
    variables = [tf_variable(variable) for variable in variables]
    for variable in variables:
        if variable.dtype.base_dtype == tf.string:
            raise ValueError(f"broadcast of variable {variable.name}: strings do not travel as tensors; send "
                             "variable.numpy() with broadcast_object.")
    return [_overwritten(variable, root_rank, f"{name or 'broadcast_variables'}.{i}", process_set)
            for i, variable in enumerate(variables)]


def _overwritten(variable: tf.Variable, root_rank: int, name: str, process_set: ProcessSet) -> tf.Tensor:
    value = variable.read_value()
    sent = value if value.dtype.name in lib.DTYPES else tf.bitcast(value, tf.uint8)
    received = broadcast(sent, root_rank, name, process_set=process_set)
    if sent is not value:
        received = tf.bitcast(received, value.dtype)
    assigned = variable.assign(received, read_value=False)  # None in eager mode
    with tf.control_dependencies([] if assigned is None else [assigned]):
        return tf.identity(received)


def alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Sends slices of dimension 0 to the ranks of the set, and returns what they sent, in rank order; differentiable.

    splits: how many rows go to each rank, a list or a one-dimensional int32 tensor; they may add up to less than there
    are. None: equal parts. With splits, returns (tensor, rows received from each rank as an int32 tensor).

    >>> hvd.alltoall(tf.range(hvd.size())).numpy().tolist() == [hvd.rank()] * hvd.size()
    True
    """
    sent = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)
    output, received = _run(MPI_LIB.horovod_alltoall, "Alltoall", [tensor], name, process_set, ignore_name_scope, sent)
    return output if splits is None else (output, received)


def _reducescatter(tensor, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0, ignore_name_scope=False,
                   process_set=global_process_set):
    """Reduces, then gives rank i of the set the i-th part of dimension 0; the first `rows % size` get one row more."""
    return _run(MPI_LIB.horovod_reducescatter, "Reducescatter", [tensor], name, process_set, ignore_name_scope,
                **_reduction(op, prescale_factor, postscale_factor))


def _grouped_reducescatter(tensors, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0,
                           ignore_name_scope=False, process_set=global_process_set):
    """_reducescatter of several tensors as one unit; returns a list."""
    return list(_run(MPI_LIB.horovod_grouped_reducescatter, "GroupedReducescatter", tensors, name, process_set,
                     ignore_name_scope, **_reduction(op, prescale_factor, postscale_factor)))


def join():
    """Says that this rank has no more data, waits until all ranks have, and returns the rank that came last (int32).

    Until then the others' collectives go on without it: lightcc.core.ops.join tells how. ValueError with LocalSGD,
    DiLoCo or a table of embeddings in use; of a graph, when it is built.

    >>> int(hvd.join()) in range(hvd.size())
    True
    """
    request.check_join()
    return MPI_LIB.horovod_join()


def barrier(process_set=global_process_set):
    """Waits until all ranks of the set are here. In a graph returns the operation.

    >>> hvd.barrier()
    """
    return MPI_LIB.horovod_barrier(process_set_id=_group(process_set))


def size_op(process_set_id=0, name=None):
    """The number of ranks of a process set when the graph runs, not when it is built; an int32 scalar.

    >>> int(hvd.size_op()) == hvd.size()
    True
    """
    return MPI_LIB.horovod_size(process_set_id=process_set_id, name=name)


def rank_op(name=None):
    """This rank when the graph runs; an int32 scalar.

    >>> int(hvd.rank_op()) == hvd.rank()
    True
    """
    return MPI_LIB.horovod_rank(name=name)


def local_rank_op(name=None):
    """This rank on its host when the graph runs; an int32 scalar.

    >>> int(hvd.local_rank_op()) == hvd.local_rank()
    True
    """
    return MPI_LIB.horovod_local_rank(name=name)


def local_size_op(name=None):
    """The number of ranks on this host when the graph runs; an int32 scalar.

    >>> int(hvd.local_size_op()) == hvd.local_size()
    True
    """
    return MPI_LIB.horovod_local_size(name=name)


def process_set_included_op(process_set_id=0, name=None):
    """1 if this rank is in the process set when the graph runs, 0 if not, negative if there is none; int32.

    >>> int(hvd.process_set_included_op())
    1
    """
    return MPI_LIB.horovod_process_set_included(process_set_id=process_set_id, name=name)

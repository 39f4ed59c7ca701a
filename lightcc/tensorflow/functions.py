"""Making the ranks equal: variables and any object. Names as in horovod.tensorflow.functions."""
import functools
from typing import Any, Callable, List

import tensorflow as tf

from lightcc import _core, objects
from lightcc.tensorflow.mpi_ops import (  # noqa: F401  as Horovod's module has them
    ProcessSet,
    allgather,
    broadcast,
    global_process_set,
    rank,
    size,
)
from lightcc.tensorflow.util import tf_variable


def broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False):
    """Overwrites variables with the root's.

    variables: a list of tf.Variable or of Keras variables that have been built, the same ones in the same order on all
    ranks; any dtype but strings, also complex. root_rank: a world rank. inplace is ignored: it is always in place.
    In a v1 graph it returns the operation that does it; within a tf.function it is part of the function.
    Errors: ValueError for what is not a variable; those of broadcast. Source: horovod.tensorflow.functions.

    >>> x = tf.Variable([float(hvd.rank())]); hvd.broadcast_variables([x], root_rank=0); x.numpy()
    array([0.], dtype=float32)
    """
    return tf.group(*broadcast_(variables, root_rank, process_set=process_set))


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
    sent = value if value.dtype.name in _core.DTYPES else tf.bitcast(value, tf.uint8)
    received = broadcast(sent, root_rank, name, process_set=process_set)
    if sent is not value:
        received = tf.bitcast(received, value.dtype)
    assigned = variable.assign(received, read_value=False)  # None in eager mode
    with tf.control_dependencies([] if assigned is None else [assigned]):
        return tf.identity(received)


def broadcast_object(obj: Any, root_rank=0, session=None, name=None, process_set=global_process_set) -> Any:
    """Returns the root's object on every rank of the set; on the others `obj` is not looked at. See lightcc.objects.

    session is ignored: objects travel beside TensorFlow, at once, also where a graph is being built.

    >>> hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=0)
    {'epoch': 0}
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set) -> Callable[[Any], Any]:
    """broadcast_object as a function of the object alone.

    >>> hvd.broadcast_object_fn(root_rank=0)(hvd.rank())
    0
    """
    return functools.partial(broadcast_object, root_rank=root_rank, session=session, name=name,
                             process_set=process_set)


def allgather_object(obj: Any, session=None, name=None, process_set=global_process_set) -> List[Any]:
    """Returns the objects of all ranks of the set, in rank order. See lightcc.objects; session is ignored.

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    return objects.allgather_object(obj, name, process_set)

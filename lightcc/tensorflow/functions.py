"""Making the ranks equal: variables and any object. Names as in horovod.tensorflow.functions."""
import functools
from typing import Any, Callable, List

import tensorflow as tf

from lightcc.core import objects
from lightcc.tensorflow.mpi_ops import (  # noqa: F401  as Horovod's module has them
    ProcessSet,
    allgather,
    broadcast,
    broadcast_,
    global_process_set,
    rank,
    size,
)


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


def broadcast_object(obj: Any, root_rank=0, session=None, name=None, process_set=global_process_set) -> Any:
    """Returns the root's object on every rank of the set; on the others `obj` is not looked at. See core/objects.py.

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
    """Returns the objects of all ranks of the set, in rank order. See lightcc.core.objects; session is ignored.

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    return objects.allgather_object(obj, name, process_set)

"""The operations of csrc/api/tensorflow, as TensorFlow has them, and what each of them needs besides its tensors."""
import itertools

import tensorflow as tf

from lightcc.core import lib
from lightcc.core.exceptions import HorovodInternalError


def _load():
    operations = tf.load_op_library(lib.tensorflow_library())
    missing = lib.missing_in_tensorflow()
    if missing:
        raise ImportError(f"lightcc.tensorflow works with TensorFlow 2.13 to 2.21; {tf.__version__} has no {missing}.")
    return operations


operations = _load()
_numbers = itertools.count()
_eager_token = None


class LostError(HorovodInternalError, tf.errors.UnknownError):
    """The UnknownError of an eager call: a rank is lost, or lightcc was shut down."""

    def __init__(self, node_def, op, message, *_):  # as TensorFlow's own, since Keras makes another of one
        tf.errors.UnknownError.__init__(self, node_def, op, message)


def run(operation, *arguments, name=None, **attributes):
    """Calls an operation that moves data, on the graph that is being built or at once.

    name: of the node in a graph; at once, what the ranks meet by, None to be numbered.
    """
    if tf.executing_eagerly():
        return run_stateful(operation, *arguments, _token(), tensor_name=name or "", **attributes)
    return operation(*arguments, _token(), unique=str(next(_numbers)), name=name, **attributes)


def run_stateful(operation, *arguments, **attributes):
    """Calls an operation that is stateful, or at once: LostError if a rank is lost."""
    try:
        return operation(*arguments, **attributes)
    except tf.errors.UnknownError as error:
        raise LostError(error.node_def, error.op, error.message) from None


def _token():
    """An input that is there once the graph runs, so that TensorFlow does not compute the operation ahead."""
    global _eager_token
    if tf.executing_eagerly():
        if _eager_token is None:
            with tf.device("CPU:0"):
                _eager_token = tf.constant(0)
        return _eager_token
    graph = tf.compat.v1.get_default_graph()
    token = getattr(graph, "_lightcc_token", None)
    if token is None:
        with graph.control_dependencies(None), tf.device(None):  # outside of what is being built there just now
            token = graph._lightcc_token = operations.horovod_token()
    return token

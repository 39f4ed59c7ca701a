"""Making the ranks equal in programs in the style of TensorFlow 1: a graph, its global variables, a session."""
import tensorflow as tf

from lightcc.tensorflow.functions import broadcast_variables
from lightcc.tensorflow.util import _executing_eagerly


def broadcast_global_variables(root_rank):
    """The operation that overwrites all global variables of the v1 graph with the root's; run it after initialising
    them. root_rank: a world rank.

    Errors: RuntimeError in eager mode, where there are no global variables. Source: horovod.tensorflow.

    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     x = tf.compat.v1.get_variable("x", initializer=float(hvd.rank()))
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     session.run(hvd.broadcast_global_variables(root_rank=0))
    ...     print(session.run(x))
    0.0
    """
    if _executing_eagerly():
        raise RuntimeError("broadcast_global_variables: eager execution knows no global variables; name them, with "
                           "hvd.broadcast_variables(model.variables, root_rank).")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Overwrites all global variables with the root's once a session is made and its variables are initialised or
    restored: so every rank begins as the root does, and a checkpoint need only be where the root is.

    root_rank: a world rank. device: where it runs, like "/cpu:0". Errors: RuntimeError in eager mode.
    Source: horovod.tensorflow.

    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.get_variable("x", initializer=float(hvd.rank()))
    ...     hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0)]
    ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
    ...         print(session.run(x))
    0.0
    """

    def __init__(self, root_rank, device=''):
        self._root_rank, self._device = root_rank, device
        self._broadcast = None

    def begin(self):
        """Builds the operation, of the variables that the graph has now; called by the session."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device):
                self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session, coord):
        """Runs it; called by the session."""
        session.run(self._broadcast)

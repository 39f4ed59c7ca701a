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

    root_rank: a world rank. device: where it runs, like "/cpu:0". Both are attributes too, and so is bcast_op: the
    operation, None before a session calls begin(). Errors: RuntimeError in eager mode.
    Source: horovod.tensorflow.

    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.get_variable("x", initializer=float(hvd.rank()))
    ...     hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0)]
    ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
    ...         print(session.run(x))
    0.0
    """

    def __init__(self, root_rank, device=''):
        self.root_rank, self.device = root_rank, device
        self.bcast_op = None

    def begin(self):
        """Builds the operation, of the variables that the graph has now; called by the session."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session, coord):
        """Runs it; called by the session."""
        session.run(self.bcast_op)

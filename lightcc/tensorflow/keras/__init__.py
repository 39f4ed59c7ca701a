"""lightcc for tf.keras: `import lightcc.tensorflow.keras as hvd`, and the rest of a script written for
horovod.tensorflow.keras stays.

tf.keras is Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1, or before TensorFlow 2.16 Keras 2.
"""
from tensorflow import keras

from lightcc import _keras
from lightcc._keras.bound_callbacks import bound_periodic as _bound_periodic
from lightcc._keras.front import Front as _Front
from lightcc.compress.variable_compression import (
    compression_state,
    compression_stats,
    gather_residuals,
    load_compression_state,
)
from lightcc.core import job as _job
from lightcc.core import lib
from lightcc.core.job import *  # noqa: F401,F403
from lightcc.core.job import Average, HorovodBasics, init, shutdown  # noqa: F401
from lightcc.core.job import basics as _basics  # noqa: F401
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lightcc.core.util import is_version_greater_equal_than
from lightcc.tensorflow.compression import Compression

lib.name_package("lightcc.tensorflow.keras")

_front = _Front(keras)
PartialDistributedOptimizer, load_model = _front.PartialDistributedOptimizer, _front.load_model
allgather, broadcast, reducescatter = _front.allgather, _front.broadcast, _front.reducescatter
broadcast_global_variables, check_weights = _front.broadcast_global_variables, _front.check_weights
LocalSGD, DiLoCo = _bound_periodic(keras, __name__)

__all__ = [
    "Compression", "DiLoCo", "DistributedOptimizer", "LocalSGD", "PartialDistributedOptimizer", "ProcessSet",
    "add_process_set",
    "allgather", "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "check_weights",
    "compression_state", "compression_stats", "elastic", "gather_residuals", "global_process_set", "init",
    "is_version_greater_equal_than", "load_compression_state", "load_model", "reducescatter", "remove_process_set",
    "shutdown",
]
__all__ += _job.__all__


def DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none,
                         sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1,
                         average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global_process_set,
                         scale_local_gradients=True):
    """Wraps a Keras optimizer: it reduces gradients over the ranks before it applies them.

    Returns a new object, of a subclass of the same name, that shares all attributes with the given optimizer, variables
    and iterations too. So whatever plain Keras trains with can be wrapped, also what its config does not tell. The
    given one stays a plain optimizer over the same variables; another model needs another optimizer, as in Keras.
    To Keras it is an optimizer like any: model.compile, learning rates, get_config and from_config, saving. Files that
    it is saved in name the plain class, and Keras alone can read them.

    optimizer: of Keras 3, of Keras 2.11 and later or tf_keras, or a "legacy" one of these; also a LossScaleOptimizer.
    name: the collectives' first name; default "Distributed" and the class name. device_dense, device_sparse: where
    TensorFlow runs the exchange. compression: what travels. sparse_as_dense: sends tf.IndexedSlices as dense gradients;
    else they travel by allgather. gradient_predivide_factor: divide by it before the sum and by size / factor after.
    op: hvd.Average or hvd.Sum. backward_passes_per_step: gradients of so many steps are added up before they travel
    and are applied; average_aggregated_gradients: and divided by that number. groups: a number of groups, or lists of
    variables, that are reduced as one unit; num_groups is its old name. process_set: who takes part; on other ranks it
    is a plain optimizer. scale_local_gradients: divide local gradients by the size of the process set.
    More methods: register_local_var(variable); for Keras 2 alone get_gradients or compute_gradients, whose gradients
    are reduced already, and apply_gradients then takes them as they are. So does _compute_gradients.

    A model that is compiled with it is not compiled by XLA: jit_compile="auto" means False, and True is a ValueError.
    Keras's own gradient_accumulation_steps works, but sends gradients in every pass; backward_passes_per_step does not.

    Errors: ValueError for wrong arguments, an optimizer that is not Keras's or is wrapped already, Keras on another
    framework than TensorFlow and torch; from apply_gradients as from allreduce. Source: horovod.tensorflow.keras.

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), "mse")
    >>> history = model.fit(np.ones((4, 2)), np.ones(4), batch_size=2, verbose=0)
    """
    return _keras.create_distributed_optimizer(
        keras, optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor,
        op, backward_passes_per_step, average_aggregated_gradients, _keras.checked_groups(groups, num_groups),
        process_set, scale_local_gradients)


def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None,
              compression=Compression.none):
    """Reduces a value over the ranks, element by element, and returns a tensor.

    value: a number, a (nested) list, a numpy array or a tensor. op: hvd.Average (default), Sum, ...; average is its
    deprecated form. Other arguments and errors: those of lightcc.core.ops.allreduce. Source: horovod.tensorflow.keras.

    >>> float(hvd.allreduce(3.0))
    3.0
    """
    return _keras.allreduce(keras.backend, value, name, average, prescale_factor, postscale_factor, op, compression)


from lightcc.tensorflow.keras import callbacks, elastic  # noqa: E402  which are built on this module

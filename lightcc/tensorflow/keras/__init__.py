"""lightcc for tf.keras: `import lightcc.tensorflow.keras as hvd`, and the rest of a script written for
horovod.tensorflow.keras stays.

tf.keras is Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1, or before TensorFlow 2.16 Keras 2.
"""
from tensorflow import keras

from lightcc import _keras
from lightcc.compress.variable_compression import (
    compression_state,
    compression_stats,
    gather_residuals,
    load_compression_state,
)
from lightcc.core import lib
from lightcc.core.basics import HorovodBasics
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lightcc.core.util import is_version_greater_equal_than
from lightcc.tensorflow.compression import Compression

_basics = HorovodBasics(__file__)
lib.name_package("lightcc.tensorflow.keras")

Average, Sum = _basics.Average, _basics.Sum
init, shutdown, is_initialized = _keras.init, _basics.shutdown, _basics.is_initialized
size, rank = _basics.size, _basics.rank
local_size, local_rank = _basics.local_size, _basics.local_rank
cross_size, cross_rank = _basics.cross_size, _basics.cross_rank
mpi_threads_supported, mpi_enabled, mpi_built = _basics.mpi_threads_supported, _basics.mpi_enabled, _basics.mpi_built
gloo_enabled, gloo_built = _basics.gloo_enabled, _basics.gloo_built
nccl_built, ddl_built, ccl_built = _basics.nccl_built, _basics.ddl_built, _basics.ccl_built
cuda_built, rocm_built = _basics.cuda_built, _basics.rocm_built
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline

__all__ = [
    "Average", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "ProcessSet", "Sum",
    "add_process_set", "allgather", "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "ccl_built",
    "check_weights", "compression_state", "compression_stats", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "elastic", "gather_residuals", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_initialized",
    "is_version_greater_equal_than", "load_compression_state", "load_model", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "reducescatter", "remove_process_set", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
]


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


def PartialDistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none,
                                sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average,
                                backward_passes_per_step=1, average_aggregated_gradients=False, groups=None,
                                process_set=global_process_set, local_layers=None, scale_local_gradients=True):
    """A DistributedOptimizer that leaves the gradients of some layers on this rank.

    local_layers: a Keras layer or a list of them. Their gradients are divided by the number of ranks, unless
    scale_local_gradients is False. Other arguments and errors: DistributedOptimizer;
    ValueError for anything but Keras layers. Source: horovod.tensorflow.keras.

    >>> layer = keras.layers.Dense(1)
    >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layer)
    """
    distributed = _keras.create_distributed_optimizer(
        keras, optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor,
        op, backward_passes_per_step, average_aggregated_gradients, _keras.checked_groups(groups), process_set,
        scale_local_gradients)
    _keras.keep_layers_local(distributed, local_layers)
    return distributed


def broadcast_global_variables(root_rank):
    """Gives all variables of a v1 graph of TensorFlow the values of root_rank, in Keras's session.

    ValueError with Keras on torch; RuntimeError in eager mode. Source: horovod.tensorflow.keras.

    >>> try: hvd.broadcast_global_variables(0)
    ... except (RuntimeError, ValueError): print("use hvd.callbacks.BroadcastGlobalVariablesCallback(0)")
    use hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    """
    return _keras.broadcast_global_variables(keras.backend, root_rank)


def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None,
              compression=Compression.none):
    """Reduces a value over the ranks, element by element, and returns a tensor.

    value: a number, a (nested) list, a numpy array or a tensor. op: hvd.Average (default), Sum, ...; average is its
    deprecated form. Other arguments and errors: those of lightcc.core.ops.allreduce. Source: horovod.tensorflow.keras.

    >>> float(hvd.allreduce(3.0))
    3.0
    """
    return _keras.allreduce(keras.backend, value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value, name=None):
    """Concatenates the values of all ranks along dimension 0, in which they may differ, and returns a tensor.

    >>> hvd.allgather([1.0]).shape[0] == hvd.size()
    True
    """
    return _keras.allgather(keras.backend, value, name)


def broadcast(value, root_rank, name=None):
    """Returns the value of root_rank as a tensor.

    >>> int(hvd.broadcast(hvd.rank(), root_rank=0))
    0
    """
    return _keras.broadcast(keras.backend, value, root_rank, name)


def reducescatter(value, name=None, op=Average):
    """Reduces a value, then gives rank i the i-th part of dimension 0, as a tensor.

    >>> hvd.reducescatter([1.0] * hvd.size()).shape[0]
    1
    """
    return _keras.reducescatter(keras.backend, value, name, op)


def check_weights(model, process_set=global_process_set):
    """Compares the weights of all ranks, bit by bit, by digests of 8 bytes. All ranks of the set must call it, between
    steps.

    model: a Keras model, whose trainable variables are compared (others differ where batch normalisation is each rank's
    own), or a list of variables, the same ones in the same order on all ranks. HOROVOD_CHECK_WEIGHTS=n has
    DistributedOptimizer compare its variables every n exchanges of gradients (docs/troubleshooting.md).

    Errors: RuntimeError on all ranks, with the variables that differ and the ranks that hold the same; those of
    allgather.

    >>> hvd.check_weights(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]))
    """
    _keras.check_weights(keras.backend, model, process_set)


def load_model(filepath, custom_optimizers=None, custom_objects=None, compression=Compression.none, legacy_opts=False):
    """Loads a saved model, with a DistributedOptimizer if it was saved with an optimizer.

    filepath: a file or folder of any format that Keras reads. custom_optimizers: a list of optimizer classes, and
    custom_objects: a dictionary by name, that the file needs. compression: what travels. legacy_opts: not used, the
    file says of which family its optimizer is.
    The optimizer goes on with the state that Keras reads: from .keras files, but not from all of the older formats.
    Errors: Keras's. Source: horovod.tensorflow.keras.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse"); model.save("model.keras")
    >>> hasattr(hvd.load_model("model.keras").optimizer, "register_local_var")
    True
    """
    return _keras.load_model(keras, lambda optimizer: DistributedOptimizer(optimizer, compression=compression),
                             filepath, custom_optimizers, custom_objects, legacy_opts)


from lightcc.tensorflow.keras import callbacks, elastic  # noqa: E402  which are built on this module

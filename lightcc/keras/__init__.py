"""lightcc for Keras: `import lightcc.keras as hvd`, and the rest of a script written for horovod.keras stays.

Keras 3 may run on TensorFlow or on torch (TensorFlow is not imported then); Keras 2.13 and later and tf_keras on
TensorFlow.
"""
import keras

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
from lightcc.core.job import Adasum, Average, HorovodBasics, init, shutdown  # noqa: F401
from lightcc.core.job import basics as _basics  # noqa: F401
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

if keras.backend.backend() == "torch":
    from lightcc.torch.compression import Compression
elif keras.backend.backend() == "tensorflow":
    from lightcc.tensorflow.compression import Compression
else:
    raise ImportError(_keras.no_framework(keras.backend.backend()))

lib.name_package("lightcc.keras")

_front = _Front(keras)
PartialDistributedOptimizer, load_model = _front.PartialDistributedOptimizer, _front.load_model
allgather, broadcast, reducescatter = _front.allgather, _front.broadcast, _front.reducescatter
broadcast_global_variables, check_weights = _front.broadcast_global_variables, _front.check_weights
LocalSGD, DiLoCo = _bound_periodic(keras, __name__)

__all__ = [
    "Adasum", "Compression", "DiLoCo", "DistributedOptimizer", "LocalSGD", "PartialDistributedOptimizer", "ProcessSet",
    "add_process_set",
    "allgather", "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "check_weights",
    "compression_state", "compression_stats", "elastic", "gather_residuals", "global_process_set", "init",
    "load_compression_state", "load_model", "reducescatter", "remove_process_set", "shutdown",
]
__all__ += _job.__all__


def DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none,
                         sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, num_groups=0, groups=None):
    """Wraps a Keras optimizer: it reduces gradients over the ranks before it applies them.

    Like lightcc.tensorflow.keras.DistributedOptimizer, which describes the arguments and errors; that for all ranks,
    and each backward pass is a step. Source: horovod.keras.

    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
    >>> type(optimizer).__name__
    'SGD'
    """
    return _keras.create_distributed_optimizer(
        keras, optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor,
        op, groups=_keras.checked_groups(groups, num_groups))


def allreduce(value, name=None, average=True, prescale_factor=1.0, postscale_factor=1.0, op=None,
              compression=Compression.none):
    """Reduces a value over the ranks, element by element, and returns a tensor.

    value: a number, a (nested) list, a numpy array or a tensor. op: hvd.Average (default), Sum, ...; average is its
    deprecated form, and with op it must stay at its default or be None. Other arguments and errors: those of
    lightcc.core.ops.allreduce; ValueError for average=False together with op. Source: horovod.keras.

    >>> float(hvd.allreduce(3.0))
    3.0
    """
    if average is True:  # the default, of which no script means to be told that it is deprecated
        average, op = None, Average if op is None else op
    return _keras.allreduce(keras.backend, value, name, average, prescale_factor, postscale_factor, op, compression)


from lightcc.keras import callbacks, elastic  # noqa: E402  which are built on this module

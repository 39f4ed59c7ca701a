"""What lightcc.keras and lightcc.tensorflow.keras share. TensorFlow is imported only where Keras runs on it.

`backend` is the module keras.backend. Classes that are made for optimizers say that they are of this module, as
Horovod's do, or of horovod._keras where the program has imported that.
"""
import importlib

from lightcc import numpy as hvd
from lightcc._keras import patches
from lightcc._keras.collectives import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from lightcc._keras.frameworks import no_framework, reducer_for  # noqa: F401
from lightcc._keras.optimizer import CallableList, Options, framework_of, is_distributed, keras_of, members_for
from lightcc._keras.saving import load_model, name_like
from lightcc._keras.weights import check_weights  # noqa: F401
from lightcc.core.job import HorovodBasics, init, rank  # noqa: F401
from lightcc.core.job import basics as _basics  # noqa: F401
from lightcc.core.ops import ReduceOps
from lightcc.core.wrapper_arguments import check_predivide, groups_of
from lightcc.core.wrapper_class import wrapper_class

__all__ = [
    "CallableList", "LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager", "allgather", "allreduce",
    "broadcast", "broadcast_global_variables", "create_distributed_optimizer", "load_model", "rank", "reducescatter",
    "size_op",
]


_TENSORFLOWS = {  # imported when they are asked for
    "LocalGradientAggregationHelper": "lightcc.tensorflow.gradient_aggregation",
    "LocalGradientAggregationHelperEager": "lightcc.tensorflow.gradient_aggregation_eager",
    "size_op": "lightcc.tensorflow.mpi_ops",
}


def __getattr__(name: str):
    if name in _TENSORFLOWS:
        return getattr(importlib.import_module(_TENSORFLOWS[name]), name)
    raise AttributeError(f"module 'lightcc._keras' has no attribute {name!r}")


def create_distributed_optimizer(keras, optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
                                 gradient_predivide_factor, op, backward_passes_per_step=1,
                                 average_aggregated_gradients=False, groups=None, process_set=hvd.global_process_set,
                                 scale_local_gradients=True):
    """The factory behind DistributedOptimizer: makes a distributed optimizer around a plain one.

    The two share all attributes. The config would not do to make a second one from: it need not hold all arguments, nor
    anything that Keras can read again. keras: not used, an optimizer knows its Keras. Other arguments and errors:
    lightcc.tensorflow.keras.DistributedOptimizer.
    """
    if is_distributed(optimizer):
        raise ValueError("The optimizer is a DistributedOptimizer already; wrap the plain optimizer, once.")
    for one in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):  # of a LossScaleOptimizer
        if refusal := getattr(type(one), "_not_to_be_distributed", ""):
            raise ValueError(f"DistributedOptimizer({type(one).__name__}): {refusal}")
    cls = _distributed(type(optimizer), Options(
        name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, groups, process_set, scale_local_gradients))
    distributed = cls.__new__(cls)
    object.__setattr__(distributed, "__dict__", vars(optimizer))  # past Keras's own __setattr__, which tracks values
    return distributed


def checked_groups(groups, num_groups=0):
    """The groups that a wrapper of this package is given, from a function that users call; ValueError if wrong."""
    return groups_of(groups, num_groups, lambda thing: hasattr(thing, "assign"), stacklevel=4)


def keep_layers_local(distributed, layers) -> None:
    """Makes a distributed optimizer leave the gradients of Keras layers, one or a list, on this rank."""
    distributed._reducer.keep_layers_local(layers)


def _distributed(plain: type, options: Options):
    """A subclass of an optimizer's class."""
    if options.op not in (ReduceOps.Average, ReduceOps.Sum):
        raise ValueError(f"op must be hvd.Average or hvd.Sum for a Keras optimizer, not {options.op!r}.")
    check_predivide(options.gradient_predivide_factor, options.op)
    if options.backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0.")
    members = members_for(plain)
    reducer_for(framework_of(plain)).check(members)
    cls = wrapper_class(plain, members, __name__, _distribution=options)
    name_like(cls, plain)
    patches.install(keras_of(plain))
    return cls

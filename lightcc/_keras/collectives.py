"""Collectives on values: numbers, lists, numpy arrays and tensors.

backend: the module keras.backend. They return a tensor of Keras's framework; in a v1 graph, which Keras 2 trains in a
session, a numpy array. Other arguments and errors: those of lightcc.keras, and None for average.
"""
from typing import Any, Callable

from lightcc._keras.frameworks import reducer_for


def allreduce(backend, value, name, average, prescale_factor, postscale_factor, op, compression):
    """Reduces a value over the ranks."""
    return _run(backend, value, lambda hvd, tensor: hvd.allreduce(
        tensor, average=average, name=name, compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor))


def allgather(backend, value, name):
    """Concatenates the ranks' values along dimension 0."""
    return _run(backend, value, lambda hvd, tensor: hvd.allgather(tensor, name=name))


def broadcast(backend, value, root_rank, name):
    """The root's value."""
    return _run(backend, value, lambda hvd, tensor: hvd.broadcast(tensor, root_rank, name=name))


def reducescatter(backend, value, name, op):
    """Reduces a value and gives each rank its part of dimension 0."""
    return _run(backend, value, lambda hvd, tensor: hvd.reducescatter(tensor, name=name, op=op))


def broadcast_global_variables(backend, root_rank):
    """Gives all variables of the v1 graph the root's values; ValueError with torch, which has no such thing."""
    if backend.backend() != "tensorflow":
        raise ValueError("broadcast_global_variables is for v1 graphs of TensorFlow; with Keras on "
                         f"{backend.backend()} use hvd.callbacks.BroadcastGlobalVariablesCallback.")
    import lightcc.tensorflow as hvd
    return _in_session(hvd.broadcast_global_variables(root_rank))


def _run(backend, value: Any, collective: Callable[[Any, Any], Any]) -> Any:
    reducer_for(backend.backend())  # raises unless lightcc can serve it
    if backend.backend() == "torch":
        import keras

        import lightcc.torch as hvd
        return collective(hvd, keras.ops.convert_to_tensor(value).detach())
    import tensorflow as tf

    import lightcc.tensorflow as hvd
    return _in_session(collective(hvd, tf.convert_to_tensor(value)))


def _in_session(result):
    import tensorflow as tf
    if tf.compat.v1.executing_eagerly_outside_functions():
        return result
    return tf.compat.v1.keras.backend.get_session().run(result)

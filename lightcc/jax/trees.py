"""Trees of arrays, such as parameters, from one process to all."""
from typing import Any

import jax
import numpy as np

from lightcc.core import ops
from lightcc.core.objects import broadcast_object
from lightcc.jax import processes

_KNOWN = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


def broadcast_parameters(params: Any, root_rank: int = 0) -> Any:
    """Returns the tree with the root's values; arrays of JAX do not change, so the result takes the place of `params`.

    params: a tree (dict, list, flax's or optax's state ...) with the same structure, shapes and dtypes on all
    processes. Arrays of JAX come back as such, where they were; arrays of NumPy as such; other leaves are sent pickled.

    Errors: HorovodInternalError, on all processes, with the leaf's path, where shapes or dtypes differ, or if a process
    is lost; ValueError for an array that is spread over processes: such a one has the same values everywhere, and is no
    process's own. Source: horovod.torch.functions.

    >>> params = lightcc.jax.broadcast_parameters({"w": jax.numpy.ones(3)})
    >>> params["w"].tolist()
    [1.0, 1.0, 1.0]
    """
    processes.init()
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    sent = [_leaf(value, f"jax.parameters{jax.tree_util.keystr(path)}", root_rank) for path, value in leaves]
    return jax.tree_util.tree_unflatten(structure, sent)


def _leaf(value: Any, name: str, root_rank: int) -> Any:
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = _leaf(jax.random.key_data(value), name, root_rank)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        if not value.is_fully_addressable:
            raise ValueError(f"broadcast_parameters: {name} is spread over processes ({value.sharding}): its values "
                             "are the same for all already. Broadcast before you put parameters on the mesh.")
        return jax.device_put(_array(np.asarray(value), name, root_rank), value.sharding)
    if isinstance(value, np.ndarray):
        return _array(value, name, root_rank)
    return broadcast_object(value, root_rank, name)


def _array(value: np.ndarray, name: str, root_rank: int) -> np.ndarray:
    """A copy, with the root's values."""
    sent = np.array(value, order="C")
    if sent.dtype.name in _KNOWN:
        ops.broadcast_(sent, root_rank, name)
    else:  # bfloat16, complex and others: as bytes
        ops.broadcast_(sent.reshape(-1).view(np.uint8), root_rank, f"{name} of {sent.dtype}")
    return sent

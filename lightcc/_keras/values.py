"""Values of Keras' variables as numpy arrays, between the steps: Keras 3 with any backend, tf_keras and Keras 2, also
in a session of TensorFlow 1. What happens inside a step is the optimizer's business.

backend: the module keras.backend. variables: what a layer's `weights` or an optimizer's `variables` has.
"""
import hashlib
import sys
from typing import Any, List, Sequence, Tuple

import numpy as np

from lightcc.core import lib, objects, ops

Outline = List[Tuple[Tuple[int, ...], str]]  # shape and dtype of each variable: what the ranks must have in common


def in_graph() -> bool:
    """Whether values live in a session (tf.compat.v1.disable_eager_execution), and not in the variables themselves."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and not tensorflow.executing_eagerly()


def read(backend: Any, variables: Sequence[Any]) -> List[np.ndarray]:
    """Copies of the values."""
    values = backend.batch_get_value(list(variables)) if in_graph() else [v.numpy() for v in variables]
    return [_own(np.asarray(value, order="C")) for value in values]


def write(backend: Any, variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    """Assigns the values."""
    if in_graph():
        backend.batch_set_value(list(zip(variables, values)))
    else:
        for variable, value in zip(variables, values):
            variable.assign(value)


def multiply(backend: Any, variables: Sequence[Any], factor: float) -> None:
    """Multiplies in place, where the variables are."""
    if in_graph():
        write(backend, variables, [value * factor for value in read(backend, variables)])
    else:
        for variable in variables:
            variable.assign(variable * factor)


def broadcast(backend: Any, variables: Sequence[Any], root_rank: int, name: str) -> None:
    """Overwrites the variables with the root's. Variable i travels as "<name>.<i>": Keras' own names count how many
    layers a process has made, which may differ between ranks. Errors as for broadcast."""
    values, handles = read(backend, variables), []
    try:
        for i, value in enumerate(values):
            handles.append(ops.broadcast_async_(_sendable(value), root_rank, f"{name}.{i}"))
    finally:  # if one is refused, the others still write to their arrays
        for handle in handles:
            ops.synchronize(handle)
    if lib.rank() != root_rank:
        write(backend, variables, values)


def _own(value: np.ndarray) -> np.ndarray:
    """The array, or a copy if its memory is a variable's: torch shares it, TensorFlow has copied already."""
    return value if value.flags.owndata else value.copy()


def _sendable(value: np.ndarray) -> np.ndarray:
    """The array, or its bytes if the core does not know its dtype."""
    return value if value.dtype.name in lib.DTYPES else value.reshape(-1).view(np.uint8)


def outline(variables: Sequence[Any]) -> Outline:
    """Of variables or of their values."""
    return [(tuple(v.shape), str(getattr(v.dtype, "name", v.dtype))) for v in variables]


def outlines(variables: Sequence[Any], name: str) -> List[Outline]:
    """What each rank has; a list of one if all ranks have the same. Digests travel first: they are short."""
    mine = outline(variables)
    digests = objects.allgather_object(hashlib.sha256(repr(mine).encode()).digest(), name + ".digest")
    return [mine] if len(set(digests)) == 1 else objects.allgather_object(mine, name + ".outline")


def difference(of_ranks: Sequence[Outline]) -> str:
    """The first difference between the outlines, in words."""
    other = next(rank for rank, outline in enumerate(of_ranks) if outline != of_ranks[0])
    first, second = of_ranks[0], of_ranks[other]
    if len(first) != len(second):
        return f"rank 0 has {len(first)} and rank {other} has {len(second)}"
    index = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    (shape, dtype), (other_shape, other_dtype) = first[index], second[index]
    return (f"number {index} is {dtype} of shape {shape} on rank 0 and {other_dtype} of shape {other_shape} on rank "
            f"{other}")

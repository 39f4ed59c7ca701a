"""What users give as ids, as keys: 64-bit integers on the CPU, or strings."""
from typing import Sequence, Tuple, Union

import numpy
import torch

from lightcc.embedding import kernels
from lightcc.embedding.exchange import Keys

Ids = Union[torch.Tensor, numpy.ndarray, Sequence[int], Sequence[str]]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_UNSIGNED = tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name))  # 2.3


def array_of(ids: Ids, table: str, strings: bool) -> numpy.ndarray:
    """ids of any shape as an int64 array, or as one of strings.

    An unsigned 64-bit id is the key of the same bits. table: its name, for errors; strings: what its keys are.
    Errors: ValueError for ids on a GPU, for floats, bools and other objects, and for strings where integers are due.

    >>> import torch
    >>> array_of(torch.tensor([3, 5]), "user", False), array_of(["a", "b"], "user", True).shape
    (array([3, 5]), (2,))
    """
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ValueError(f"table {table!r}: the ids are on {ids.device}. Tables are on the CPU for now; give "
                             "ids.cpu(), and move what comes back with .to().")
        if ids.dtype not in _INTEGERS + _UNSIGNED:
            raise ValueError(f"table {table!r}: the ids are {ids.dtype}; a key is an integer or a string.")
        ids = ids.numpy()
    array = numpy.asarray(ids)
    if array.dtype.kind in "US" or array.dtype.kind == "O" and all(isinstance(one, (str, bytes)) for one in array.flat):
        is_text = True
    elif array.dtype.kind in "iu" or not array.size and array.dtype.kind == "f":  # of an empty list
        is_text = False
    else:
        raise ValueError(f"table {table!r}: the ids are {array.dtype}; a key is an integer or a string.")
    if array.size and is_text != strings:
        raise ValueError(f"table {table!r} is for {'strings' if strings else 'integers'}, and the ids are "
                         f"{'strings' if is_text else 'integers'} (strings= says which).")
    return array if is_text else array.astype(numpy.int64, copy=False)


def keys_of(array: numpy.ndarray, strings: bool) -> Keys:
    """Those of an array, in one dimension.

    >>> import numpy
    >>> keys_of(numpy.array([[3, 5]]), False)
    Keys(keys=array([3, 5]), checks=None)
    """
    if not strings:
        return Keys(numpy.ascontiguousarray(array).reshape(-1))
    return Keys(*kernels.hashed(*text_of(array)))


def text_of(strings: numpy.ndarray) -> Tuple[bytes, numpy.ndarray]:
    """Strings one behind the other as UTF-8, and int64 offsets, one more than there are strings.

    >>> import numpy
    >>> text_of(numpy.array(["a", "bcd"]))
    (b'abcd', array([0, 1, 4]))
    """
    encoded = [one if isinstance(one, bytes) else one.encode() for one in strings.reshape(-1).tolist()]
    offsets = numpy.zeros(len(encoded) + 1, numpy.int64)
    numpy.cumsum([len(one) for one in encoded], out=offsets[1:])
    return b"".join(encoded), offsets

"""What goes where in an alltoall: the caller's `splits`, checked and in the form in which the core takes them."""
import ctypes
import operator
from typing import Any, List, Optional, Sequence, Tuple

_MOST_ROWS = 2 ** 31 - 1  # rows for one rank travel as an int32


def pack(splits: Any, shape: Sequence[int], members: int, name: Optional[str]) -> Tuple[Optional[Any], Optional[int]]:
    """The rows for each of `members` ranks as C numbers, and their sum; (None, None) for equal parts.

    splits: None, a list of ints or a one-dimensional int32 tensor. shape: that of the tensor to send. ValueError for
    anything else, and for what does not fit the tensor.

    >>> pack([1, 2], (3, 5), 2, None)[1]
    3
    """
    if not shape:
        return None, None  # a scalar: refused by submit
    if splits is None:
        if members and shape[0] % members:
            raise ValueError(f"alltoall of {name or 'a tensor'}: {shape[0]} rows cannot be cut in {members} equal "
                             "parts; give splits.")
        return None, None
    values = _numbers(splits)
    if len(values) != members or min(values) < 0 or max(values) > _MOST_ROWS or sum(values) > shape[0]:
        raise ValueError(f"alltoall of {name or 'a tensor'}: splits {values} must be {members} numbers >= 0, one for "
                         f"each rank, that add up to at most {shape[0]}, the rows of the tensor.")
    return (ctypes.c_int32 * members)(*values), sum(values)


def _numbers(splits: Any) -> List[int]:
    if hasattr(splits, "dtype"):
        if splits.ndim != 1 or str(splits.dtype).split(".")[-1] != "int32":
            raise ValueError(f"alltoall: splits must be a one-dimensional int32 tensor, not {splits.ndim}-dimensional "
                             f"{splits.dtype}.")
        return splits.tolist()
    try:
        return [operator.index(value) for value in splits]
    except TypeError:
        raise ValueError(f"alltoall: splits must be a list of ints or an int32 tensor, not {splits!r}.") from None

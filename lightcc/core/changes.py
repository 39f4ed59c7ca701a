"""Tensors that a program changes while an operation works on them: what the ranks receive is wrong then.

PyTorch counts the changes of a tensor (Tensor._version); the count is kept when an operation starts, and compared when
the program waits for it. Nobody counts changes of an array of NumPy or CuPy, nor what reaches the memory of a torch
tensor through .data, .numpy() or a kernel that does not count.
"""
from typing import Any, Dict, Optional, Tuple

from lightcc.core import lib

Watched = Tuple[str, Optional[str], Any]  # an operation, the name that it was given, and the counts of its tensors
_counted: Dict[type, bool] = {list: True}  # whether tensors of this type have a count


def counts_of(tensors: Any) -> Any:
    """How often a tensor has been changed; a list for a list. None where nobody counts.

    >>> import numpy; counts_of([numpy.ones(1)]), counts_of(numpy.ones(1))
    ([None], None)
    """
    kind = type(tensors)
    try:
        if not _counted[kind]:
            return None
        return [counts_of(tensor) for tensor in tensors] if kind is list else tensors._version
    except KeyError:
        _counted[kind] = hasattr(kind, "_version")
        return counts_of(tensors)
    except RuntimeError:  # made in torch.inference_mode()
        return None


def changed(watched: Watched) -> RuntimeError:
    """The error of an operation of which a tensor was changed; ends the epoch on all ranks."""
    operation, name, _ = watched
    what = f"{operation} of {'a tensor' if name is None else f'tensor {name!r}'}"
    return ended_by_change(
        what, f"{what}: the tensor was changed on rank {lib.rank()} after the operation had begun and before "
        "synchronize() of its handle. It may have been sent before or after the change, or half of it, so the job is "
        "ended on all ranks. Call synchronize(handle) first, or give the operation a clone().")


def ended_by_change(what: str, text: str) -> RuntimeError:
    """The error of the rank that has changed what was in flight. The others, which must not go on with such numbers,
    hear of it as of a rank that has failed."""
    lib.abort(f"rank {lib.rank()} has changed what it was sending ({what}), so the numbers are wrong; its own "
                "error says what to do")
    return RuntimeError(text)

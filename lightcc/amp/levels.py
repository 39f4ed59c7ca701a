"""The levels of precision, from the most precise, and which of several counts."""
from typing import Iterable, Sequence

LEVELS = ("float32", "tf32", "bfloat16", "float16", "fp8")
LOW = "low"  # in a policy: the low level of whoever uses it (dtype=)


def most_precise(levels: Iterable[str], low: str = "bfloat16") -> str:
    """That of these which is first in LEVELS. low: which one LOW stands for.

    >>> most_precise(["float16", "float32", "bfloat16"])
    'float32'
    >>> most_precise(["low", "bfloat16"], low="float16")
    'bfloat16'
    """
    return min(levels, key=lambda level: LEVELS.index(low if level == LOW else level))


def named(levels: Iterable[str], low: str) -> Sequence[str]:
    """Levels with LOW replaced, each once, from the most precise. ValueError for one that is none.

    >>> named(["low", "float32", "bfloat16"], low="bfloat16")
    ('float32', 'bfloat16')
    """
    wanted = {low if level == LOW else level for level in levels}
    for level in sorted(map(str, wanted - {*LEVELS})):
        raise ValueError(f"{level!r} is no level of precision. There are {', '.join(LEVELS)}, and {LOW!r} in a policy "
                         "for that of dtype=.")
    return tuple(level for level in LEVELS if level in wanted)


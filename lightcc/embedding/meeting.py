"""All ranks meet before they save or load tables, so that a rank that comes alone hears of it and does not wait for
ever: scripts for Horovod save on one rank."""
import time
from typing import Any, List, Sequence

import numpy

from lightcc.core.exceptions import HorovodInternalError
from lightcc.embedding.exchange import Keys, Lookup
from lightcc.embedding.table import Table

WAIT_S = 300.0  # ranks that train together come much sooner
_left_waiting: List[Any] = []  # calls that were given up; the end of the job ends them


def meet(tables: Sequence[Table], what: str) -> None:
    """All ranks of the tables' process set call it before they save or load together. what: the call, for the error.

    It is a lookup without keys, which no training looks like. ValueError, on the rank that came: the others look up
    rows (at once; their lookup fails, too), or have not come after WAIT_S.

    >>> from lightcc import embedding
    >>> meet([embedding.Table("user", 4)], "save")
    """
    group, nothing = tables[0].group, Keys(numpy.empty(0, numpy.int64))
    if group.size == 1:
        return
    ordered = sorted(tables, key=lambda one: one.name)
    lookup = Lookup([(one, _no_strings() if one.strings else nothing) for one in ordered], False, False)
    if not lookup.is_done_by(time.monotonic() + WAIT_S):
        _left_waiting.append(lookup)
        raise ValueError(f"{what}: after {WAIT_S:.0f} s not all of ranks {group.ranks} have come. {_WRITE}")
    try:
        lookup.finish()
    except HorovodInternalError as error:
        if "disagree" not in str(error):
            raise
        raise ValueError(f"{what}: other ranks look up rows meanwhile ({error}). {_WRITE}") from error


def _no_strings() -> Keys:
    return Keys(numpy.empty(0, numpy.int64), numpy.empty(0, numpy.uint32))


_WRITE = ("Each rank has a part of the tables' rows, so all ranks make this call, without `if hvd.rank() == 0:` around "
          "it or around the callback that makes it; the file is written once.")

"""Which rows of a table go, at the end of a step: policies, and what a table does after each step for those that Python
decides. What is simple is decided in csrc/embedding/eviction.h.
"""
import math
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy

from lightcc.core import objects, ops
from lightcc.embedding import lib

KEEP, TTL, COUNT, L2_NORM, ASKED = range(5)
_SLICE_ROWS = 1 << 16


@dataclass(frozen=True)
class Ttl:
    """A row goes at the end of the step at which it has not been trained for so many steps; at least 1.

    Errors: ValueError for fewer.

    >>> from lightcc import embedding
    >>> embedding.Ttl(28)
    Ttl(steps=28)
    """

    steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.steps < 1 << 31 or int(self.steps) != self.steps:
            raise ValueError(f"{self}: steps must be a whole number, at least 1.")


@dataclass(frozen=True)
class Count:
    """A row goes when count * decay^(steps since it was last trained) is below the threshold; count: its updates.

    threshold: above 0. decay: above 0, below 1. Errors: ValueError for others.

    >>> from lightcc import embedding
    >>> embedding.Count(threshold=0.5, decay=0.99)
    Count(threshold=0.5, decay=0.99)
    """

    threshold: float
    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf or not 0 < self.decay < 1:
            raise ValueError(f"{self}: threshold must be above 0, and decay above 0 and below 1.")


@dataclass(frozen=True)
class L2:
    """A row goes when the norm of its weights is below the threshold. Each row is looked at every `every` steps, at a
    turn that its key decides. Errors: ValueError for a threshold that is not above 0, and every below 1.

    >>> from lightcc import embedding
    >>> embedding.L2(1e-6)
    L2(threshold=1e-06, every=64)
    """

    threshold: float
    every: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"{self}: threshold must be above 0.")
        _expect_every(self)


@dataclass(frozen=True)
class Asking:
    """Asks a function which rows go. Each row is looked at every `every` steps, at a turn that its key decides.

    function(key, count, last, step), with norms=True function(key, count, last, step, norm), returns a bool array, True
    for rows that go. key: int64; count: uint32, of updates; last: uint32, the step of the last one; norm: float64, of
    the weights; step: the table's, an int. It is called on each rank, with this rank's rows that are due, also none;
    its answer for a row may depend on that row and the step alone.
    A bare function as evict= is Asking(function). Errors: ValueError for every below 1. If the function raises on some
    rank, or returns another length, the step ends on all ranks with a ValueError that names rank and table; it was
    applied, and no row goes.

    >>> from lightcc import embedding
    >>> embedding.Asking(lambda key, count, last, step: count < 3, every=16).every
    16
    """

    function: Callable[..., Any]
    every: int = 64
    norms: bool = False

    def __post_init__(self) -> None:
        _expect_every(self)


Policy = Union[Ttl, Count, L2, Asking]


def policy_of(evict: Any, table: str) -> Optional[Policy]:
    """What a user gives as evict=. TypeError for anything else than a policy, a function or None.

    >>> policy_of(Ttl(3), "user")
    Ttl(steps=3)
    """
    if evict is None or isinstance(evict, (Ttl, Count, L2, Asking)):
        return evict
    if callable(evict):
        return Asking(evict)
    raise TypeError(f"table {table!r}: evict={evict!r}; give Ttl, Count, L2, Asking or a function.")


def numbers_of(policy: Optional[Policy]) -> Tuple[int, float, float, int]:
    """Kind, a, b and every of the C API.

    >>> numbers_of(Count(0.5, 0.9))
    (2, 0.5, 0.9, 1)
    """
    if isinstance(policy, Ttl):
        return TTL, float(policy.steps), 0.0, 1
    if isinstance(policy, Count):
        return COUNT, policy.threshold, policy.decay, 1
    if isinstance(policy, L2):
        return L2_NORM, policy.threshold, 0.0, policy.every
    return (KEEP, 0.0, 0.0, 1) if policy is None else (ASKED, 0.0, 0.0, policy.every)


def after_step(tables: Sequence[Any]) -> None:
    """Once after each step, of the tables that it has updated, which are of one group: asks the policies' functions,
    and keeps the rows of all ranks within max_rows."""
    asking = [table for table in tables if isinstance(table.policy, Asking)]
    if asking:
        _ask(asking)
    for table in tables:
        if table.max_rows and table.counters().total_rows > table.max_rows:
            _trim(table)


def _ask(tables: List[Any]) -> None:
    """No row goes before the functions have answered on all ranks."""
    answers: List[numpy.ndarray] = []
    failed: Optional[Tuple[str, Exception]] = None
    for table in tables:
        try:
            answers.append(_answer(table))
        except Exception as error:  # whatever a user's function raises
            failed = failed or (table.name, error)
    _expect_answers(tables[0].group, failed)
    for table, go in zip(tables, answers):
        lib.call("answer_due", table.handle, lib.address(go), len(go))


def _answer(table: Any) -> numpy.ndarray:
    """Which of this rank's rows that are due go: 1, of uint8."""
    policy, count = table.policy, lib.c_int64()
    lib.call("due", table.handle, 0, None, None, None, None, count)
    keys = numpy.empty(count.value, numpy.int64)
    counts, lasts = numpy.empty((2, len(keys)), numpy.uint32)
    norms = numpy.empty(len(keys), numpy.float64) if policy.norms else None
    lib.call("due", table.handle, len(keys), *map(lib.address, (keys, counts, lasts, norms)), count)
    columns = [keys, counts, lasts, table.counters().steps] + ([norms] if policy.norms else [])
    go = numpy.asarray(policy.function(*columns))
    if go.shape != keys.shape or go.dtype != bool:
        raise ValueError(f"it was given {len(keys)} rows and returned {go.dtype} of the shape {go.shape}, not as many "
                         "bools")
    return numpy.ascontiguousarray(go).view(numpy.uint8)


def _expect_answers(group: Any, failed: Optional[Tuple[str, Exception]]) -> None:
    """Raises on all ranks if a table's function has failed on one. Four bytes a step."""
    if group.size > 1:
        anywhere = ops.allreduce(numpy.array([failed is not None], numpy.int32), op=ops.ReduceOps.Max,
                                 name="lightcc.embedding.asked", process_set=group.process_set)
        if not anywhere[0]:
            return
    elif failed is None:
        return
    told = failed and (failed[0], f"{type(failed[1]).__name__}: {failed[1]}")
    every = objects.allgather_object(told, "lightcc.embedding.failed", group.process_set)
    rank, (table, text) = next((rank, one) for rank, one in zip(group.ranks, every) if one)
    raise ValueError(f"table {table!r}: the eviction's function failed on rank {rank}: {text}. The step was applied; "
                     "no row was evicted.") from (failed and failed[1])


def _trim(table: Any) -> None:
    """Rows of all ranks go, least recently trained first, until 7/8 of max_rows are left; all of one step together.
    None of the step that has just been taken goes: a max_rows below the keys of one step cannot be kept."""
    from lightcc.embedding.rows import slices  # which stands on table.py
    now = table.counters().steps
    parts = [(part["key"], now - part["last"].astype(numpy.int64))
             for part in slices(table, _SLICE_ROWS, only=("key", "last"))]
    keys = numpy.concatenate([key for key, _ in parts] or [numpy.empty(0, numpy.int64)])
    ages = numpy.concatenate([age for _, age in parts] or [numpy.empty(0, numpy.int64)])
    histograms = objects.allgather_object(numpy.unique(ages, return_counts=True),
                                          f"lightcc.embedding.trim.{table.name}", table.process_set)
    rows_of_age = numpy.zeros(1 + max(int(age.max(initial=0)) for age, _ in histograms), numpy.int64)
    for age, number in histograms:
        rows_of_age[age] += number
    left = numpy.cumsum(rows_of_age)
    if left[-1] <= table.max_rows:
        return
    oldest = max(1, int(numpy.searchsorted(left, table.max_rows - table.max_rows // 8, side="right")))
    gone = numpy.ascontiguousarray(keys[ages >= oldest])
    lib.call("evict", table.handle, lib.address(gone), len(gone))


def _expect_every(policy: Any) -> None:
    if not 1 <= policy.every < 1 << 31 or int(policy.every) != policy.every:
        raise ValueError(f"{policy}: every must be a whole number, at least 1.")

"""Lookups and updates of several tables in one exchange, which all ranks of their process set make together."""
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy

from lightcc.core.process_sets import ProcessSet
from lightcc.embedding import lib
from lightcc.embedding.table import Group, Table


class Keys(NamedTuple):
    """int64, one-dimensional; checks: uint32, of a table of strings, else None."""

    keys: numpy.ndarray
    checks: Optional[numpy.ndarray] = None


class _Call:
    """A call of the library; freed with the last array that shows its memory."""

    def __init__(self, handle: int, kept: Any):
        self.handle, self._kept = lib.CallHandle(handle), kept  # the handle goes before what its call needs

    def finish(self) -> None:
        lib.finish(self.handle)


class Found:
    """What a lookup has of one table. rows: (different keys, dim), which the caller may write to; inverse: int64, the
    place of each key as given; keys: int64, the different ones in order of first appearance."""

    def __init__(self, call: _Call, index: int, table: Table):
        self.call, self.index, self.table = call, index, table
        found = lib.struct(lib.Found)
        lib.call("get_found", call.handle, index, found)
        self.keys = lib.view(found.keys, numpy.int64, found.unique, call)
        self.inverse = lib.view(found.inverse, numpy.int64, found.count, call)
        self.rows = lib.view(found.rows, table.dtype, found.unique * table.dim, call).reshape(-1, table.dim)


class Lookup:
    """A lookup under way; finish() waits for its rows. Errors of finish: HorovodInternalError, on every rank, if ranks
    look up other tables, or a table is of another dim, dtype, initializer or optimizer on another rank."""

    def __init__(self, wanted: Sequence[Tuple[Table, Keys]], training: bool, prefetch: bool):
        self.tables = [table for table, _ in wanted]
        array = (lib.Wanted * len(wanted))(*[
            lib.struct(lib.Wanted, table=table.handle, keys=lib.address(keys.keys), count=len(keys.keys),
                       checks=lib.address(keys.checks)) for table, keys in wanted])
        flags = training * lib.TRAINING | prefetch * lib.PREFETCH
        self._call = _Call(lib.made("lookup", self.tables[0].group.handle, array, len(array), flags), self.tables)

    def finish(self) -> List[Found]:
        """For each table, in the order of the call."""
        self._call.finish()
        return [Found(self._call, index, table) for index, table in enumerate(self.tables)]


class Update(NamedTuple):
    """Of one table in an update: of each lookup the gradient of its rows; none: this rank has looked up nothing.

    numbers: lr, beta1, beta2, eps, l1, l2, l21, equal on all ranks.
    """

    table: Table
    gradients: Sequence[Tuple[Found, numpy.ndarray]]
    numbers: Mapping[str, float]


class Step:
    """An update of several tables under way. Gradients are summed over ranks, in rank order, and each row takes one
    step.

    average: the sums are divided by the number of ranks. hold: nothing is applied before apply().
    finish() raises, with nothing applied on any rank: ValueError for a gradient that is not finite, which names rank,
    table and key; HorovodInternalError for tables that differ between ranks, and if memory does not suffice.
    """

    def __init__(self, updates: Sequence[Update], average: bool, hold: bool = False):
        self._count = len(updates)
        steps = (lib.Step * len(updates))()
        kept: List[Any] = [updates]
        for step, (table, gradients, numbers) in zip(steps, updates):
            array = (lib.Gradient * len(gradients))(*[
                lib.Gradient(lookup=found.call.handle, index=found.index, values=lib.address(values))
                for found, values in gradients])
            kept.append(array)
            step.size, step.table, step.gradient_count, step.gradients = _STEP_BYTES, table.handle, len(array), array
            for name, value in numbers.items():
                setattr(step, name, value)
        flags = average * lib.AVERAGE | hold * lib.HOLD
        group = updates[0].table.group
        self._call = _Call(lib.made("update", group.handle, steps, len(steps), flags), kept)

    def finish(self) -> None:
        self._call.finish()

    def squares(self) -> float:
        """After finish: the sum of squares of all tables' summed gradients, the same on all ranks."""
        sums = numpy.empty(self._count, numpy.float64)
        lib.call("get_sums", self._call.handle, lib.address(sums), None)
        return float(sums.sum())

    def apply(self, scale: float = 1.0, discard: bool = False) -> None:
        """After finish of an update on hold: applies it with gradients times scale, or forgets it; all ranks alike."""
        lib.call("apply", self._call.handle, scale, discard)
        self._call.finish()


_STEP_BYTES = lib.struct(lib.Step).size


def serve_one(process_set: ProcessSet) -> int:
    """Answers one call of the other ranks and says which it was: lib.SERVED_..."""
    group = Group.of(process_set)
    call = _Call(lib.made("serve", group.handle), group)
    call.finish()
    served = lib.c_int()
    lib.call("get_served", call.handle, served)
    return served.value

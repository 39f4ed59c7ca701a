"""Lookups and updates of several tables in one exchange, which all ranks of their process set make together."""
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy

from lightcc.core.process_sets import ProcessSet
from lightcc.embedding import lib
from lightcc.embedding.table import Group, Table, after_step, after_step_of_others


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

    def is_done_by(self, until: float) -> bool:
        return lib.is_done_by(self.handle, until)


class Found:
    """What a lookup has of one table. rows: (different keys, dim), which the caller may write to; inverse: int64, the
    place of each key as given; keys: int64, the different ones, owner by owner; plain: inverse is 0, 1, 2 ..."""

    def __init__(self, call: _Call, index: int, table: Table):
        self.call, self.index, self.table = call, index, table
        found = lib.struct(lib.Found)
        lib.call("get_found", call.handle, index, found)
        self.plain = bool(found.plain)
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
        group = self.tables[0].group  # which a table may leave before its call is gone
        self._call = _Call(lib.made("lookup", group.handle, array, len(array), flags), [self.tables, group])

    def finish(self) -> List[Found]:
        """For each table, in the order of the call."""
        self._call.finish()
        return [Found(self._call, index, table) for index, table in enumerate(self.tables)]

    def is_done_by(self, until: float) -> bool:
        """Whether it is done at a moment of time.monotonic(), or before; finish() then says how it ended."""
        return self._call.is_done_by(until)

    def drop(self) -> None:
        """In place of finish, for a prefetched lookup that will not be trained; all ranks wait for each other."""
        lib.call("drop", self._call.handle)
        self._call.finish()


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
        self._count, self._hold = len(updates), hold
        self._tables = [update.table for update in updates]
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
        self._call = _Call(lib.made("update", group.handle, steps, len(steps), flags), [kept, group])

    def finish(self) -> None:
        self._call.finish()
        if not self._hold:
            after_step(self._tables)

    def squares(self) -> float:
        """After finish: the sum of squares of all tables' summed gradients, the same on all ranks."""
        sums = numpy.empty(self._count, numpy.float64)
        lib.call("get_sums", self._call.handle, lib.address(sums), None)
        return float(sums.sum())

    def apply(self, scale: float = 1.0, discard: bool = False) -> None:
        """After finish of an update on hold: applies it with gradients times scale, or forgets it; all ranks alike."""
        lib.call("apply", self._call.handle, scale, discard)
        self._call.finish()
        after_step(self._tables)


_STEP_BYTES = lib.struct(lib.Step).size


class Served:
    """Part of this rank, which has no data, in one call of the others, whatever it is. prefetch: in a prefetched
    lookup, after which this rank has still to end a step."""

    def __init__(self, process_set: ProcessSet, prefetch: bool = False):
        self._group = Group.of(process_set)
        self._call = _Call(lib.made("serve", self._group.handle, prefetch * lib.PREFETCH), self._group)

    def finish(self) -> int:
        """Answers the call and says which it was: lib.SERVED_..."""
        self._call.finish()
        served = lib.c_int()
        lib.call("get_served", self._call.handle, served)
        if served.value in (lib.SERVED_UPDATE, lib.SERVED_APPLY):
            after_step_of_others(self._group)
        return served.value

"""Rows go to their owners when the ranks of a process set change: as few as can be, and all of them or none.

Each rank says where it was (Place); from that all find the same new owner map. Rows that change their owner are sent as
copies, which the new owners keep aside. When all have all of theirs, each rank, by itself, drops what it has sent and
takes in what it got. A rank that is lost before leaves the tables as they were. It may be lost just when some ranks
know that all are ready and others do not: so a place has a version, and copies are kept until the next move finds out
whether some rank has gone that step.
"""
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy

from lightcc.core import lib as core
from lightcc.core import objects, ops
from lightcc.embedding import lib, rows
from lightcc.embedding.admission import COUNTED, buckets_of_candidates, candidates, held, insert_candidates
from lightcc.embedding.delta import joined
from lightcc.embedding.owners import BUCKETS, buckets_of, first_map, renumbered
from lightcc.embedding.rules import NUMBERS, Rule
from lightcc.embedding.table import Table

_SLICE_ROWS = 16384


class Place(NamedTuple):
    """Which rank of how many the owner map of a shard means by this one; version: how many moves led to it."""

    version: int
    rank: int
    size: int


class Steps(NamedTuple):
    """What all ranks know of a table alike."""

    owners: numpy.ndarray
    alphas: numpy.ndarray
    numbers: numpy.ndarray
    rule: Optional[Rule]


class Staged(NamedTuple):
    """A move that has all but happened. version: to which it leads; place: None if this rank leaves."""

    version: int
    place: Optional[Place]
    owners: numpy.ndarray
    leaving: List[numpy.ndarray]              # keys
    coming: List[Dict[str, numpy.ndarray]]    # rows, by column
    uncounted: List[numpy.ndarray]            # keys of candidates that leave
    counted: List[Dict[str, numpy.ndarray]]   # candidates that come
    steps: Steps


class Lost(Exception):
    """Rows of a table are in nobody's memory any more. Attributes: table, ranks (of the world before)."""

    def __init__(self, table: str, ranks: Sequence[int], size: int):
        self.table, self.ranks = table, list(ranks)
        whose = f"of rank {', '.join(map(str, ranks))} of {size}" if ranks else "of a rank"
        super().__init__(f"the rows {whose} of table {table!r} are lost")


class ElasticShard:
    """A table's shard in an elastic job. Attributes: table; place, None for a shard that has no rows of the job yet;
    owners, the map that the place is of; came, how many rows others have sent in all; broken, whether rows are missing
    because a load was cut short."""

    def __init__(self, table: Table):
        self.table = table
        self.place: Optional[Place] = None
        self.owners = first_map(1)
        self.came = 0
        self.broken = False
        self._staged: Optional[Staged] = None

    def stage(self) -> None:
        """The first half of settle."""
        is_later = self.table.epoch != core.epoch
        self.table.enter()
        said = self._said(is_later)
        self._go_the_last_step(max((s.place.version for s in said if s.place), default=0))
        if any(s.has_staged for s in said):
            said = self._said(is_later)
        known = [s.place for s in said if s.place is not None]
        if not known:
            self._begin(said)
            return
        version, size = known[0].version, known[0].size
        new_rank_of = [-1] * size
        for rank, s in enumerate(said):
            if s.place is not None:
                new_rank_of[s.place.rank] = rank
        gone = [rank for rank, now in enumerate(new_rank_of) if now < 0]
        if any(s.broken for s in said) or gone and any(s.rows or s.steps for s in said):
            raise Lost(self.table.name, gone, size)
        group = self.table.group
        self._move(said, new_rank_of, list(range(group.size)), Place(version + 1, group.rank, group.size))

    def take(self) -> None:
        """The second half, of settle or leave: nothing is sent any more."""
        if self._staged is not None:
            self._take(self._staged)
        if self.place is not None and self.place.size == self.table.group.size:
            self.adopt_owners(self.owners)

    def stage_leave(self, leaving: Sequence[int]) -> None:
        """The first half of leave."""
        group = self.table.group
        staying = [rank for rank in range(group.size) if rank not in leaving]
        if not staying or len(staying) == group.size:
            return
        said = self._said(False)
        if any(s.place is None for s in said):
            return
        new_rank_of = [staying.index(rank) if rank in staying else -1 for rank in range(group.size)]
        place = None
        if group.rank in staying:
            place = Place(self._version() + 1, staying.index(group.rank), len(staying))
        self._move(said, new_rank_of, staying, place)

    def loaded(self, version: int, owners: numpy.ndarray) -> None:
        """All its rows have come from a checkpoint, in this world."""
        group = self.table.group
        self.place, self.owners, self._staged = Place(version, group.rank, group.size), owners, None
        self.adopt_owners(owners)

    def adopt_owners(self, owners: numpy.ndarray) -> None:
        lib.call("set_owners", self.table.handle, lib.address(numpy.ascontiguousarray(owners, numpy.uint16)))

    def _said(self, is_later: bool) -> List["_Said"]:
        table, stats = self.table, self.table.stats()
        mine = _Said(self.place, self._staged is not None, stats["rows"], held(table), stats["steps"], self.broken,
                     is_later)
        return objects.allgather_object(mine, f"lightcc.embedding.moving.{table.name}", table.group.process_set)

    def _begin(self, said: List["_Said"]) -> None:
        """Nobody has a place: the job begins. The rows that there are were loaded in this world."""
        group = self.table.group
        holds = any(s.rows or s.candidates for s in said)
        if holds and any(s.is_later for s in said):
            raise Lost(self.table.name, [], group.size)
        owners = steps_of(self.table).owners
        if not holds:
            owners = first_map(group.size)
        self.loaded(1, owners)

    def _go_the_last_step(self, version: int) -> None:
        """Of the move that this rank has staged, if another rank has gone it. Else the move is forgotten."""
        staged, self._staged = self._staged, None
        if staged is not None and self._version() < version and staged.version == version:
            self._take(staged)

    def _version(self) -> int:
        return self.place.version if self.place is not None else 0

    def _move(self, said: List["_Said"], new_rank_of: Sequence[int], ranks: List[int], place: Optional[Place]) -> None:
        """ranks: of the group, in the order of their numbers in the new map."""
        table, group = self.table, self.table.group
        known = [rank for rank, s in enumerate(said) if s.place is not None]
        steps = steps_of(table)._replace(owners=self.owners) if self.place is not None else None
        if len(known) < len(said):
            steps = objects.broadcast_object(steps, group.ranks[known[0]], f"lightcc.embedding.steps.{table.name}",
                                             group.process_set)
        assert steps is not None
        if steps.rule is not None:
            table.attach(steps.rule)  # to that of a newcomer whose optimizer attaches it with its first update
        owners = renumbered(steps.owners, new_rank_of, len(ranks))
        rank_of_bucket = numpy.array(ranks)[owners]
        here = self.place is not None
        leaving, coming = _exchanged(
            table, rows.columns_of(table), rows.slices(table, _SLICE_ROWS) if here else iter(()),
            max(s.rows for s in said), lambda keys: rank_of_bucket[buckets_of(keys)])
        uncounted, counted = _exchanged(
            table, COUNTED, _candidate_slices(table) if here else iter(()),
            max(s.candidates for s in said), lambda keys: rank_of_bucket[buckets_of_candidates(table, keys)])
        version = max(s.place.version for s in said if s.place) + 1
        self._staged = Staged(version, place, owners, leaving, coming, uncounted, counted, steps)

    def _take(self, staged: Staged) -> None:
        """What has come belongs here from now on, and what was sent does not."""
        table, newcomer = self.table, self.place is None
        table.history = None  # deltas begin with a new save
        self.broken, self._staged = True, None
        lib.call("end_log", table.handle, lib.OF_COMMIT)
        lib.call("end_log", table.handle, lib.OF_CHECKPOINT)
        if staged.place is None or newcomer:
            lib.call("clear", table.handle)
            lib.call("set_alphas", table.handle, lib.address(staged.steps.alphas), len(staged.steps.alphas))
            lib.call("set_numbers", table.handle, lib.address(staged.steps.numbers))
        for keys in staged.leaving:
            lib.call("erase", table.handle, lib.address(keys), len(keys))
        self.adopt_owners(numpy.full(BUCKETS, table.group.rank, numpy.uint16))
        for keys in staged.uncounted:
            insert_candidates(table, {"key": keys, "count": numpy.zeros(len(keys), numpy.uint32)})
        for columns in staged.coming:
            self.came += rows.insert(table, columns)
        for columns in staged.counted:
            insert_candidates(table, columns)
        lib.call("begin_log", table.handle, lib.OF_COMMIT)
        self.place, self.owners, self.broken = staged.place, staged.owners, False


def settle(shards: Sequence[ElasticShard]) -> Optional[Lost]:
    """Into the present world, with rows at their owners. All ranks of the world call it, with their tables in one
    order.

    Returns the first Lost, on all ranks of its process set: a rank is missing that had rows; no rows have moved then.
    Errors: HorovodInternalError, if a rank is lost meanwhile: then nothing has happened, or the next settle makes it
    happen. ValueError for a rank that is not in a table's process set.
    """
    lost: Optional[Lost] = None
    for shard in shards:
        try:
            shard.stage()
        except Lost as error:
            lost = lost or error
    if not any(objects.allgather_object(lost is not None, "lightcc.embedding.staged")):
        for shard in shards:
            shard.take()
    return lost


def leave(shards: Sequence[ElasticShard], leaving: Sequence[int]) -> None:
    """The rows of some ranks of the world, which are to leave it, go to the others; nothing is looked up in this world
    any more. All its ranks call it. Errors: HorovodInternalError as of settle."""
    for shard in shards:
        ranks = shard.table.group.ranks
        shard.stage_leave([ranks.index(rank) for rank in leaving if rank in ranks])
    ops.barrier()
    for shard in shards:
        shard.take()


class _Said(NamedTuple):
    """What a rank says of its shard. is_later: its table was made in a world before this one."""

    place: Optional[Place]
    has_staged: bool
    rows: int
    candidates: int
    steps: int
    broken: bool
    is_later: bool


def steps_of(table: Table) -> Steps:
    """Copies of a table's owner map, factors of its steps, and numbers of the last; and its rule."""
    owners, numbers = numpy.empty(BUCKETS, numpy.uint16), numpy.empty(len(NUMBERS), numpy.float64)
    lib.call("owners", table.handle, lib.address(owners))
    lib.call("numbers", table.handle, lib.address(numbers))
    return Steps(owners, rows.alphas(table), numbers, table.rule)


def _candidate_slices(table: Table) -> Iterator[Dict[str, numpy.ndarray]]:
    every = joined(candidates(table), COUNTED)
    for first in range(0, len(every["key"]), _SLICE_ROWS):
        yield {name: values[first:first + _SLICE_ROWS] for name, values in every.items()}


def _exchanged(table: Table, of: rows.Columns, slices: Iterator[Dict[str, numpy.ndarray]], most: int,
               ranks_of: Callable[[numpy.ndarray], numpy.ndarray]
               ) -> Tuple[List[numpy.ndarray], List[Dict[str, numpy.ndarray]]]:
    """Sends what belongs to other ranks. Returns its keys, and what has come. most: what any rank has; ranks_of: whose
    keys are."""
    group = table.group
    leaving: List[numpy.ndarray] = []
    coming: List[Dict[str, numpy.ndarray]] = []
    dtype = numpy.dtype([(name, kind, width) for name, (kind, width) in of.items()])
    for _ in range(-(-most // _SLICE_ROWS)):
        records, splits = _packed(next(slices, None), ranks_of, group.rank, group.size, dtype)
        leaving.append(numpy.ascontiguousarray(records["key"]))
        data = records.view(numpy.uint8).reshape(len(records), dtype.itemsize)
        came, _ = ops.alltoall(data, splits, f"lightcc.embedding.moved.{table.name}", group.process_set)
        if len(came):
            got = numpy.ascontiguousarray(came).reshape(-1).view(dtype)
            coming.append({name: numpy.ascontiguousarray(got[name]) for name in of})
    return leaving, coming


def _packed(columns: Optional[Dict[str, numpy.ndarray]], ranks_of: Callable[[numpy.ndarray], numpy.ndarray], own: int,
            size: int, dtype: numpy.dtype) -> Tuple[numpy.ndarray, List[int]]:
    """Those rows that belong to other ranks, in the order of these, and how many each gets."""
    if columns is None:
        return numpy.empty(0, dtype), [0] * size
    targets = ranks_of(columns["key"])
    chosen = numpy.flatnonzero(targets != own)
    chosen = chosen[numpy.argsort(targets[chosen], kind="stable")]
    records = numpy.empty(len(chosen), dtype)
    for name, values in columns.items():
        records[name] = values[chosen]
    return records, numpy.bincount(targets[chosen], minlength=size).tolist()

"""Process sets from one world of an elastic job to the next, where workers have other ranks.

All sets that a job makes are numbered, on all workers alike. At the head of each world every worker says which numbers
it knows, and whether it is a member; so all know the sets and their new ranks, and make the core's groups anew. Then:
1. A set is carried over if all workers that were there before know it: one that some have made or removed and others
   have not, as a failure came in between, is not. Some worker must still hold it, and some member must be left.
2. It keeps its id, as graphs have it in them.
3. A worker that is new has an object of each set, too. Its script makes them as the others' scripts have done, before
   it trains: so it takes them in the order of their numbers, and tells nobody.
"""
import json
import weakref
from collections import deque
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from lightcc.core import lib, ops
from lightcc.core import process_sets as sets
from lightcc.core.process_sets import ProcessSet


class Known(NamedTuple):
    """What a worker says of a set. is_held: its program has an object of it."""

    number: int
    id: int
    is_member: bool
    is_held: bool


class Told(NamedTuple):
    """What a worker says that was in a world before."""

    made: int  # sets, so far
    known: List[Known]


class _Left(NamedTuple):
    """A set of the world that this worker has left."""

    id: int
    is_member: bool
    objects: List["weakref.ref[ProcessSet]"]


_left: Dict[int, _Left] = {}  # number: set
_worlds = 0  # that this worker has entered


def agreed(told: Sequence[Optional[Told]]) -> Dict[int, Tuple[int, List[int]]]:
    """{number: (id, ranks)} of the sets that are carried over; no ranks: every member has left. told: by rank; None of
    a worker that is new."""
    tables = [one and {known.number: known for known in one.known} for one in told]
    before = [table for table in tables if table is not None]
    found = {}
    for number in sorted(set.intersection(*map(set, before)) if before else ()):
        ranks = [rank for rank, table in enumerate(tables) if table and table[number].is_member]
        if any(table[number].is_held for table in before):
            found[number] = before[0][number].id, ranks
    return found


def remember() -> None:
    """The world is about to be left."""
    _left.clear()
    for process_set in sets.registered_sets():
        group = process_set.process_set_id
        if process_set.mpi_comm is None and group is not None:
            left = _left.setdefault(process_set._number, _Left(group, bool(process_set.included()), []))
            left.objects.append(weakref.ref(process_set))


def carry_over() -> None:
    """Registers the sets of earlier worlds. All ranks of a new world begin with it; should it fail, the same can be
    carried over to another world."""
    global _worlds
    objects = {number: [p for p in (reference() for reference in left.objects) if p is not None]
               for number, left in _left.items()}
    mine = Told(sets.made, [Known(number, left.id, left.is_member, bool(objects[number]))
                            for number, left in _left.items()])
    told = _gathered(mine if _worlds else None)
    carried = agreed(told)
    _make_groups({group: ranks for group, ranks in carried.values() if ranks})
    sets.made = sets.carried = max((one.made for one in told if one), default=0)
    restored = [_restored(number, objects.get(number) if number in carried else None, *carried.get(number, (0, [])))
                for number in range(sets.made)]
    sets.to_take = deque(restored) if any(told) else None
    _left.clear()
    _worlds += 1


def take(process_sets: Sequence[Union[ProcessSet, Sequence[int]]]) -> None:
    """Those that init was given, in a job that has made them already."""
    for given in process_sets:
        known = sets.next_to_take()
        sets.bind(given if isinstance(given, ProcessSet) else ProcessSet(given), known)


def entered() -> None:
    """init is over. A worker that was there before has its sets, and those that it makes from now on are new."""
    if _worlds > 1:
        sets.to_take = None


def training() -> None:
    """The function that trains begins, and all that it makes is new."""
    sets.to_take = None


def _restored(number: int, objects: Optional[List[ProcessSet]], group: int, ranks: List[int]) -> ProcessSet:
    """An object of a set in this world; no ranks: of one that is gone. objects: those of this worker's program, which
    all become that set again; one is made if there are none."""
    objects = objects or [ProcessSet([])]
    for process_set in objects:
        process_set.ranks, process_set._number = list(ranks), number
        if ranks:
            sets.register(process_set, group, number)
    return objects[0]


def _gathered(mine: Optional[Told]) -> List[Optional[Told]]:
    """What all ranks say. JSON: to import cloudpickle would take longer than all the rest."""
    lines = bytes(ops.allgather(bytearray(json.dumps(mine).encode() + b"\n"), "elastic.process_sets")).splitlines()
    return [one and Told(one[0], [Known(*known) for known in one[1]]) for one in map(json.loads, lines)]


def _make_groups(ranks: Dict[int, List[int]]) -> None:
    """Makes the core's groups with these ids. It gives them out in order, so a group has to stand in for each that is
    left out."""
    ids = range(1, max(ranks, default=0) + 1)
    for group in ids:
        lib.add_group(ranks.get(group, [0]))
    for group in ids:
        if group not in ranks:
            lib.remove_group(group)

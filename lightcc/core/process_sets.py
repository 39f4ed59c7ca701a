"""Process sets: ordered subsets of the ranks in which a collective can run. The core calls them groups."""
import operator
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Union

from lightcc.core import lib
from lightcc.core.util import is_iterable

_GLOBAL = 0


class ProcessSet:
    """A subset of the ranks, to be passed to init() or add_process_set(), then to collectives.

    ranks_or_comm: world ranks (sorted here); or a communicator of mpi4py, all of whose processes are ranks of the world
    and make the same set, for init() only, which finds out their ranks. Attributes: `ranks`, None until then;
    `process_set_id`, None until registered; `mpi_comm`, the communicator or None. Errors: ValueError for anything but
    distinct ints or a communicator. Source: horovod.common.process_sets.

    >>> ProcessSet([2, 0])
    ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)
    """

    process_set_id: Optional[int] = None
    ranks: Optional[List[int]] = None
    mpi_comm: Optional[Any] = None
    _number: int = -1  # how many sets were made before it, in all worlds of the job; -1: it was never registered

    def __init__(self, ranks_or_comm: Union[Sequence[int], Any]) -> None:
        if hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
            return
        if not is_iterable(ranks_or_comm):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): give a list of world ranks, or a communicator of mpi4py.")
        ranks = list(ranks_or_comm)
        try:
            numbers = [operator.index(rank) for rank in ranks]  # numpy's ints too
        except TypeError:
            numbers = []
        if any(isinstance(rank, bool) for rank in ranks) or len(set(numbers)) < len(ranks):
            raise ValueError(f"ProcessSet({ranks!r}): ranks must be distinct ints.")
        self.ranks = sorted(numbers)

    def size(self) -> Optional[int]:
        """Number of members; None while unregistered. ValueError before init.

        >>> hvd.init(); hvd.global_process_set.size() == hvd.size()
        True
        """
        return self._query(lib.group_size)

    def rank(self) -> Optional[int]:
        """Rank of this process in the set; None while unregistered. ValueError if it is not a member.

        >>> hvd.init(); hvd.global_process_set.rank() == hvd.rank()
        True
        """
        return self._query(lib.group_rank)

    def included(self) -> Optional[bool]:
        """Whether this process is a member; None if the ranks are unknown. ValueError before init.

        >>> hvd.init(); hvd.global_process_set.included()
        True
        """
        if self.ranks is None:
            return None
        _require_init()
        return lib.rank() in self.ranks

    def _query(self, question: Callable[[int], int]) -> Optional[int]:
        if self.process_set_id is None:
            return None
        _require_init()
        require_registered(self)
        answer = question(self.process_set_id)
        if answer < 0:
            raise ValueError(f"{self} does not contain rank {lib.rank()}.")
        return answer

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])  # the world; init fills its ranks in place, and mpi_comm if it is given one
global_process_set.process_set_id = _GLOBAL

_registered: List[ProcessSet] = []  # the objects whose ids end with the epoch

# In an elastic job (carried_sets.py):
made = 0     # the number of the next set
carried = 0  # sets with smaller numbers are of earlier worlds
to_take: Optional[Deque[ProcessSet]] = None  # those that others have made, and the script of this worker makes next


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Registers a process set after init; all ranks of the job call it, in the same order. Returns the set.

    Unlike in Horovod it needs no HOROVOD_DYNAMIC_PROCESS_SETS=1. In an elastic job a set of an earlier world that has
    these ranks now is taken again; and a worker that comes later takes, until it trains, the sets that the others have
    made, in their order, whatever their ranks are now (docs/elastic.md). Errors: ValueError for a set with the ranks of
    an existing one, for unknown ranks and before init; NotImplementedError for a set of a communicator.
    Source: horovod.common.process_sets.

    >>> hvd.init(); first = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    """
    _require_init()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if _is_gone(process_set):
        raise not_registered(process_set)
    known = next_to_take() if to_take is not None else _carried_over(process_set.ranks)
    if known is not None:
        bind(process_set, known)
        return process_set
    if process_set.process_set_id is not None or process_set.ranks in ids_and_ranks().values():
        raise ValueError(f"add_process_set: {process_set} has the ranks of a set that exists already.")
    if process_set.mpi_comm is not None:
        raise NotImplementedError(f"add_process_set: {process_set} is given by a communicator; pass it to hvd.init("
                                  "process_sets=...), or its world ranks here.")
    register(process_set, lib.add_group(ranks_of(process_set)))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it. Returns False for the global set and for one that is not
    registered (any more).

    Its id may be given to another set later. Errors: ValueError before init. Source: horovod.common.process_sets.

    >>> hvd.init(); hvd.remove_process_set(hvd.global_process_set)
    False
    """
    _require_init()
    gone = process_set.process_set_id
    if gone is None or gone == _GLOBAL or not is_registered(process_set):
        return False
    lib.remove_group(gone)
    process_set.process_set_id = None
    for known in _registered:  # a second init may have given several objects this id
        if known.process_set_id == gone:
            known.process_set_id = None
    _registered[:] = [known for known in _registered if known.process_set_id is not None]
    return True


def register(process_set: ProcessSet, group: int, number: Optional[int] = None) -> None:
    """Gives a set the id of a group of the core. number: that which it has; None: a new one, or that of the set which
    is this group already."""
    global made
    if number is None:
        number = next((known._number for known in _registered if known.process_set_id == group), made)
    made = max(made, number + 1)
    process_set.process_set_id, process_set._number = group, number
    if process_set not in _registered:
        _registered.append(process_set)


def bind(process_set: ProcessSet, known: ProcessSet) -> None:
    """Makes it another object of a set that is known, unless it is registered already."""
    if process_set.process_set_id is not None:
        return
    process_set.ranks, process_set._number = list(ranks_of(known)), known._number
    if known.process_set_id is not None:
        register(process_set, known.process_set_id)


def next_to_take() -> ProcessSet:
    """The next of those that others have made. ValueError if there are no more."""
    if not to_take:
        raise ValueError(f"rank {lib.rank()} has come later to this elastic job and makes more process sets than the "
                         f"{made} that the others have made. Before it trains, a script must make the same sets in the "
                         "same order on all workers.")
    return to_take.popleft()


def ranks_of(process_set: ProcessSet) -> List[int]:
    """Those of a set which has them: of each but one of a communicator, until init() has found them out."""
    assert process_set.ranks is not None
    return process_set.ranks


def _carried_over(ranks: Optional[List[int]]) -> Optional[ProcessSet]:
    """A set of an earlier world that has these ranks now."""
    return next((known for known in _registered if known._number < carried and known.ranks == ranks), None)


def _is_gone(process_set: ProcessSet) -> bool:
    return process_set._number >= 0 and not process_set.ranks


def registered_sets() -> List[ProcessSet]:
    """All objects that register has given an id to, in this epoch."""
    return [*_registered]


def ids_and_ranks() -> Dict[int, List[int]]:
    """The groups of the core: {id: world ranks}."""
    return {group: lib.group_ranks(group) or [] for group in lib.group_ids()}


def is_registered(process_set: ProcessSet) -> bool:
    """Whether the core has a group with its id: not so if that was set by hand, or the set was removed since. False
    before init."""
    group = process_set.process_set_id
    return type(group) is int and group >> 31 == 0 and lib.group_size(group) >= 0


def require_registered(process_set: ProcessSet) -> None:
    """ValueError unless is_registered."""
    if not is_registered(process_set):
        raise not_registered(process_set)


def not_registered(process_set: ProcessSet) -> ValueError:
    """The error of whoever uses it."""
    if _is_gone(process_set):
        return ValueError(f"{process_set} is not registered any more: every member of it has left the elastic job.")
    return ValueError(f"{process_set} is not registered, or not any more; use hvd.add_process_set or hvd.init("
                      "process_sets=...).")


def registered(ranks: Sequence[int]) -> ProcessSet:
    """The registered set with these ranks; ValueError if there is none."""
    for process_set in (global_process_set, *_registered):
        if process_set.ranks == list(ranks):
            return process_set
    raise ValueError(f"No process set with the ranks {list(ranks)} is registered; use hvd.add_process_set.")


def forget() -> None:
    """The epoch is over: no set but the global one is registered any more."""
    for process_set in _registered:
        process_set.process_set_id = None
    del _registered[:]
    del ranks_of(global_process_set)[:]
    global_process_set.mpi_comm = None


def _require_init() -> None:
    if not lib.initialized():
        raise lib.not_initialised()

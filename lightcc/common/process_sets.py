"""Process sets: ordered subsets of the ranks in which a collective can run. The core calls them groups."""
from typing import Any, Dict, List, Optional, Sequence, Union

from lightcc import _core
from lightcc.common.util import is_iterable

_GLOBAL = 0


class ProcessSet:
    """A subset of the ranks, to be passed to init() or add_process_set(), then to collectives.

    ranks_or_comm: world ranks (sorted here); or a communicator of mpi4py, all of whose processes are ranks of the world
    and make the same set, for init() only, which finds out their ranks. Attributes: `ranks`, None until then;
    `process_set_id`, None until registered; `mpi_comm`, the communicator or None. Errors: ValueError for anything but
    distinct ints or a communicator. Source: horovod.common.process_sets.

    >>> ProcessSet([2, 0]).ranks
    [0, 2]
    """

    process_set_id: Optional[int] = None
    ranks: Optional[List[int]] = None
    mpi_comm: Optional[Any] = None

    def __init__(self, ranks_or_comm: Union[Sequence[int], Any]):
        if hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
            return
        if not is_iterable(ranks_or_comm):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): give a list of world ranks, or a communicator of mpi4py.")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet({ranks!r}): ranks must be distinct ints.")
        self.ranks = sorted(ranks)

    def size(self) -> Optional[int]:
        """Number of members; None while unregistered. ValueError before init.

        >>> hvd.init(); hvd.global_process_set.size() == hvd.size()
        True
        """
        return self._query(_core.group_size, "is not known to the core")

    def rank(self) -> Optional[int]:
        """Rank of this process in the set; None while unregistered. ValueError if it is not a member.

        >>> hvd.init(); hvd.global_process_set.rank() == hvd.rank()
        True
        """
        return self._query(_core.group_rank, f"does not contain rank {_core.rank()}")

    def included(self) -> Optional[bool]:
        """Whether this process is a member; None if the ranks are unknown. ValueError before init.

        >>> hvd.init(); hvd.global_process_set.included()
        True
        """
        if self.ranks is None:
            return None
        _require_init()
        return _core.rank() in self.ranks

    def _query(self, question, failure: str) -> Optional[int]:
        if self.process_set_id is None:
            return None
        _require_init()
        answer = question(self.process_set_id)
        if answer < 0:
            raise ValueError(f"{self} {failure}.")
        return answer

    def __repr__(self) -> str:
        comm = "" if self.mpi_comm is None else f", mpi_comm={self.mpi_comm}"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}{comm})"


global_process_set = ProcessSet([])  # the world; init fills its ranks in place
global_process_set.process_set_id = _GLOBAL

_registered: List[ProcessSet] = []  # the objects whose ids end with the epoch


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Registers a process set after init; all ranks of the job call it, in the same order. Returns the set.

    Unlike in Horovod it needs no HOROVOD_DYNAMIC_PROCESS_SETS=1. Errors: ValueError for a set with the ranks of an
    existing one, for unknown ranks and before init; NotImplementedError for a set of a communicator.
    Source: horovod.common.process_sets.

    >>> hvd.init(); first = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    """
    _require_init()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.mpi_comm is not None:
        raise NotImplementedError(f"add_process_set: {process_set} is given by a communicator; pass it to hvd.init("
                                  "process_sets=...), or its world ranks here.")
    if process_set.process_set_id is not None or process_set.ranks in ids_and_ranks().values():
        raise ValueError(f"add_process_set: {process_set} has the ranks of a set that exists already.")
    _register(process_set, _core.add_group(process_set.ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it. Returns False for the global or an unregistered set.

    Its id may be given to another set later. Errors: ValueError before init. Source: horovod.common.process_sets.

    >>> hvd.init(); hvd.remove_process_set(hvd.global_process_set)
    False
    """
    _require_init()
    if process_set.process_set_id in (None, _GLOBAL):
        return False
    gone = process_set.process_set_id
    _core.remove_group(gone)
    process_set.process_set_id = None
    for known in _registered:  # a second init may have given several objects this id
        if known.process_set_id == gone:
            known.process_set_id = None
    _registered[:] = [known for known in _registered if known.process_set_id is not None]
    return True


def match(process_sets: Sequence[Union[ProcessSet, Sequence[int]]]) -> None:
    """Gives each set the id of the group with its ranks, making the groups that do not exist yet (see init)."""
    wanted = [p if isinstance(p, ProcessSet) else ProcessSet(p) for p in process_sets]
    groups = _groups_in_order(wanted)
    seen = [global_process_set.ranks]
    for ranks in groups:
        if ranks in seen:
            raise ValueError(f"init(process_sets=...): {ranks} is there twice, or is the global set.")
        seen.append(ranks)
    ids = {tuple(ranks): group for group, ranks in ids_and_ranks().items()}
    for ranks in groups:
        if tuple(ranks) not in ids:
            ids[tuple(ranks)] = _core.add_group(ranks)
    for process_set in wanted:
        _register(process_set, ids[tuple(process_set.ranks)])


def _groups_in_order(wanted: List[ProcessSet]) -> List[List[int]]:
    """The ranks of all groups that are to be, in the order in which all ranks of the world make them.

    A split communicator is another one on each rank. Those at one place of the lists are told to all, and go by ranks.
    """
    if not any(process_set.mpi_comm is not None for process_set in wanted):
        return [process_set.ranks for process_set in wanted]
    from lightcc.objects import allgather_object  # late: it is built on this module
    for process_set in wanted:
        if process_set.mpi_comm is not None:
            process_set.ranks = sorted(process_set.mpi_comm.allgather(_core.rank()))
    lists = allgather_object([process_set.ranks for process_set in wanted], "init.process_sets")
    if len({len(ranks) for ranks in lists}) > 1:
        raise ValueError("init(process_sets=...): the ranks of the job must give equally many process sets, but give "
                         f"{', '.join(str(len(ranks)) for ranks in lists)}.")
    return [list(ranks) for place in zip(*lists) for ranks in sorted(set(map(tuple, place)))]


def ids_and_ranks() -> Dict[int, List[int]]:
    """The groups of the core: {id: world ranks}."""
    return {group: _core.group_ranks(group) for group in _core.group_ids()}


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
    del global_process_set.ranks[:]


def _register(process_set: ProcessSet, group: int) -> None:
    process_set.process_set_id = group
    _registered.append(process_set)


def _require_init() -> None:
    if not _core.initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")

"""Which groups of the core the process sets of init() are: a group with their ranks, which is made if there is none."""
from typing import List, Sequence, Union

from lightcc.core import lib
from lightcc.core.objects import allgather_object
from lightcc.core.process_sets import ProcessSet, global_process_set, ids_and_ranks, ranks_of, register


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
            ids[tuple(ranks)] = lib.add_group(ranks)
    for process_set in wanted:
        register(process_set, ids[tuple(ranks_of(process_set))])


def _groups_in_order(wanted: List[ProcessSet]) -> List[List[int]]:
    """The ranks of all groups that are to be, in the order in which all ranks of the world make them.

    A split communicator has other members on each rank. So the ranks gather their lists, and the sets at one place of
    all lists are made one after the other, in the order of their ranks.
    """
    of_communicators = [(process_set, process_set.mpi_comm) for process_set in wanted
                        if process_set.mpi_comm is not None and process_set is not global_process_set]
    if not of_communicators:
        return [ranks_of(process_set) for process_set in wanted]
    for process_set, communicator in of_communicators:
        process_set.ranks = sorted(communicator.allgather(lib.rank()))
    lists = allgather_object([process_set.ranks for process_set in wanted], "init.process_sets")
    if len({len(ranks) for ranks in lists}) > 1:
        raise ValueError("init(process_sets=...): the ranks of the job must give equally many process sets, but give "
                         f"{', '.join(str(len(ranks)) for ranks in lists)}.")
    return [list(ranks) for place in zip(*lists) for ranks in sorted(set(map(tuple, place)))]

"""The start and end of a job, its ranks and its timeline, for every framework. The state is in the core; an instance
holds none.
"""
import operator
import os
import sys
import threading
from typing import Any, Dict, List, Optional, Sequence, Union

from lightcc.core import (
    carried_sets,
    lib,
    meeting,
    metrics,
    metrics_page,
    request,
    util,  # noqa: F401  scripts look for it here too
)
from lightcc.core import elastic_worker as elastic
from lightcc.core import process_sets as sets
from lightcc.core.build_queries import BuildQueries
from lightcc.core.exiting import at_exit
from lightcc.core.process_set_matching import match
from lightcc.core.process_sets import ProcessSet, global_process_set  # noqa: F401


class MPI:
    """A stand-in for mpi4py.MPI in annotations."""

    class Comm:
        """A communicator of mpi4py."""


_REASON_CHARACTERS = 200  # of an exception, in what is sent to other ranks
_world: object = None  # what init() was given
_init_lock = threading.RLock()  # one init at a time


def _new_lock() -> None:
    """In the child of a fork: a thread that is not there may have held it."""
    global _init_lock
    _init_lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


class HorovodBasics(BuildQueries):
    """What is not a collective. The arguments are Horovod's; lightcc has one library and finds it itself.

    >>> basics = HorovodBasics(__file__); basics.init(); basics.size() >= 1
    True
    """

    Average, Sum, Adasum, Min, Max, Product = lib.OPS

    def __init__(self, pkg_path: Any, *args: Any) -> None:
        pass

    def init(self, comm: Optional[Union[Sequence[int], MPI.Comm]] = None,
             process_sets: Optional[Sequence[ProcessSet]] = None) -> None:
        """Meets the other ranks and registers process sets. A second call only matches process sets again; one from
        another thread waits for the first.

        comm: None or [] for all ranks of the job; a list of ranks, which become ranks 0, 1, ... of a world of their own
        (every one of them passes the same list); or a communicator of mpi4py, whose processes form the world, and which
        global_process_set.mpi_comm is then.
        mpirun on several hosts wants all ranks of the job to call init, each with a list that it is in, as often as
        the others: MPICH and Intel MPI hand addresses out to all at once, Open MPI takes a rank that never called for
        a crash. It does not matter where LIGHTCC_STORE_ADDR says where to meet, or the communicator is mpi4py's.
        process_sets: ProcessSets or lists of world ranks, the same in the same order on all ranks; or "dynamic",
        which changes nothing, since sets may always be added later.

        Errors: ValueError on a rank that is not in comm, for a world other than the one that exists, for arguments of
        another kind, or for a process set that is there twice or has unknown ranks (lightcc is initialised all the
        same); HorovodInternalError if the other ranks cannot be reached. Source: horovod.common.basics.

        >>> hvd.init(process_sets=[])  # or, with four ranks: [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
        """
        if not hasattr(comm, "Get_size"):
            comm = _ranks(comm)
        given = None if process_sets is None or process_sets == "dynamic" else _list_of_sets(process_sets)
        with _init_lock:
            try:
                self._init(comm, given)
            finally:  # an error of a process set leaves lightcc initialised
                if lib.initialized():
                    metrics.begin()
                    metrics_page.begin()

    def _init(self, comm: Any, process_sets: Optional[List[Union[ProcessSet, Sequence[int]]]]) -> None:
        global _world
        if not lib.initialized():
            request.release_all()
            sets.forget()
            if hasattr(comm, "Get_size"):
                _init_at(comm)
                _agree()
            elif meeting.is_placed():
                _init_placed(comm)
            elif elastic.available():
                _init_elastic(comm)
            else:
                lib.init(comm)
                _agree()
            _world = comm
        elif not _is_world(comm):
            raise ValueError(f"init(comm={comm!r}): lightcc is initialised already, with {lib.size()} ranks "
                             f"(comm={_world!r}). Call shutdown() first, or use process sets.")
        at_exit(_leave)
        ranks = list(range(lib.size()))
        sets.ranks_of(sets.global_process_set)[:] = ranks
        if hasattr(comm, "Get_size"):
            sets.global_process_set.mpi_comm = comm
        if process_sets is not None:
            if sets.to_take is None:
                match(process_sets)
            else:
                carried_sets.take(process_sets)
        carried_sets.entered()

    def shutdown(self) -> None:
        """Leaves the job: pending operations fail with HorovodInternalError. init() may follow.

        >>> hvd.init(); hvd.shutdown(); hvd.is_initialized()
        False
        """
        _leave("it shut down", "it shut down while handling ")

    def is_initialized(self) -> bool:
        """True between init and shutdown, also in a process that was forked there, as a worker of a DataLoader: it is
        told rank(), size() and the like, for its seed or its share of the data, and has no collectives.

        >>> hvd.init(); hvd.is_initialized()
        True
        """
        return lib.initialized() or lib.rank() >= 0

    def size(self) -> int:
        """Number of processes in the job. ValueError before init.

        >>> hvd.init(); hvd.size() > hvd.rank()
        True
        """
        return _initialized(lib.size())

    def rank(self) -> int:
        """Rank of this process in the job, 0 to size() - 1. ValueError before init.

        >>> hvd.init(); 0 <= hvd.rank() < hvd.size()
        True
        """
        return _initialized(lib.rank())

    def local_size(self) -> int:
        """Number of processes of the job on this host. ValueError before init.

        >>> hvd.init(); hvd.local_size() <= hvd.size()
        True
        """
        return _initialized(lib.local_size())

    def local_rank(self) -> int:
        """Rank of this process among those of its host; picks the GPU. ValueError before init.

        >>> hvd.init(); 0 <= hvd.local_rank() < hvd.local_size()
        True
        """
        return _initialized(lib.local_rank())

    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank. ValueError before init.

        >>> hvd.init(); hvd.cross_size() <= hvd.size()
        True
        """
        return _initialized(lib.cross_size())

    def cross_rank(self) -> int:
        """Rank of this host among the hosts that have a process with this local rank. ValueError before init.

        >>> hvd.init(); 0 <= hvd.cross_rank() < hvd.cross_size()
        True
        """
        return _initialized(lib.cross_rank())

    def is_homogeneous(self) -> bool:
        """True if every host runs equally many processes. ValueError before init.

        >>> hvd.init(); hvd.is_homogeneous()
        True
        """
        return bool(_initialized(lib.is_homogeneous()))

    def mpi_threads_supported(self) -> bool:
        """The same as mpi_enabled(), of a job that is running: any thread may use mpi4py beside lightcc, which never
        enters MPI. ValueError before init.

        >>> hvd.init(); hvd.mpi_threads_supported() == hvd.mpi_enabled()
        True
        """
        self.size()
        return self.mpi_enabled()

    def start_timeline(self, file_path: Union[str, bytes, "os.PathLike[str]"], mark_cycles: bool = False) -> None:
        """Begins to write a timeline for chrome://tracing (docs/timeline.md): rank 0 to that file, or, if there is
        "{rank}" in the path, every rank to its own. One that is being written is completed first.

        mark_cycles: also mark every batch that the ranks agreed to run.

        Errors: ValueError before init, in a job that was started without HOROVOD_TIMELINE (DYNAMIC means: none until
        this call), and if the file cannot be written. Source: horovod.common.basics.

        >>> hvd.start_timeline("timeline.json"); hvd.stop_timeline()  # HOROVOD_TIMELINE=DYNAMIC python ...
        """
        self.size()
        lib.start_timeline(os.fsencode(file_path), bool(mark_cycles))

    def stop_timeline(self) -> None:
        """Completes and closes the timeline; only logs a warning when none is being written. ValueError before init.

        >>> hvd.start_timeline("timeline.json"); hvd.stop_timeline()
        """
        self.size()
        lib.stop_timeline()

    def _get_process_set_ids_and_ranks(self) -> Dict[int, List[int]]:
        return sets.ids_and_ranks()


def _leave(reason: str = "its program has ended", with_error: str = "it ended with ") -> None:
    """Leaves the job. Tells the other ranks why, and what was raised here if that is known."""
    metrics_page.end()
    if lib.initialized():
        if elastic.is_elastic():
            carried_sets.remember()
        error = _uncaught()
        lib.shutdown(reason if error is None else with_error + _line_of(error))
    request.release_all()
    sets.forget()


def leave_after_error() -> None:
    """At the end of a program: leaves the job if an exception has ended it, so that no rank waits for this one."""
    if _uncaught() is not None:
        _leave()


def _uncaught() -> Optional[BaseException]:
    """The exception that is on its way, or that has ended this program; at a prompt the program goes on after one."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error


def _line_of(error: BaseException) -> str:
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # of its __str__
        text = type(error).__name__
    return text if len(text) <= _REASON_CHARACTERS else text[:_REASON_CHARACTERS] + "..."


def _initialized(value: int) -> int:
    if value < 0:
        raise lib.not_initialised()
    return value


def _ranks(comm: Any) -> List[int]:
    try:
        return [operator.index(rank) for rank in ([] if comm is None else comm)]
    except TypeError:
        raise ValueError(f"init(comm={comm!r}): give a list of ranks or a communicator of mpi4py.") from None


def _list_of_sets(process_sets: Any) -> List[Union[ProcessSet, Sequence[int]]]:
    if isinstance(process_sets, (str, ProcessSet)) or not util.is_iterable(process_sets):
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of ProcessSets or of lists of ranks, or '
                         '"dynamic".')
    return list(process_sets)


def _init_at(comm: Any) -> None:
    """Forms the world of a communicator of mpi4py, by which rank 0 tells the others where it is."""
    opened = comm.bcast(tuple(meeting.open_meeting()) if comm.Get_rank() == 0 else None, root=0)
    meeting.join(comm.Get_rank(), comm.Get_size(), meeting.Meeting(*opened))


def _init_placed(comm: Any) -> None:
    """A scheduler has said where the others are (lightcc/launch/placed.py)."""
    size = meeting.placed_size()
    if comm and comm != list(range(size)):
        raise ValueError(f"init(comm={comm!r}): a scheduler has placed the {size} ranks of this world; use process "
                         "sets for some of them.")
    meeting.join_as_placed()


def _init_elastic(comm: Any) -> None:
    """The driver of the job says who the others are."""
    if comm:
        raise ValueError(f"init(comm={comm!r}): the world of an elastic job is all its workers; use process sets.")
    elastic.connection().join_epoch(_agree)


def _agree() -> None:
    """What the members of a new world begin with; leaves it if that fails."""
    if not elastic.is_elastic():
        return
    try:
        carried_sets.carry_over()
    except BaseException:
        lib.shutdown("it lost another rank while it joined")
        raise


def _is_world(comm: Any) -> bool:
    """Whether it asks for the world that exists."""
    if hasattr(comm, "Get_size"):
        return comm.Get_size() == lib.size() and comm.Get_rank() == lib.rank()
    return not comm or comm == _world or list(comm) == list(range(lib.size()))

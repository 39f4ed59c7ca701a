"""Life, topology and build queries, for every framework. The state is the core's; an instance holds none."""
import atexit
import os
from typing import Dict, List, Optional, Sequence, Union

from lightcc import _core, request
from lightcc.common import process_sets as sets
from lightcc.common.process_sets import ProcessSet


class MPI:
    """A stand-in for mpi4py.MPI in annotations."""

    class Comm:
        """A communicator of mpi4py."""


def _launched_by_mpi() -> bool:
    if "HOROVOD_RANK" in os.environ:  # a launcher's word counts more than the mpirun that it may run under
        return False
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))


_shutdown_at_exit = False


class HorovodBasics:
    """What is not a collective. The arguments are Horovod's; lightcc has one library and finds it itself.

    >>> basics = HorovodBasics(__file__); basics.init(); basics.size() >= 1
    True
    """

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __init__(self, pkg_path, *args):
        pass

    def init(self, comm: Optional[Union[Sequence[int], MPI.Comm]] = None,
             process_sets: Optional[Sequence[ProcessSet]] = None) -> None:
        """Meets the other ranks and registers process sets. A second call only matches process sets again.

        comm: None, [] or all ranks; a part of the job cannot be a world of its own (use process sets).
        process_sets: ProcessSets or lists of world ranks, the same in the same order on all ranks; or "dynamic",
        which changes nothing, since sets may always be added later.

        Errors: ValueError for another comm, or for a duplicate process set (lightcc is initialised all the same);
        HorovodInternalError if the other ranks cannot be reached. Source: horovod.common.basics.

        >>> hvd.init(process_sets=[])  # or, with four ranks: [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
        """
        global _shutdown_at_exit
        was_initialized = _core.initialized()
        if not was_initialized:
            request.forget_handles()
            sets.forget()
        _core.init()
        if not _shutdown_at_exit:
            atexit.register(self.shutdown)
            _shutdown_at_exit = True
        ranks = list(range(_core.size()))
        if not _is_world(comm, ranks):
            if not was_initialized:
                self.shutdown()
            raise ValueError(f"init(comm={comm!r}): lightcc runs on all {len(ranks)} ranks of the job. Start the job "
                             "with fewer processes, or use init(process_sets=[...]) and pass process_set=.")
        sets.global_process_set.ranks[:] = ranks
        if process_sets is not None and process_sets != "dynamic":
            sets.match(process_sets)

    def shutdown(self) -> None:
        """Leaves the job: pending operations fail with HorovodInternalError. init() may follow.

        >>> hvd.init(); hvd.shutdown(); hvd.is_initialized()
        False
        """
        if _core.initialized():
            _core.shutdown()
        request.forget_handles()
        sets.forget()

    def is_initialized(self) -> bool:
        """True between init and shutdown.

        >>> hvd.init(); hvd.is_initialized()
        True
        """
        return _core.initialized()

    def size(self) -> int:
        """Number of processes in the job. ValueError before init.

        >>> hvd.init(); hvd.size() > hvd.rank()
        True
        """
        return _initialized(_core.size())

    def rank(self) -> int:
        """Rank of this process in the job, 0 to size() - 1. ValueError before init.

        >>> hvd.init(); 0 <= hvd.rank() < hvd.size()
        True
        """
        return _initialized(_core.rank())

    def local_size(self) -> int:
        """Number of processes of the job on this host. ValueError before init.

        >>> hvd.init(); hvd.local_size() <= hvd.size()
        True
        """
        return _initialized(_core.local_size())

    def local_rank(self) -> int:
        """Rank of this process among those of its host; picks the GPU. ValueError before init.

        >>> hvd.init(); 0 <= hvd.local_rank() < hvd.local_size()
        True
        """
        return _initialized(_core.local_rank())

    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank. ValueError before init.

        >>> hvd.init(); hvd.cross_size() <= hvd.size()
        True
        """
        return _initialized(_core.cross_size())

    def cross_rank(self) -> int:
        """Rank of this host among the hosts that have a process with this local rank. ValueError before init.

        >>> hvd.init(); 0 <= hvd.cross_rank() < hvd.cross_size()
        True
        """
        return _initialized(_core.cross_rank())

    def is_homogeneous(self) -> bool:
        """True if every host runs equally many processes. ValueError before init.

        >>> hvd.init(); hvd.is_homogeneous()
        True
        """
        return self.local_size() * self.cross_size() == self.size()

    def mpi_threads_supported(self) -> bool:
        """True: any thread may call lightcc, which never enters MPI. ValueError before init or unless mpi_enabled().

        >>> hvd.init(); hvd.mpi_threads_supported() if hvd.mpi_enabled() else True
        True
        """
        self.size()
        if not self.mpi_enabled():
            raise ValueError("mpi_threads_supported(): this process was not started by MPI.")
        return True

    def mpi_enabled(self) -> bool:
        """True if mpirun started this process and HOROVOD_RANK is not set. lightcc needs no MPI library for it.

        >>> hvd.mpi_enabled() != hvd.gloo_enabled()
        True
        """
        return _launched_by_mpi()

    def mpi_built(self) -> bool:
        """The same as mpi_enabled(), so that scripts choose the branch they would choose under Horovod.

        >>> hvd.mpi_built() == hvd.mpi_enabled()
        True
        """
        return _launched_by_mpi()

    def gloo_enabled(self) -> bool:
        """True unless mpi_enabled().

        >>> hvd.mpi_enabled() != hvd.gloo_enabled()
        True
        """
        return not _launched_by_mpi()

    def gloo_built(self) -> bool:
        """True: lightcc always runs without MPI.

        >>> hvd.gloo_built()
        True
        """
        return True

    def nccl_built(self) -> int:
        """NCCL's version code; 0, since this version of lightcc works on CPU tensors only.

        >>> hvd.nccl_built()
        0
        """
        return 0

    def ddl_built(self) -> bool:
        """False: IBM DDL is not used.

        >>> hvd.ddl_built()
        False
        """
        return False

    def ccl_built(self) -> bool:
        """False: oneCCL is not used.

        >>> hvd.ccl_built()
        False
        """
        return False

    def cuda_built(self) -> bool:
        """False: this version of lightcc works on CPU tensors only.

        >>> hvd.cuda_built()
        False
        """
        return False

    def rocm_built(self) -> bool:
        """False: this version of lightcc works on CPU tensors only.

        >>> hvd.rocm_built()
        False
        """
        return False

    def start_timeline(self, file_path: Union[str, bytes, "os.PathLike[str]"], mark_cycles: bool = False) -> None:
        """Begins to write a timeline for chrome://tracing (docs/timeline.md): rank 0 to that file, or, if there is
        "{rank}" in the path, every rank to its own. One that is being written is completed first.

        mark_cycles: also mark every batch that the ranks agreed to run.

        Errors: ValueError before init, in a job that was started without HOROVOD_TIMELINE (DYNAMIC means: none until
        this call), and if the file cannot be written. Source: horovod.common.basics.

        >>> hvd.start_timeline("/tmp/timeline.json"); hvd.stop_timeline()  # HOROVOD_TIMELINE=DYNAMIC python ...
        """
        self.size()
        _core.start_timeline(os.fsencode(file_path), bool(mark_cycles))

    def stop_timeline(self) -> None:
        """Completes and closes the timeline; only logs a warning when none is being written. ValueError before init.

        >>> hvd.start_timeline("/tmp/timeline.json"); hvd.stop_timeline()
        """
        self.size()
        _core.stop_timeline()

    def _get_process_set_ids_and_ranks(self) -> Dict[int, List[int]]:
        return sets.ids_and_ranks()


def _initialized(value: int) -> int:
    if value < 0:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return value


def _is_world(comm, ranks: List[int]) -> bool:
    if comm is None:
        return True
    if hasattr(comm, "Get_size"):  # a communicator of mpi4py
        return comm.Get_size() == len(ranks) and comm.Get_rank() == _core.rank()
    return list(comm) in ([], ranks)

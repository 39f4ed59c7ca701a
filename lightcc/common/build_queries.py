"""What this version of lightcc is built with, and which kind of launcher has started this process. Needs no library."""
import os


class BuildQueries:
    """The queries whose answers depend on neither a job nor the library; a base of HorovodBasics."""

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
        """NCCL's version code; 0, since lightcc does not use NCCL yet: tensors of GPUs travel through host memory.

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
        """False: collectives run in host memory, also those of CUDA tensors (docs/gpu.md).

        >>> hvd.cuda_built()
        False
        """
        return False

    def rocm_built(self) -> bool:
        """False: lightcc knows no tensors of ROCm.

        >>> hvd.rocm_built()
        False
        """
        return False


def _launched_by_mpi() -> bool:
    # A launcher that runs under mpirun takes precedence over mpirun.
    if "HOROVOD_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))

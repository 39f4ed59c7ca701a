"""What bench/allreduce.py needs to know of a library: where it is, how its ranks are started, what settings compete."""
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

VENVS = Path(__file__).resolve().parents[2] / "build" / "peers"  # one virtual environment for each peer
# Of the caller's environment only what a process needs: settings of another MPI must not leak in.
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "USER")


class Unavailable(Exception):
    """This peer cannot be measured here; the text says why and what would help."""


class Setting(NamedTuple):
    """One way to run a library that is measured against its other ways; the best at a size counts."""
    name: str
    environment: Dict[str, str] = {}
    arguments: Sequence[str] = ()  # of the launcher


class Start(NamedTuple):
    """A process to start; `keep` are descriptors that it inherits."""
    command: List[str]
    environment: Dict[str, str]
    keep: Tuple[int, ...] = ()


class Job(NamedTuple):
    """Ranks to be started: `driver` is the driver's command up to its KIND."""
    ranks: int
    one_core: bool      # all ranks are bound to one core
    shared_cores: bool  # there are fewer cores than ranks
    driver: List[str]
    folder: Path        # empty, for this job alone
    most_bytes: int     # the largest tensor


class Peer:
    """A library. `name` is what --peers takes."""
    name = ""
    packages: Sequence[str] = ()   # what pip installs
    transport = ""                 # how bytes travel between the ranks
    memories: Sequence[str] = ("private",)
    places: Sequence[str] = ("in", "out")  # where sums may go
    ways: Sequence[str] = ("each", "async", "fused")  # to send many tensors; see driver.c

    @property
    def venv(self) -> Path:
        """$BENCH_<NAME> names an environment (or any prefix with bin and lib) to use instead of build/peers/<name>."""
        return Path(os.environ.get(f"BENCH_{self.name.upper()}", VENVS / self.name))

    def install(self) -> None:
        if self.packages and not (VENVS / self.name / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(VENVS / self.name)], check=True)
        if self.packages:
            pip = [str(VENVS / self.name / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *self.packages], check=True)

    def find(self) -> None:
        """Raises Unavailable."""

    def settings(self, job: Job) -> List[Setting]:
        return [Setting("default")]

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        raise NotImplementedError

    def needs(self, *files: str) -> None:
        for file in files:
            if not (self.venv / file).exists():
                raise Unavailable(f"{self.venv / file} is not there: --install puts {' '.join(self.packages)} into "
                                  f"{VENVS / self.name}, or BENCH_{self.name.upper()}=PREFIX names another place")


def plain_environment(**more: str) -> Dict[str, str]:
    return {**{name: os.environ[name] for name in KEPT if name in os.environ}, **more}


def one_process_a_rank(job: Job, command: List[str], environment: Dict[str, str],
                       keep: Tuple[int, ...] = ()) -> List[Start]:
    """Starts for libraries that need no launcher: the rank is in HOROVOD_RANK, as lightcc reads it."""
    return [Start(command, {**environment, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(job.ranks),
                            "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": str(job.ranks)}, keep)
            for rank in range(job.ranks)]

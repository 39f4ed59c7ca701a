"""Launchers of other projects, as commands that start ranks on emulated hosts: equally many on each, in order.

    launcher = MPIRUN["Open MPI 5"]
    launcher.why_not()                                            # "" if it is installed; else what to do
    launcher.command(hosts, folder, ["PYTHONPATH"], 2, program)   # 2 ranks on each host; to be run on any host

None of them forwards the environment by itself, as over a real ssh; so each is told which variables to pass on.
"""
import functools
import os
import stat
import subprocess
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Sequence

import needs
from emulated import Hosts
from jobs import MARK

_BUILD = Path(__file__).parents[2] / "build"
# ssh's stand-in: agent [options] HOST COMMAND... A login brings little of the environment along, so this does not.
_AGENT = """#!/bin/sh
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
exec env -i PATH="$PATH" HOME="$HOME" {mark}="${mark}" ip netns exec {prefix}"$host" unshare --uts sh -c \\
  'hostname "$1" && exec sh -c "$2"' sh "$host" "$*"
"""


class Launcher(NamedTuple):
    program: str  # mpirun's path
    version: str  # a part of what it says when asked for its version
    libmpi: str   # of the same MPI, for mpi4py
    install: str  # what brings it
    # Of the list of hosts, ranks on each, ranks in all, the agent, and names of variables.
    arguments: Callable[[str, int, int, str, Sequence[str]], List[str]]
    patience: Sequence[str] = ()  # with these it does not kill all ranks at once when one dies

    def why_not(self) -> str:
        if not os.path.exists(self.program):
            return f"{needs.MISSING}{self.program}; {self.install}"
        return "" if self.version in _version(self.program) else f"{needs.MISSING}{self.version} at {self.program}"

    def command(self, hosts: Hosts, folder: Path, variables: Sequence[str], each: int,
                argv: Sequence[str], patient: bool = False) -> List[str]:
        agent = folder / "agent"
        prefix = hosts.namespace("{}").format("")
        agent.write_text(_AGENT.format(mark=MARK, prefix=prefix))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        listed = ",".join(f"{name}:{each}" for name in hosts.names)
        arguments = self.arguments(listed, each, each * len(hosts.names), str(agent), variables)
        return hosts.command(hosts.names[0], [
            self.program, *(self.patience if patient else ()), *arguments, *argv])


@functools.lru_cache(maxsize=None)
def _version(program: str) -> str:
    return subprocess.run([program, "--version"], timeout=120, text=True, stdout=subprocess.PIPE).stdout


def _pass(flag: str, variables: Sequence[str]) -> List[str]:
    return [word for name in variables for word in (flag, name)]


def _open_mpi_4(listed, each, total, agent, variables):
    return ["--allow-run-as-root", "--oversubscribe", "--host", listed, "--mca", "plm_rsh_agent", agent,
            *_pass("-x", variables), "-np", str(total)]


def _open_mpi_5(listed, each, total, agent, variables):
    return ["--allow-run-as-root", "--host", listed, "--map-by", f"ppr:{each}:node:oversubscribe",
            "--prtemca", "plm_ssh_agent", agent, *_pass("-x", variables), "-np", str(total)]


def _mpich(listed, each, total, agent, variables):
    return ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", listed, "-genvlist", ",".join(variables),
            "-n", str(total)]


def _folder(variable: str, name: str) -> str:
    """Where a wheel's virtual environment is: as `make build/mpi` makes it, or elsewhere."""
    return os.environ.get(variable, str(_BUILD / name))


_OPEN_MPI, _MPICH = _folder("LIGHTCC_TEST_OPENMPI", "openmpi"), _folder("LIGHTCC_TEST_MPICH", "mpich")
MPI4PY = _folder("LIGHTCC_TEST_MPI4PY", "mpi4py")
_MAKE = "`make build/mpi` installs it"

MPIRUN: Dict[str, Launcher] = {
    "Open MPI 4": Launcher("/usr/bin/mpirun.openmpi", "(OpenRTE) 4.", "libmpi.so.40", "apt-get install openmpi-bin",
                           _open_mpi_4),
    "Open MPI 5": Launcher(f"{_OPEN_MPI}/bin/mpirun", "(Open MPI) 5.", f"{_OPEN_MPI}/lib/libmpi.so.40", _MAKE,
                           _open_mpi_5, ["--runtime-options", "continuous"]),
    "MPICH": Launcher(f"{_MPICH}/bin/mpiexec", "HYDRA", f"{_MPICH}/lib/libmpi.so.12", _MAKE, _mpich,
                      ["-disable-auto-cleanup"]),
}

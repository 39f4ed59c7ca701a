"""Sides of bench/multihost.py that are called from C (driver/driver.c): Open MPI 5 over TCP, and lightcc beside it.

Open MPI polls, so it is measured only where every rank has a core of its own. Its daemons are started in the network
namespaces of the hosts by a stand-in for ssh. Of its algorithms the best at each size counts.
"""
import contextlib
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from cables import Network, environment_of
from contest import Point, Way
from group import Failed, Group, build_driver
from multihost_sides import Case, Sample
from peers.lightcc_c import Lightcc
from peers.openmpi import OpenMPI
from peers.peer import Job, Peer, Setting, Start, Unavailable, plain_environment
from where import RESULTS

OURS, OPEN_MPI = "lightcc in C", "Open MPI"
LIMIT_S = 60
TRIALS = 5
SEED = 1
# ssh's stand-in: agent [options] HOST COMMAND...
AGENT = """#!/bin/sh
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
exec ip netns exec {prefix}"$host" unshare --uts sh -c 'hostname "$1" && exec sh -c "$2"' sh "$host" "$*"
"""


class BetweenHosts(OpenMPI):
    """Open MPI with a daemon on each host and TCP between them."""
    transport = "pml/ob1, btl/tcp over eth0"

    def __init__(self, network: Network):
        self._network = network

    def settings(self, job: Job) -> List[Setting]:
        tcp = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "eth0")
        tuned = (*tcp, "--mca", "coll", "^han", "--mca", "coll_tuned_use_dynamic_rules", "1",
                 "--mca", "coll_tuned_allreduce_algorithm")
        return [Setting("default", arguments=tcp),
                *[Setting(f"coll/tuned {name}", arguments=(*tuned, number)) for name, number in
                  (("recursive doubling", "3"), ("ring", "4"), ("segmented ring", "5"), ("Rabenseifner", "6"))]]

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        hosts, ranks = self._network.emulated, self._network.ranks
        agent = job.folder / "agent"
        agent.write_text(AGENT.format(prefix=hosts.namespace("")))
        agent.chmod(0o755)
        listed = ",".join(f"{name}:{count}" for name, count in zip(hosts.names, ranks))
        mpirun = [str(self.venv / "bin" / "mpirun"), "-n", str(job.ranks), "--host", listed, "--bind-to", "none",
                  "--prtemca", "plm_ssh_agent", str(agent), *setting.arguments]
        environment = plain_environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        command = [*mpirun, *job.driver, "openmpi", str(self.venv / "lib" / "libmpi.so.40")]
        return [Start(hosts.command(hosts.names[0], command), environment)]


class OursBetweenHosts(Lightcc):
    def __init__(self, network: Network):
        self._network = network

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        hosts, secret, name = self._network.emulated, secrets.token_hex(16), secrets.token_hex(8)
        store, _, port = self._network.store.rpartition(":")
        found = []
        for rank, place in enumerate(self._network.places()):
            place = place._replace(store=f"{store}:{int(port) + 10}")  # the teams' own is taken
            numbers = {"RANK": rank, "SIZE": job.ranks, "LOCAL_RANK": place.local_rank, "LOCAL_SIZE": place.local_size}
            chosen = {key: value for key, value in os.environ.items() if key.startswith(("LIGHTCC_", "LIGHT_"))}
            environment = plain_environment(**{
                **chosen, "LIGHTCC_JOB_ID": name, **environment_of(place, secret),
                **{f"HOROVOD_{key}": str(value) for key, value in numbers.items()}})
            command = [*job.driver, "lightcc", str(self.core())]
            found.append(Start(hosts.command(hosts.names[place.host], command), environment))
        return found


class Driven:
    """A library's groups of ranks, one for each setting; check() finds the best."""

    def __init__(self, stack: contextlib.ExitStack, peer: Peer, network: Network):
        self._groups: List[Group] = []
        self.left_out: Dict[str, str] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = str(build_driver(RESULTS))
        job = Job(sum(network.ranks), False, False, [], folder, 0)
        for setting in peer.settings(job):
            home = Path(tempfile.mkdtemp(dir=folder))
            driver = [program, str(home / "socket"), str(home / "barrier"), "any"]
            group = Group(peer, setting, job._replace(driver=driver, folder=home))
            stack.callback(group.quit)
            try:
                self.version = group.meet().split(",")[0]
                self._groups.append(group)
            except Failed as failure:
                self.left_out[setting.name] = str(failure)
        if not self._groups:
            raise Unavailable(f"{peer.name}: {self.left_out}")
        self.best = self._groups[0]

    def check(self, case: Case) -> None:
        """Every setting adds up random numbers, and is tried; a wrong sum ends the benchmark."""
        took = {}
        for group in self._groups:
            self._prepare(group, case)
            group.ask(f"check each {SEED}")
            took[group] = statistics.median(_timed(group, case)[0] for _ in range(TRIALS))
            group.ask("release")
        self.best = min(took, key=took.__getitem__)
        self._prepare(self.best, case)

    def sample(self, case: Case, pause_s: float) -> Sample:
        time.sleep(pause_s)
        return Sample(*_timed(self.best, case))

    @staticmethod
    def _prepare(group: Group, case: Case) -> None:
        group.ask(f"prepare private in {' '.join(map(str, case.counts))}")


def _timed(group: Group, case: Case) -> Tuple[float, float]:
    """Seconds of a call, and CPU seconds; those hold the waiting for the other ranks to begin, too."""
    cpu = group.cpu_seconds()
    seconds = Point(Way(group, "in", "each"), 0, case.calls, 1, LIMIT_S).seconds(min)
    return seconds, (group.cpu_seconds() - cpu) / case.calls


def why_no_open_mpi(ranks: Sequence[int]) -> str:
    cores = len(os.sched_getaffinity(0))
    if sum(ranks) > cores:
        return f"Open MPI polls, and {sum(ranks)} ranks share {cores} cores"
    try:
        OpenMPI().find()
    except Unavailable as why:
        return str(why)
    return ""


def driven_sides(stack: contextlib.ExitStack, network: Network) -> Dict[str, Driven]:
    return {OURS: Driven(stack, OursBetweenHosts(network), network),
            OPEN_MPI: Driven(stack, BetweenHosts(network), network)}

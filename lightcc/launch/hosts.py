"""Where to run: parses -H and --hostfile and gives every rank its place."""

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from lightcc.launch import network

_NAME = r"\w[\w.-]*|\[[0-9A-Fa-f:.]+\]"  # an IPv6 address stands in brackets; no name looks like an option


class Host(NamedTuple):
    name: str
    slots: int


class Place(NamedTuple):
    """A rank's, in Horovod's words. The cross ranks are those with the same local rank, one a host; hosts with fewer
    ranks are not among them."""

    host: str  # as it was listed
    here: bool
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self, is_elastic: bool = False) -> dict[str, str]:
        """Horovod's variables and torchrun's. Of torchrun's an elastic job has LOCAL_RANK only: the others would be
        wrong from the first change of the world on, and whoever needs them says that they are missing."""
        torch = {"LOCAL_RANK": str(self.local_rank)}
        if not is_elastic:
            torch.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_WORLD_SIZE=str(self.local_size))
        return {
            "HOROVOD_RANK": str(self.rank), "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank), "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank), "HOROVOD_CROSS_SIZE": str(self.cross_size),
            "HOROVOD_HOSTNAME": self.host, **torch,
        }


def parse(text: str) -> list[Host]:
    """host1:slots,host2:slots; a host without a number has one slot, as with horovodrun."""
    hosts = []
    for item in text.split(","):
        match = re.fullmatch(rf"\s*({_NAME})(?::(\d+))?\s*", item)
        if not match:
            raise ValueError(f"-H {text}: cannot read '{item}'; expected host:slots,host:slots")
        hosts.append(Host(match[1].strip("[]"), int(match[2] or 1)))
    return hosts


def parse_file(path: str) -> list[Host]:
    """Lines of "host slots=n max_slots=m"; # starts a comment. max_slots, Open MPI's, says how many ranks a host may
    have beyond its slots, of which there are none here."""
    hosts = []
    try:
        with open(path) as lines:
            for number, line in enumerate(lines, 1):
                line = line.partition("#")[0].strip()
                match = re.fullmatch(rf"({_NAME}|[0-9A-Fa-f:.]+)((?:\s+(?:slots|max[_-]slots)\s*=\s*\d+)*)", line)
                if match:
                    said = dict(re.findall(r"(slots|max[_-]slots)\s*=\s*(\d+)", match[2]))
                    hosts.append(Host(match[1].strip("[]"), int(said.get("slots", 1))))
                elif line:
                    raise ValueError(f"{path}, line {number}: cannot read '{line}'; expected: host slots=n")
    except OSError as error:
        raise type(error)(f"--hostfile {path}: {error.strerror}") from None
    return hosts


def of_lsf(environment: Mapping[str, str]) -> list[Host]:
    """Those that LSF has allocated to this job, with their slots; none outside a job of LSF. LSB_MCPU_HOSTS is
    "h1 4 h2 4"."""
    words = environment.get("LSB_MCPU_HOSTS", "").split() if environment.get("LSB_JOBID") else []
    if len(words) % 2 or not all(re.fullmatch(_NAME, name) for name in words[::2]) or \
            not all(count.isdecimal() for count in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)}: expected host slots host slots ...")
    return [Host(name, int(count)) for name, count in zip(words[::2], words[1::2])]


def listed(hosts: Optional[str], hostfile: Optional[str]) -> list[Host]:
    """Those that the user names, if any. Raises ValueError if both are given; ValueError or OSError as parse and
    parse_file do."""
    if hosts and hostfile:
        raise ValueError("give either hosts or a hostfile, not both")
    return parse(hosts) if hosts else parse_file(hostfile) if hostfile else []


def places(num_proc: int, hosts: Optional[str] = None, hostfile: Optional[str] = None,
           is_here: Callable[[str], bool] = network.is_here) -> list[Place]:
    """Fills the hosts in the order listed. Raises ValueError if that cannot be, OSError if there is no such file."""
    if num_proc < 1:
        raise ValueError(f"the number of processes must be at least 1, not {num_proc}")
    found = listed(hosts, hostfile)
    if not (hosts or hostfile):
        return _filled(num_proc, [(Host(socket.gethostname(), num_proc), True)])
    slots = sum(host.slots for host in found)
    if slots < num_proc:
        source = f"-H {hosts}" if hosts else hostfile
        raise ValueError(f"{num_proc} processes do not fit: {source} has {slots} slot{'s' * (slots != 1)}")
    return _filled(num_proc, _distinct(found, is_here))


class Machine(NamedTuple):
    """Where a rank is."""

    key: str   # equal for the ranks of a host
    name: str
    here: bool


def of_ranks(machines: Sequence[Machine]) -> list[Place]:
    """machines: of each rank, by rank. The ranks of a host need not be neighbours; hosts count by their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine.key, []).append(rank)
    order = list(ranks)
    found = []
    for rank, machine in enumerate(machines):
        local_rank = ranks[machine.key].index(rank)
        cross = [key for key in order if len(ranks[key]) > local_rank]
        found.append(Place(machine.name, machine.here, rank, len(machines), local_rank, len(ranks[machine.key]),
                           cross.index(machine.key), len(cross)))
    return found


def meeting_settings(places: Sequence[Place], names: str, ports: str) -> dict[str, str]:
    """Where rank 0 is: LIGHTCC_STORE_ADDR for the ranks of lightcc, if there are several hosts, and MASTER_ADDR for
    what else wants to meet there; supervise() finds its port. names: LIGHTCC_IFACE; ports: LIGHTCC_PORT_RANGE. Raises
    ValueError if one of these is none, or this host has no address."""
    network.port_range(ports)
    if all(place.here for place in places):
        return {"MASTER_ADDR": "127.0.0.1"}
    store = network.store_address(places[0].host, places[0].here, names, ports)
    return {"LIGHTCC_STORE_ADDR": store, "MASTER_ADDR": store.partition(",")[0].rpartition(":")[0].strip("[]")}


def _distinct(listed: Sequence[Host], is_here: Callable[[str], bool]) -> list[tuple[Host, bool]]:
    """Each host once, with all its slots, and whether it is this one, which may be listed under several names."""
    here = {name: is_here(name) for name in {host.name for host in listed}}
    slots: dict[str, Host] = {}
    for host in listed:
        key = "" if here[host.name] else host.name
        known = slots.get(key, Host(host.name, 0))
        slots[key] = known._replace(slots=known.slots + host.slots)
    return [(host, here[host.name]) for host in slots.values()]


def _filled(num_proc: int, hosts: Sequence[tuple[Host, bool]]) -> list[Place]:
    machines = [Machine(host.name, host.name, here) for host, here in hosts for _ in range(min(host.slots, num_proc))]
    return of_ranks(machines[:num_proc])

"""This host in the network: which names mean it, and under which addresses other hosts reach it."""

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

FIRST_PORT, LAST_PORT = 20000, 60000
PORTS_TRIED = 16  # by rank 0, from the one that was chosen on
# Interfaces that lead to containers and virtual machines of this host only.
_INNER = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


class Interface(NamedTuple):
    name: str
    address: str


def is_here(name: str, resolve: bool = True) -> bool:
    """Whether a name or an address means this host. resolve: also ask the system what a name stands for."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    found = {name}
    if resolve:
        with contextlib.suppress(OSError, UnicodeError):  # unknown; ssh may know it
            found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return any(_is_own(text) for text in found)


def _is_own(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or str(address) in {interface.address for interface in interfaces()}


def interfaces() -> list[Interface]:
    """Those that are up, with the addresses that other hosts may reach; last those that lead to containers only."""
    import psutil  # here, so that a job on this host does not pay for it

    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    found.append(Interface(name, str(address)))
    return sorted(found, key=lambda interface: interface.name.startswith(_INNER))


def chosen(among: Sequence[Interface], names: str) -> list[Interface]:
    """As LIGHTCC_IFACE has it: "eth0,eth1" names that begin so, "=eth0" exactly, "^docker0,lo" all but; "" all."""
    if not names:
        return list(among)
    wanted = names.lstrip("=^").split(",")
    left = []
    for interface in among:
        fits = interface.name in wanted if names[0] == "=" else interface.name.startswith(tuple(wanted))
        if fits != (names[0] == "^"):
            left.append(interface)
    if not left:
        have = ", ".join(f"{name} ({address})" for name, address in among) or "none"
        raise ValueError(f"no network interface of this host is '{names}'; it has: {have}")
    return left


def store_address(host: str, here: bool, names: str, ports: str) -> str:
    """Where the ranks meet rank 0, "address:port[,address:port]": its host's name, which each rank resolves itself, or
    this host's addresses. Raises ValueError if there are none."""
    addresses = [host] if not here else [interface.address for interface in chosen(interfaces(), names)]
    if not addresses:
        raise ValueError("other hosts cannot reach this one: it has no network interface that is up but loopback")
    port = _port(ports)
    return ",".join(f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in addresses)


def _port(ports: str) -> int:
    first, _, last = (ports or "0").partition("-")
    try:
        begin, end = int(first) or FIRST_PORT, int(last or first) or LAST_PORT
    except ValueError:
        begin = end = -1
    if not 0 < begin <= end < 1 << 16:
        raise ValueError(f"LIGHTCC_PORT_RANGE={ports}: expected a port or a range like {FIRST_PORT}-{LAST_PORT}")
    return begin + secrets.randbelow(max(1, end - begin + 2 - PORTS_TRIED))

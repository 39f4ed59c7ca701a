"""This host in the network: which names mean it, and under which addresses other hosts reach it."""

import contextlib
import errno
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple, Optional

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
    begin, end = port_range(ports)
    port = begin + secrets.randbelow(max(1, end - begin + 2 - PORTS_TRIED))
    return ",".join(f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in addresses)


def hold_port(ports: str) -> Optional[socket.socket]:
    """A port of LIGHTCC_PORT_RANGE, or any, that is free here, bound by a socket that does not listen: for as long as
    it is open, nobody gets that port but who asks for this one with SO_REUSEADDR, as every server does. None: no port
    of the range is free. Of a range the last comes first, since ranks take the first."""
    begin, end = port_range(ports)
    for port in range(end, begin - 1, -1) if ports.strip("0") else [0]:
        for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
            try:
                holder = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # this host has no IPv6
                continue
            try:
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                holder.bind((address, port))
            except OSError as error:
                holder.close()
                if error.errno == errno.EADDRINUSE:
                    break  # the next port
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: who else holds it has it too
            return holder
    return None


def port_range(ports: str) -> tuple[int, int]:
    """LIGHTCC_PORT_RANGE. Raises ValueError if it is none."""
    first, _, last = (ports or "0").partition("-")
    try:
        begin, end = int(first) or FIRST_PORT, int(last or first) or LAST_PORT
    except ValueError:
        begin = end = -1
    if not 0 < begin <= end < 1 << 16:
        raise ValueError(f"LIGHTCC_PORT_RANGE={ports}: expected a port or a range like {FIRST_PORT}-{LAST_PORT}")
    return begin, end

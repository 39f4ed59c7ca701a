"""Where to run: parses -H and --hostfile, and checks the answer against the number of processes.

This version starts processes on this host only.
"""

import re
import socket
from collections.abc import Sequence
from typing import NamedTuple, Optional


class Host(NamedTuple):
    name: str
    slots: int


def parse(text: str) -> list[Host]:
    """host1:slots,host2:slots; a host without a number has one slot, as with horovodrun."""
    hosts = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([\w.-]+)(?::(\d+))?\s*", item)
        if not match:
            raise ValueError(f"-H {text}: cannot read '{item}'; expected host:slots,host:slots")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return hosts


def parse_file(path: str) -> list[Host]:
    """Lines of "host slots=n"; # starts a comment."""
    hosts = []
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            line = line.partition("#")[0].strip()
            match = re.fullmatch(r"([\w.-]+)(?:\s+slots\s*=\s*(\d+))?", line)
            if match:
                hosts.append(Host(match[1], int(match[2] or 1)))
            elif line:
                raise ValueError(f"{path}, line {number}: cannot read '{line}'; expected: host slots=n")
    return hosts


def check(num_proc: int, hosts: Optional[str] = None, hostfile: Optional[str] = None) -> None:
    """Raises ValueError unless this host alone can start num_proc processes."""
    if num_proc < 1:
        raise ValueError(f"the number of processes must be at least 1, not {num_proc}")
    if hosts and hostfile:
        raise ValueError("give either hosts or a hostfile, not both")
    if not (hosts or hostfile):
        return
    listed = parse(hosts) if hosts else parse_file(hostfile)
    _check_local(listed)
    slots = sum(host.slots for host in listed)
    if slots < num_proc:
        source = f"-H {hosts}" if hosts else hostfile
        raise ValueError(f"{num_proc} processes do not fit: {source} has {slots} slot{'s' * (slots != 1)}")


def _check_local(hosts: Sequence[Host]) -> None:
    name = socket.gethostname()
    local = {"localhost", "127.0.0.1", name, name.partition(".")[0]}
    for host in hosts:
        if host.name not in local:
            raise ValueError(f"host '{host.name}': lightccrun starts processes on this host only in this version")

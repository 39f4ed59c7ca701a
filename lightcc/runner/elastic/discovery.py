"""Which hosts an elastic job may use now: those of a list, or those that a script prints."""

import re
import subprocess
from collections.abc import Mapping
from typing import Optional

_LINE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|\w[\w.-]*)(?::(\d+))?")
_SCRIPT_TIMEOUT_S = 60.0


class DiscoveryError(RuntimeError):
    """Hosts could not be found."""


class HostDiscovery:
    """Finds hosts; to be derived from. Source: horovod.runner.elastic.discovery."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The names of the hosts and how many workers each may run, the oldest hosts first."""
        raise NotImplementedError


class FixedHosts(HostDiscovery):
    """Hosts that are known. Source: horovod.runner.elastic.discovery.

    >>> FixedHosts({"node1": 4, "node2": 4}).find_available_hosts_and_slots()
    {'node1': 4, 'node2': 4}
    """

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self.set(hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, hosts: Mapping[str, int]) -> None:
        """Replaces them."""
        self._hosts = dict(hosts)


class HostDiscoveryScript(HostDiscovery):
    """Hosts that a script prints, a line "host" or "host:slots" each. Source: horovod.runner.elastic.discovery.

    script: a command line for a shell. slots: of a host that is printed without; None: then they must be printed.

    Raises DiscoveryError if the script fails, prints something else or takes more than a minute: it names the script
    and what it printed.

    >>> HostDiscoveryScript("echo node1:4; echo node2", slots=2).find_available_hosts_and_slots()
    {'node1': 4, 'node2': 2}
    """

    def __init__(self, script: str, slots: Optional[int] = None) -> None:
        self._script, self._slots = script, slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        hosts: dict[str, int] = {}
        for line in filter(None, map(str.strip, self._output().splitlines())):
            match = _LINE.fullmatch(line)
            if not match:
                raise DiscoveryError(f"host discovery: {self._script} printed '{line}'; expected host or host:slots")
            if match[2] is None and self._slots is None:
                raise DiscoveryError(f"host discovery: {self._script} printed '{line}' without slots; print "
                                     "host:slots, or say --slots-per-host")
            name = match[1].strip("[]")
            hosts[name] = hosts.get(name, 0) + int(self._slots if match[2] is None else match[2])
        return hosts

    def _output(self) -> str:
        try:
            done = subprocess.run(self._script, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  errors="replace", timeout=_SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DiscoveryError(f"host discovery: {self._script} took more than {_SCRIPT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise DiscoveryError(f"host discovery: cannot run {self._script}: {error.strerror}") from error
        if done.returncode:
            last = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise DiscoveryError(f"host discovery: {self._script} exited with code {done.returncode}"
                               + (f": {last}" if last else ""))
        return done.stdout

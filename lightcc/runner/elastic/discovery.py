"""Which hosts an elastic job may use now: those of a list, or those that a script prints."""

import contextlib
import os
import re
import signal
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

    def stop(self) -> None:
        """The job is over: another thread may still be looking for hosts, and need not go on."""


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
        self._process: Optional["subprocess.Popen[str]"] = None  # that ran last
        self._stopped = False

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

    def stop(self) -> None:
        """Ends the script if it runs, or if another thread is about to start it."""
        self._stopped = True
        if self._process is not None:
            _kill(self._process)

    def _output(self) -> str:
        try:
            self._process = subprocess.Popen(self._script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, text=True, errors="replace",
                                             start_new_session=True)
        except OSError as error:
            raise DiscoveryError(f"host discovery: cannot run {self._script}: {error.strerror}") from error
        with self._process as process:
            if self._stopped:  # just now
                _kill(process)
            try:
                out, err = process.communicate(timeout=_SCRIPT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise DiscoveryError(f"host discovery: {self._script} took more than {_SCRIPT_TIMEOUT_S:g} s") from None
        if process.returncode:
            last = " | ".join(err.strip().splitlines()[-3:])
            raise DiscoveryError(f"host discovery: {self._script} exited with code {process.returncode}"
                                 + (f": {last}" if last else ""))
        return out


def _kill(process: "subprocess.Popen[str]") -> None:
    """And what it has started. Not once it was waited for: its number may be another's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

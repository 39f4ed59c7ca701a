"""Which hosts an elastic job may use now: those of a list, or those that a script prints."""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Optional

from lightcc.launch.output import printable
from lightcc.launch.pipes import piped
from lightcc.launch.watcher import Watcher

_LINE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|\w[\w.-]*)(?::(\d{1,18}))?")
_SCRIPT_TIMEOUT_S = 60.0
_MAX_PRINTED_BYTES = 1 << 20  # of hosts: more is a script that prints without end
_ERROR_BYTES = 4096           # of what it says last on its standard error
_QUOTED = 100                 # characters of a line
_READ_BYTES = 1 << 16
# Begins once the watcher knows of it, and not at all if we are killed before.
_ON_COMMAND = 'read -r line && exec /bin/sh -c "$1" < /dev/null'


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

    discovery_script: a command line for a shell. slots: of a host that is printed without; None: then they must be
    printed. A program may override _execute_discovery_script(), which returns what is printed.

    Raises DiscoveryError if the script fails, prints something else or without end, or takes more than a minute: it
    names the script and what it printed.

    >>> HostDiscoveryScript("echo node1:4; echo node2", slots=2).find_available_hosts_and_slots()
    {'node1': 4, 'node2': 2}
    """

    def __init__(self, discovery_script: str, slots: Optional[int] = None) -> None:
        self._discovery_script, self._default_slots = discovery_script, slots
        self._lock = threading.Lock()  # guards what follows
        self._process: Optional["subprocess.Popen[bytes]"] = None  # that runs
        self._watcher: Optional[Watcher] = None                    # ends it if we are killed
        self._stopped = False

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        hosts: dict[str, int] = {}
        for line in filter(None, map(str.strip, self._execute_discovery_script().splitlines())):
            match = _LINE.fullmatch(line)
            if not match:
                raise self._error(f"printed '{_quoted(line)}'; expected host or host:slots")
            slots = self._default_slots if match[2] is None else match[2]
            if slots is None:
                raise self._error(f"printed '{_quoted(line)}' without slots; print host:slots, or say --slots-per-host")
            name = match[1].strip("[]")
            hosts[name] = hosts.get(name, 0) + int(slots)
        return hosts

    def stop(self) -> None:
        """Ends the script if it runs, and keeps another thread from starting it."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                _kill(self._process)
            if self._watcher is not None:
                self._watcher.close()

    def _execute_discovery_script(self) -> str:
        with self._start() as process:
            try:
                printed, errors = self._read(process)
            except BaseException:
                _kill(process)
                raise
            finally:
                self._reap(process)
        if process.returncode:
            last = " | ".join(map(_quoted, errors.strip().splitlines()[-3:]))
            raise self._error(f"exited with code {process.returncode}" + (f": {last}" if last else ""))
        return printed

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._stopped:
                raise self._error("is not run any more, since stop() was called")
            if self._watcher is None:
                self._watcher = Watcher()
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _ON_COMMAND, "sh", self._discovery_script], bufsize=0, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                raise DiscoveryError(
                    f"host discovery: cannot run {self._discovery_script}: {error.strerror}") from error
            self._process = process
            self._watcher.add(process.pid)
            with contextlib.suppress(BrokenPipeError), piped(process.stdin) as stdin:
                stdin.write(b"\n")
            return process

    def _read(self, process: "subprocess.Popen[bytes]") -> tuple[str, str]:
        """What it prints until it ends, and the last of its errors. A process that holds its pipes longer is not waited
        for."""
        deadline = time.monotonic() + _SCRIPT_TIMEOUT_S
        printed, errors = b"", b""
        stdout, stderr = piped(process.stdout).fileno(), piped(process.stderr).fileno()
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            end = os.pidfd_open(process.pid)
            stack.callback(os.close, end)
            for fd in (stdout, stderr, end):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                runs = end in selector.get_map()
                ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()) if runs else 0)]
                if not (runs or ready):
                    return printed.decode(errors="replace"), errors.decode(errors="replace")
                if time.monotonic() >= deadline:
                    raise self._error(f"took more than {_SCRIPT_TIMEOUT_S:g} s")
                for fd in ready:
                    chunk = b"" if fd == end else os.read(fd, _READ_BYTES)
                    if not chunk:
                        selector.unregister(fd)
                    elif fd == stdout:
                        printed += chunk
                    else:
                        errors = (errors + chunk)[-_ERROR_BYTES:]
                if len(printed) > _MAX_PRINTED_BYTES:
                    raise self._error(f"printed more than {_MAX_PRINTED_BYTES} bytes; expected a line host:slots for "
                                      "each host")

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # from here on its number may be another's
            assert self._watcher is not None  # since _start()
            self._watcher.forget(process.pid)
            self._process = None
            process.wait()

    def _error(self, what: str) -> DiscoveryError:
        return DiscoveryError(f"host discovery: {self._discovery_script} {what}")


def _quoted(text: str) -> str:
    return printable(text if len(text) <= _QUOTED else f"{text[:_QUOTED]}...")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """And what it has started. Not once it was reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

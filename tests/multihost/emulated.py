"""Hosts that are emulated on this one: each a network namespace with a hostname of its own, all on one bridge.

    with Hosts(2, rate="1gbit") as hosts:            # h0, h1
        hosts.run("h0", ["hostname"])                # "h0\n"
        ["lightccrun", "-np", "4", "-H", "h0:2,h1:2", "--launch-command", hosts.launch_command, "python", "train.py"]
        hosts.cut("h1")                              # its cable is pulled, until restore("h1")

Names resolve in every host. Files, processes and users are this machine's. Namespaces are named after the process
that made them, so that runs do not meet, and what a run that crashed left behind is removed by the next one.
Needs root and iproute2: see why_not().
"""
import contextlib
import functools
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from typing import Dict, List, Optional, Sequence

import needs

_PREFIX = "lightcc"
_RUN_S = 60
_END_S = 60
_BURST, _LATENCY = "256kb", "50ms"  # of tbf: a few of the kernel's largest segments, and a queue
_numbers = itertools.count()


class Hosts:
    def __init__(self, count: int, rate: str = "", families: Sequence[int] = (4,), docker0: bool = False,
                 burst: str = _BURST, gso_bytes: int = 0, rails: bool = False, queues: int = 1) -> None:
        """rate: of each host's cable, each way, as tc has it ("1gbit"); "" is what the machine can do. burst: what may
        pass at once after a pause, more than the largest segment. gso_bytes: the largest segment that a host hands to
        its cable; 0: the kernel's. families: 4, 6 or both. docker0: every host also has an interface of this name that
        leads nowhere, all with one address. rails: every host also has eth1, on a switch and a network of its own.
        queues: of eth0, each way."""
        self.names = [f"h{i}" for i in range(count)]
        self._prefix = f"{_PREFIX}{os.getpid()}n{next(_numbers)}"
        self._rate, self._burst, self._gso_bytes = rate, burst, gso_bytes
        self._families, self._docker0, self._rails = families, docker0, rails
        self._queues = ["numtxqueues", str(queues), "numrxqueues", str(queues)]

    def __enter__(self) -> "Hosts":
        _remove_stale()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove([name for name in _namespaces() if name.startswith(f"{self._prefix}-")])

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def addresses(self, host: str) -> List[str]:
        number = self.names.index(host) + 1
        return [{4: f"10.77.0.{number}", 6: f"fd77::{number}"}[family] for family in self._families]

    def carried(self, host: str, interface: str) -> int:
        """Bytes that it has sent and received."""
        files = [f"/sys/class/net/{interface}/statistics/{way}_bytes" for way in ("rx", "tx")]
        return sum(map(int, self.run(host, ["cat", *files]).split()))

    def command(self, host: str, argv: Sequence[str]) -> List[str]:
        """Runs argv in the host. Each command execs the next, so that the process started is argv's."""
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c",
                f'hostname {host} && exec "$@"', "sh", *argv]

    @property
    def launch_command(self) -> str:
        """For lightccrun --launch-command."""
        words = ["ip", "netns", "exec", self.namespace("{host}"), "unshare", "--uts", "sh", "-c",
                 'hostname {host} && exec sh -c "$1"', "sh", "{command}"]
        return shlex.join(words)

    def run(self, host: str, argv: Sequence[str], **options: object) -> str:
        """What it prints; CalledProcessError if it fails, TimeoutExpired after a minute."""
        return subprocess.run(self.command(host, argv), **{
            "check": True, "timeout": _RUN_S, "text": True, "stdout": subprocess.PIPE, **options}).stdout

    def popen(self, host: str, argv: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(self.command(host, argv), **{"text": True, **options})

    def cut(self, host: str) -> None:
        """Silently, as a cable that is pulled behind the next switch: the host's own interface stays up, so that the
        host forgets no neighbour, whom to find again can take the kernel another second."""
        self._set_port(host, "0")  # disabled

    def restore(self, host: str) -> None:
        self._set_port(host, "3")  # forwarding

    def pids(self, host: Optional[str] = None) -> List[int]:
        """The processes in this host, or in all."""
        return [pid for name in ([host] if host else self.names) for pid in _pids(self.namespace(name))]

    def _set_port(self, host: str, state: str) -> None:
        _call("bridge", "-n", self.namespace("switch"), "link", "set", "dev", f"to-{host}", "state", state)

    def _make(self) -> None:
        switch = self.namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        table = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{address} {name}\n" for name in self.names for address in self.addresses(name))
        for name in self.names:
            host, port = self.namespace(name), f"to-{name}"
            os.makedirs(f"/etc/netns/{host}")
            for file, text in (("hosts", table), ("resolv.conf", "# no name server\n")):
                with open(f"/etc/netns/{host}/{file}", "w") as out:
                    out.write(text)
            _ip("netns", "add", host)
            _ip("-n", switch, "link", "add", port, *self._queues, "type", "veth", "peer", "name", "eth0", *self._queues,
                "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            if self._gso_bytes:
                _ip("-n", host, "link", "set", "eth0", "gso_max_size", str(self._gso_bytes))
            for interface in ("lo", "eth0"):
                _ip("-n", host, "link", "set", interface, "up")
            for address in self.addresses(name):
                wide = "/64" if ":" in address else "/24"
                _ip("-n", host, "addr", "add", address + wide, "dev", "eth0", *(["nodad"] if ":" in address else []))
            if self._rails:
                self._add_rail(switch, name)
            if self._docker0:
                _ip("-n", host, "link", "add", "docker0", "type", "bridge")
                _ip("-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
                _ip("-n", host, "link", "set", "docker0", "up")
            if self._rate:
                for namespace, interface in ((host, "eth0"), (switch, port)):
                    _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate", self._rate,
                          "burst", self._burst, "latency", _LATENCY)


    def _add_rail(self, switch: str, name: str) -> None:
        host, port = self.namespace(name), f"rail-to-{name}"
        if name == self.names[0]:
            _ip("-n", switch, "link", "add", "rail", "type", "bridge")
            _ip("-n", switch, "link", "set", "rail", "up")
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", host)
        _ip("-n", switch, "link", "set", port, "master", "rail", "up")
        _ip("-n", host, "addr", "add", f"10.78.0.{self.names.index(name) + 1}/24", "dev", "eth1")
        _ip("-n", host, "link", "set", "eth1", "up")


@functools.lru_cache(maxsize=None)
def why_not() -> str:
    """Why there can be no emulated hosts here; "" if there can."""
    if os.geteuid() != 0:
        return f"{needs.MISSING}root, for emulated hosts"
    if missing := needs.why_not("ip", "bridge", "tc", "unshare", "hostname"):
        return missing
    try:
        with Hosts(1) as hosts:
            hosts.run("h0", ["true"])
    except subprocess.CalledProcessError as error:
        return f"{needs.MISSING}the right to make emulated hosts: {(error.stderr or str(error)).strip()}"
    return ""


def spread(slots: Sequence[int], num_proc: int) -> Dict[str, int]:
    """How many of num_proc ranks each host takes: the largest gives up ranks first, so that few ranks are still on
    several hosts. Empty if there is no room, or if one host were left."""
    counts = list(slots)
    while sum(counts) > num_proc:
        counts[max(range(len(counts)), key=lambda i: (counts[i], i))] -= 1
    hosts = {f"h{i}": count for i, count in enumerate(counts) if count}
    return hosts if len(hosts) > 1 and sum(counts) == num_proc else {}


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, timeout=_RUN_S, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE).stdout


def _namespaces() -> List[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir("/run/netns") if name.startswith(_PREFIX))
    return []


def _pids(namespace: str) -> List[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _pids_if_there(namespace: str) -> List[int]:
    """None in one that somebody else has just removed."""
    try:
        return _pids(namespace)
    except subprocess.CalledProcessError:
        if os.path.exists(f"/run/netns/{namespace}"):
            raise
        return []


def _remove_stale() -> None:
    found = {name: re.match(rf"{_PREFIX}(\d+)n\d+-", name) for name in _namespaces()}
    _remove([name for name, match in found.items() if match and not os.path.exists(f"/proc/{match[1]}")])


def _remove(namespaces: Sequence[str]) -> None:
    deadline = time.monotonic() + _END_S
    while pids := [pid for name in namespaces for pid in _pids_if_there(name)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"still in {', '.join(namespaces)} after SIGKILL: pid {', '.join(map(str, pids))}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in namespaces:
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):  # somebody else was faster with a stale one
            _ip("netns", "del", name)

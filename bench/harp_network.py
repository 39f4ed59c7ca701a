"""Two hosts on one cable: network namespaces that a veth pair joins, with the cable's MTU, its offloads, its rate and
its loss as asked for.

    with Cable(mtu=9000, offloads=False) as cable:
        cable.popen(0, ["harp-bench", "--listen", "4720"])
        cable.run(1, ["harp-bench", "--connect", f"{cable.address(0)}:4720"])

Offloads are those that join packets: with them off every packet of the MTU's size passes the cable on its own, both
ways. Checksums are left to the "card" as everywhere. Needs root, ip and tc of iproute2, and nft for loss. Namespaces
are named after the process that made them, and what a run that crashed left behind is removed by the next one.
"""
import array
import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import socket
import struct
import subprocess
from typing import Dict, List, Sequence

_PREFIX = "harpbench"
_RUN_S = 120
_numbers = itertools.count()

# linux/ethtool.h and linux/sockios.h
_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSSET_INFO, _GFEATURES, _SFEATURES = 0x1B, 0x37, 0x3A, 0x3B
_FEATURES_SET, _NAME_BYTES = 4, 32
_JOINING = re.compile(r"tx-(tcp|tcp6|tcp-ecn|tcp-mangleid|tcp-accecn|udp|sctp|generic)-segmentation|tx-gso-.*|"
                      r"rx-gro|rx-gro-list|rx-udp-gro-forwarding|rx-lro")
_CLONE_NEWNET = 0x40000000


class Cable:
    def __init__(self, mtu: int = 1500, offloads: bool = True, rate: str = "", queue: str = "50ms") -> None:
        """rate: each way, as tc has it ("1gbit"); "" is what the machine can do. queue: how long a packet waits at most
        where there is a rate."""
        self._mtu, self._offloads, self._rate, self._queue = mtu, offloads, rate, queue
        self._names = [f"{_PREFIX}{os.getpid()}n{next(_numbers)}-{end}" for end in "ab"]

    def __enter__(self) -> "Cable":
        _remove_stale()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self._names)

    def address(self, end: int) -> str:
        return f"10.79.0.{end + 1}"

    @property
    def names(self) -> List[str]:
        """Of the namespaces, as `ip netns` has them."""
        return list(self._names)

    def command(self, end: int, argv: Sequence[str]) -> List[str]:
        return ["ip", "netns", "exec", self._names[end], *argv]

    def run(self, end: int, argv: Sequence[str], **options: object) -> str:
        return subprocess.run(self.command(end, argv), **{"check": True, "timeout": _RUN_S, "text": True,
                                                          "stdout": subprocess.PIPE, **options}).stdout

    def popen(self, end: int, argv: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(self.command(end, argv), **{"text": True, **options})

    def lose(self, share: float, protocol: str = "udp", but_port: int = 0) -> None:
        """Drops this share of the packets of a protocol that come to either end, at random. 0: none any more."""
        for end in (0, 1):
            subprocess.run(self.command(end, ["nft", "delete", "table", "ip", "loss"]), stderr=subprocess.DEVNULL,
                           check=False)
            if share:
                rules = f"meta l4proto {protocol} numgen random mod 100000 < {round(share * 100000)} drop"
                spared = f"tcp dport {but_port} accept\ntcp sport {but_port} accept\n" if but_port else ""
                self.run(end, ["nft", "-f", "-"], input="table ip loss {\nchain in {\n"
                         f"type filter hook input priority 0\n{spared}{rules}\n}}\n}}\n")

    def features(self, end: int) -> Dict[str, bool]:
        """Of the interface, by the names that `ethtool -k` has."""
        with _inside(self._names[end]) as control:
            return _features(control, "eth0")

    def _make(self) -> None:
        for name in self._names:
            _call("ip", "netns", "add", name)
        _call("ip", "-n", self._names[0], "link", "add", "eth0", "mtu", str(self._mtu), "type", "veth",
              "peer", "name", "eth0", "mtu", str(self._mtu), "netns", self._names[1])
        for end, name in enumerate(self._names):
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "addr", "add", f"{self.address(end)}/24", "dev", "eth0")
            if not self._offloads:
                switch_off_offloads(name, "eth0")
            _call("ip", "-n", name, "link", "set", "eth0", "up")
            if self._rate:
                _call("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self._rate,
                      "burst", "128kb", "latency", self._queue)


def switch_off_offloads(namespace: str, interface: str) -> None:
    """Those that join packets."""
    with _inside(namespace) as control:
        _switch_off(control, interface)


@contextlib.contextmanager
def _inside(namespace: str):
    """A socket that is in the network namespace, which this thread enters only to make it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        try:
            control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            if libc.setns(home.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot go back to the network namespace")
    with control:
        yield control


def _ethtool(control: socket.socket, interface: str, request: bytes) -> bytes:
    data = array.array("B", request)
    fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sQ16x", interface.encode(), data.buffer_info()[0]))
    return data.tobytes()


def _feature_names(control: socket.socket, interface: str) -> List[str]:
    info = _ethtool(control, interface, struct.pack("IIQI", _GSSET_INFO, 0, 1 << _FEATURES_SET, 0))
    count = struct.unpack_from("I", info, 16)[0]
    request = struct.pack("III", _GSTRINGS, _FEATURES_SET, count) + bytes(count * _NAME_BYTES)
    names = _ethtool(control, interface, request)[12:]
    return [names[i * _NAME_BYTES:][:_NAME_BYTES].split(b"\0")[0].decode() for i in range(count)]


def _features(control: socket.socket, interface: str) -> Dict[str, bool]:
    names = _feature_names(control, interface)
    blocks = (len(names) + 31) // 32
    answer = _ethtool(control, interface, struct.pack("II", _GFEATURES, blocks) + bytes(16 * blocks))
    active = [struct.unpack_from("IIII", answer, 8 + 16 * block)[2] for block in range(blocks)]
    return {name: bool(active[i // 32] >> i % 32 & 1) for i, name in enumerate(names) if name}


def _switch_off(control: socket.socket, interface: str) -> None:
    names = _feature_names(control, interface)
    valid = [0] * ((len(names) + 31) // 32)
    for i, name in enumerate(names):
        if _JOINING.fullmatch(name):
            valid[i // 32] |= 1 << i % 32
    body = b"".join(struct.pack("II", block, 0) for block in valid)
    _ethtool(control, interface, struct.pack("II", _SFEATURES, len(valid)) + body)
    left = [name for name, on in _features(control, interface).items() if on and _JOINING.fullmatch(name)]
    if left:
        raise OSError(f"{interface} keeps these offloads: {', '.join(left)}")


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, timeout=_RUN_S, text=True, capture_output=True).stdout


def _remove_stale() -> None:
    with contextlib.suppress(FileNotFoundError):
        found = {name: re.match(rf"{_PREFIX}(\d+)n\d+-", name) for name in os.listdir("/run/netns")}
        _remove([name for name, match in found.items() if match and not os.path.exists(f"/proc/{match[1]}")])


def _remove(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        if not os.path.exists(f"/run/netns/{name}"):
            continue
        for pid in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with contextlib.suppress(subprocess.CalledProcessError):  # somebody else was faster with a stale one
            _call("ip", "netns", "del", name)

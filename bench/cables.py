"""Hosts that a benchmark makes of this machine, the cables between them, and what such a cable carries.

Hosts are network namespaces on one bridge (tests/multihost/emulated.py), or hosts in name only that the loopback device
joins. What a cable carries is measured by plain streams, each way at once; from that follows the bound of an
all-reduce (floor.py): less cannot pass through the cables.
"""
import argparse
import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest.mock
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from harp_network import switch_off_offloads
from report import MIB
from teams import Team

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "multihost"))
import emulated  # noqa: E402

LEAST_BOUND_BYTES = MIB  # of a smaller message the bound says nothing
LEAST_GOODPUT = 0.95     # of the rate; the bound would be too easy otherwise
STREAMS, STREAM_S, STREAM_BYTES, STREAM_TIMEOUT_S = 5, 0.6, 256 * 1024, 20
ROUND_TRIPS = 50
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Of a cable with a rate. A burst that is much of a message would refill between two calls; segments must fit in it, and
# small ones cost the machine more than the messages do.
CABLE, CABLE_OF_SMALL = {"burst": "128kb"}, {"burst": "32kb", "gso_bytes": 16 * 1024}
LEAST_BYTES_FOR_CABLE = 16 * MIB
CLONE_NEWNET = 0x40000000
STORE_PORT, STREAM_PORT = 4711, 4712


class Place(NamedTuple):
    """Where a rank is: a host of its own, or one in name only."""
    host: int
    local_rank: int
    local_size: int
    store: str                # host:port
    namespace: Optional[str]  # None: the hosts are joined by the loopback device


class Network(NamedTuple):
    """Hosts that are there. `emulated` is None where they are hosts in name only."""
    ranks: Tuple[int, ...]  # of each host
    store: str
    emulated: Optional[emulated.Hosts]

    def places(self, cyclic: bool = False) -> List[Place]:
        """Of all ranks: host after host; or dealt to the hosts round robin, until each has its number."""
        spots = [(host, local, ranks) for host, ranks in enumerate(self.ranks) for local in range(ranks)]
        if cyclic:
            spots.sort(key=lambda spot: (spot[1], spot[0]))
        return [Place(*spot, self.store, self.emulated.namespace(f"h{spot[0]}") if self.emulated else None)
                for spot in spots]


@contextlib.contextmanager
def network_of(ranks: Sequence[int], loopback: bool, rate: str, least_bytes: int, mtu: int = 1500,
               offloads: bool = True) -> Iterator[Network]:
    """Hosts that have so many ranks each; they last as long as the context. least_bytes: of the smallest message.
    offloads: those that join packets."""
    with contextlib.ExitStack() as stack:
        # What is measured of these hosts is not that of others of the same names.
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(unittest.mock.patch.dict(os.environ, LIGHTCC_CACHE_DIR=kept))
        if loopback:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            yield Network(tuple(ranks), f"127.0.0.1:{port}", None)
            return
        cable = {} if not rate else CABLE if least_bytes >= LEAST_BYTES_FOR_CABLE else CABLE_OF_SMALL
        made = stack.enter_context(emulated.Hosts(len(ranks), rate, **cable))
        for name in made.names:
            ends = [(made.namespace(name), "eth0"), (made.namespace("switch"), f"to-{name}")]
            for namespace, interface in ends:
                subprocess.run(["ip", "-n", namespace, "link", "set", interface, "mtu", str(mtu)], check=True)
                if not offloads:
                    switch_off_offloads(namespace, interface)
        yield Network(tuple(ranks), f"{made.addresses('h0')[0]}:{STORE_PORT}", made)


def settle(place: Place, secret: str) -> None:
    """Before anything is started in this process: its network, and what lightcc and gloo have to know of it."""
    if place.namespace:
        _enter(place.namespace)
    os.environ.update(HOROVOD_LOCAL_RANK=str(place.local_rank), HOROVOD_LOCAL_SIZE=str(place.local_size),
                      **environment_of(place, secret), GLOO_SOCKET_IFNAME="eth0" if place.namespace else "lo")


def environment_of(place: Place, secret: str) -> Dict[str, str]:
    """What lightcc has to know of a rank's place, beyond its numbers."""
    in_name_only = {} if place.namespace else {"LIGHTCC_HOST_ID": str(place.host), "LIGHTCC_IFACE": "lo"}
    return {"LIGHTCC_STORE_ADDR": place.store, "LIGHTCC_SECRET": secret, **in_name_only}


def _enter(namespace: str) -> None:
    """From now on this thread, and those that it starts, have the network of that host."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


# What a cable carries

def goodput_of(team: Team, network: Network) -> float:
    """Bytes a second of the best stream each way between the first two hosts. The team's workers have stream(), which
    is that below; their ranks are in the order of hosts."""
    other, address = network.ranks[0], network.store.rpartition(":")[0]
    return max(min(rate for rate in team.ask("stream", 0, other, address) if rate is not None) for _ in range(STREAMS))


def latency_of(team: Team, network: Network) -> float:
    """Seconds that a byte takes between the first two hosts, at best. The team's workers have latency()."""
    other, address = network.ranks[0], network.store.rpartition(":")[0]
    return min(seconds for seconds in team.ask("latency", 0, other, address) if seconds is not None)


def stream(rank: int, listens: int, sends: int, address: str) -> Optional[float]:
    """Bytes a second that arrive in a stream to and fro between two ranks, of which one listens; None on others."""
    if rank not in (listens, sends):
        return None
    with _joined(rank == listens, address) as joined:
        return _duplex(joined)


def latency(rank: int, listens: int, sends: int, address: str) -> Optional[float]:
    """Half of the shortest round trip of a byte between two ranks; None on others."""
    if rank not in (listens, sends):
        return None
    with _joined(rank == listens, address) as joined:
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return min(_round_trip(joined, rank == sends) for _ in range(ROUND_TRIPS)) / 2


@contextlib.contextmanager
def _joined(listens: bool, address: str) -> Iterator[socket.socket]:
    if listens:
        with socket.create_server((address, STREAM_PORT)) as listener:
            listener.settimeout(STREAM_TIMEOUT_S)
            joined, _ = listener.accept()
    else:
        joined = _connect(address)
    with joined:
        joined.settimeout(STREAM_TIMEOUT_S)
        yield joined


def _connect(address: str) -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, STREAM_PORT), STREAM_TIMEOUT_S)
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens at {address}")


def _duplex(joined: socket.socket) -> float:
    """Both ends send for STREAM_S; the rate between the first byte that comes and the last."""
    def send() -> None:
        data, until = bytes(STREAM_BYTES), time.perf_counter() + STREAM_S
        while time.perf_counter() < until:
            joined.sendall(data)
        joined.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer, received = bytearray(STREAM_BYTES), 0
    first = joined.recv_into(buffer)
    begin = time.perf_counter()
    while count := joined.recv_into(buffer):
        received += count
    seconds = time.perf_counter() - begin
    sender.join()
    return received / seconds if first else 0.0


def _round_trip(joined: socket.socket, begins: bool) -> float:
    """Seconds from a byte that leaves to the next that comes; the end that does not begin answers first."""
    if not begins:
        joined.sendall(joined.recv(1))
        return float("inf")
    begin = time.perf_counter()
    joined.sendall(b"0")
    joined.recv(1)
    return time.perf_counter() - begin


def share_of_rate(goodput: float, rate: str) -> float:
    return goodput / (float(rate[:-4]) * UNITS[rate[-4:]] / 8)


def goodput_text(goodput: float, rate: str) -> str:
    share = share_of_rate(goodput, rate)
    verdict = "" if share >= LEAST_GOODPUT else ": too little, the bound counts for nothing"
    return f"goodput {goodput / 1e6:.1f} MB/s, {share:.3f} of the rate{verdict}"


# What options say

def parse_rate(text: str) -> str:
    if not re.fullmatch(r"none|[\d.]+[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r}: none, or a rate as 100mbit or 1gbit")
    return "" if text == "none" else text


def parse_hosts(text: str) -> Tuple[int, ...]:
    hosts = tuple(int(ranks) for ranks in text.split(","))
    if len(hosts) < 2 or min(hosts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: the ranks of two hosts or more, as 2,2")
    return hosts


def host_text(hosts: Sequence[int]) -> str:
    return f"{len(hosts)} hosts of {', '.join(map(str, hosts))} ranks"

"""What HARP's connections between two hosts survive, what ends them and with which words, and what forged packets do.
Both sides are tests/harp/peer.cc, which checks every byte; they are looked for in build/cmake, or in HARP_BUILD."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import needs

BUILD = Path(os.environ.get("HARP_BUILD", Path(__file__).resolve().parents[2] / "build" / "cmake"))
PEER, BENCH = BUILD / "harp_peer", BUILD / "harp-bench"
MISSING = [program.name for program in (PEER, BENCH) if not program.exists()]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{needs.MISSING}{', '.join(MISSING)} in {BUILD} (make unit)")

PEER_FAILED, PEER_SILENT = 5, 6
SHORT_MS, DEFAULT_MS = 1000, 4000
MARGIN_S = 1.5     # for the machine's other work, beyond a time-out
READY_S, PROGRESS_S = 15, 10
IDLE_CONNECTIONS, IDLE_S, IDLE_CORES = 64, 2, 0.01


class Pair:
    """A peer on h0 that connects to one on h1. What they print goes to files, so that no wait is without a deadline."""

    def __init__(self, hosts, *keys, **variables):
        self.hosts = hosts
        self.keys = [*keys, "interface=eth0"]
        self.environment = {**os.environ, **variables}
        self.folder = tempfile.TemporaryDirectory(prefix="harp-test-")
        self.processes = {}

    def __enter__(self):
        try:
            self._start("h1", "listen")
            handle = self.wait("h1", "handle").split()[1]
            self._start("h0", "connect", f"handle={handle}")
            for host in ("h0", "h1"):
                self.wait(host, "ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.folder.cleanup()

    def _start(self, host, *words):
        with open(os.path.join(self.folder.name, host), "w") as out:
            self.processes[host] = self.hosts.popen(host, [str(PEER), *words, *self.keys], stdin=subprocess.PIPE,
                                                    stdout=out, stderr=subprocess.STDOUT, env=self.environment)

    def said(self, host):
        with open(os.path.join(self.folder.name, host)) as file:
            return file.read()

    def wait(self, host, word, seconds=READY_S):
        """The first line that begins with this word."""
        deadline = time.monotonic() + seconds
        while True:
            over = self.processes[host].poll() is not None
            if found := re.search(rf"(?m)^{word}\b.*\n", self.said(host)):
                return found[0].rstrip("\n")
            assert not over and time.monotonic() < deadline, (
                f"{host} has not said '{word}'{'' if over else f' in {seconds} s'}: {self.said(host)[-1000:]}")
            time.sleep(0.01)

    def tell(self, host, command):
        self.processes[host].stdin.write(command + "\n")
        self.processes[host].stdin.flush()

    def came(self, host):
        """How many messages."""
        return max(map(int, re.findall(r"(?m)^at (\d+)$", self.said(host))), default=0)

    def go_on(self, messages=20, seconds=PROGRESS_S):
        """Both get messages, all of them right."""
        goals = {host: self.came(host) + messages for host in self.processes}
        deadline = time.monotonic() + seconds
        while any(self.came(host) < goal for host, goal in goals.items()):
            over = [host for host, process in self.processes.items() if process.poll() is not None]
            assert not over and time.monotonic() < deadline, {host: self.said(host)[-500:] for host in goals}
            time.sleep(0.01)

    def stop(self, seconds=PROGRESS_S):
        """In order; what each side has counted."""
        self.tell("h0", "stop")
        for host, process in self.processes.items():
            assert process.wait(seconds) == 0, f"{host}: {self.said(host)[-1000:]}"
        return {host: json.loads(self.wait(host, "stats").partition(" ")[2]) for host in self.processes}

    def expect_error(self, host, since, within_s, codes=(PEER_FAILED, PEER_SILENT)):
        """A connection's error, which names the port and the peer's address."""
        line = self.wait(host, "error", seconds=max(0.0, since + within_s - time.monotonic()))
        print(f"{host}: {time.monotonic() - since:.2f} s: {line}")
        _, code, text = line.split(" ", 2)
        peer = self.hosts.addresses("h1" if host == "h0" else "h0")[0]
        assert int(code) in codes and f"{peer}:" in text and "udp" in text, line
        assert self.processes[host].wait(5) == 3


@pytest.fixture(autouse=True)
def nothing_of_harp_is_left(hosts):
    """The pages of processes that were killed are removed by the next one that begins."""
    yield
    with Pair(hosts) as pair:
        pair.stop()
    folder = Path(f"/tmp/harp-{os.geteuid()}")
    pages = [page.name for page in folder.iterdir()] if folder.exists() else []
    assert [page for page in pages if not os.path.exists(f"/proc/{page.partition('-')[0]}")] == []
    assert [name for name in os.listdir("/dev/shm") if "harp" in name] == []


# ---- peers that die, stop and are cut off

def test_a_killed_peer_is_named(hosts):
    """Under load, and where receives are posted and nothing is on its way; with both time-outs."""
    with Pair(hosts) as busy, Pair(hosts, "idle=1") as idle, Pair(hosts, f"timeout={SHORT_MS}") as short, \
            Pair(hosts, f"timeout={SHORT_MS}", "idle=1", "engine=2") as short_idle:
        for pair in (busy, short):
            pair.go_on()
        pairs = {busy: DEFAULT_MS, idle: DEFAULT_MS, short: SHORT_MS, short_idle: SHORT_MS}
        for i, pair in enumerate(pairs):
            pair.processes["h0" if i % 2 else "h1"].kill()
        since = time.monotonic()
        for i, (pair, timeout_ms) in sorted(enumerate(pairs.items()), key=lambda item: item[1][1]):
            pair.expect_error("h1" if i % 2 else "h0", since, timeout_ms / 1000 + MARGIN_S)


def test_a_peer_that_is_stopped_for_three_seconds_is_survived(hosts):
    """Either side, with traffic and without. Where the time-out is shorter, it is not."""
    with Pair(hosts) as first, Pair(hosts) as second, Pair(hosts, "idle=1") as idle, \
            Pair(hosts, f"timeout={SHORT_MS}") as short:
        stopped = {first: "h0", second: "h1", idle: "h1", short: "h1"}
        for pair in (first, second, short):
            pair.go_on()
        for pair, host in stopped.items():
            pair.processes[host].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        short.expect_error("h0", since, SHORT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        time.sleep(max(0.0, since + 3 - time.monotonic()))
        for pair, host in stopped.items():
            pair.processes[host].send_signal(signal.SIGCONT)
        short.expect_error("h1", time.monotonic(), SHORT_MS / 1000 + MARGIN_S)
        for pair in (idle, first, second):
            for host in pair.processes:
                pair.tell(host, "go")
            pair.go_on()
            pair.stop()


def test_a_peer_that_is_stopped_for_ever_is_named(hosts):
    with Pair(hosts) as busy, Pair(hosts, "idle=1") as idle:
        busy.go_on()
        for pair in (busy, idle):
            pair.processes["h1"].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        for pair in (busy, idle):
            pair.expect_error("h0", since, DEFAULT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        assert time.monotonic() - since > 3  # it was survived for so long
        for pair in (busy, idle):
            pair.processes["h1"].send_signal(signal.SIGCONT)
        for pair in (busy, idle):
            pair.expect_error("h1", time.monotonic(), DEFAULT_MS / 1000 + MARGIN_S)


def test_a_cut_of_two_seconds_is_survived_and_one_for_good_is_named(hosts):
    """A cable that is pulled behind the switch, and then the host's own interface that goes down."""
    with Pair(hosts) as pair, Pair(hosts, f"timeout={SHORT_MS}") as short:
        pair.go_on()
        hosts.cut("h1")
        since = time.monotonic()
        try:
            for host in ("h0", "h1"):
                short.expect_error(host, since, SHORT_MS / 1000 + MARGIN_S, [PEER_SILENT])
            time.sleep(max(0.0, since + 2 - time.monotonic()))
        finally:
            hosts.restore("h1")
        pair.go_on()
        hosts.run("h0", ["ip", "link", "set", "eth0", "down"])
        try:
            time.sleep(2)
        finally:
            hosts.run("h0", ["ip", "link", "set", "eth0", "up"])
        pair.go_on()
        hosts.cut("h1")
        since = time.monotonic()
        try:
            for host in ("h0", "h1"):
                pair.expect_error(host, since, DEFAULT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        finally:
            hosts.restore("h1")


# ---- forged packets

SNIFF = """
import socket, sys
source, count = sys.argv[1], int(sys.argv[2])
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
packets.settimeout(10)
print("sniffing", flush=True)
while count:
    packet = packets.recv(65536)
    header = (packet[0] & 15) * 4
    if packet[9] == 17 and socket.inet_ntoa(packet[12:16]) == source and len(packet) <= 1500:
        print(packet[header:].hex(), flush=True)
        count -= 1
"""

# Reads lines "SOURCE DESTINATION UDP", the last in hexadecimal with its ports, and sends them with that source.
FORGE = """
import socket, struct, sys, time
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
sent = 0
for line in sys.stdin:
    source, destination, udp = line.split()
    udp = bytes.fromhex(udp)
    udp = udp[:4] + struct.pack(">HH", len(udp), 0) + udp[8:]  # without a checksum, which is legal
    head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, socket.inet_aton(source),
                       socket.inet_aton(destination))
    raw.sendto(head + udp, (destination, 0))
    sent += 1
    if sent % 50 == 0:
        time.sleep(0.005)
print(sent)
"""
UDP_HEADER, FLAGS, CONN, NUMBER, PAYLOAD = 8, 1, slice(2, 6), slice(6, 10), 22  # of packet.h
REFUSED = ("malformed", "unauthenticated", "out_of_window", "out_of_buffer", "duplicates")
CONTROL_TYPES = (1, 2, 3, 4, 5)  # ACK, GRANT, PROBE, CLOSE, RESET


def sniff(hosts, at, source, count):
    """UDP packets, header included, that come from this address."""
    sniffer = hosts.popen(at, [sys.executable, "-S", "-c", SNIFF, source, str(count)], stdout=subprocess.PIPE)
    try:
        lines = sniffer.communicate(timeout=15)[0].split()
    finally:
        sniffer.kill()
        sniffer.communicate()
    assert lines[0] == "sniffing" and len(lines) == count + 1, lines[:1]
    return [bytes.fromhex(line) for line in lines[1:]]


def forge(hosts, source, destination, packets):
    lines = "".join(f"{source} {destination} {packet.hex()}\n" for packet in packets)
    assert int(hosts.run("h2", [sys.executable, "-S", "-c", FORGE], input=lines)) == len(packets)


def replaced(packet, where, value):
    """A copy, with other bytes at this place behind its UDP header."""
    body = bytearray(packet[UDP_HEADER:])
    body[where] = value
    return packet[:UDP_HEADER] + bytes(body)


def off_path(real):
    """What somebody sends who knows addresses and ports, not a connection's number: garbage, and what looks right."""
    ports = real[0][:UDP_HEADER]
    packets = [ports + os.urandom(n % 1400) for n in range(300)]
    packets += [replaced(packet, CONN, os.urandom(4)) for packet in real[:100]]
    packets += [replaced(replaced(packet, CONN, os.urandom(4)), slice(0, 1), bytes([packet[UDP_HEADER] & 240 | t]))
                for packet in real[:20] for t in range(8)]
    return packets


def on_path(real):
    """What somebody sends who sees all packets and has not the secret."""
    packets = list(real)  # replayed
    for packet in real[:100]:
        body = packet[UDP_HEADER:]
        number = int.from_bytes(body[NUMBER], "little")
        packets.append(replaced(packet, NUMBER, ((number + 2**31) % 2**32).to_bytes(4, "little")))  # outside the window
        for ahead in (1, 40, 1000):
            packets.append(replaced(packet, NUMBER, ((number + ahead) % 2**32).to_bytes(4, "little")))
        packets.append(replaced(packet, slice(FLAGS, FLAGS + 1), bytes([body[FLAGS] & ~1])))  # says it has no tag
        packets.append(packet[:-1] + bytes([packet[-1] ^ 1]))
        packets.append(packet[:-9])
        packets.append(packet[:UDP_HEADER + PAYLOAD])
    for type_ in CONTROL_TYPES:
        for packet in real[:20]:
            first = bytes([packet[UDP_HEADER] & 240 | type_])
            packets.append(replaced(packet, slice(0, 1), first))
            packets.append(replaced(packet, slice(0, 1), first)[:UDP_HEADER + PAYLOAD] + os.urandom(17))
    return packets


def counted(stats, *names):
    """All that were refused: of the connections, and of packets that belong to none."""
    everything = [*stats["connections"], stats["strays"]]
    return sum(one.get(name, 0) for one in everything for name in names)


@pytest.mark.parametrize("keys", [["secret=of both"], []], ids=["authenticated", "not authenticated"])
def test_forged_packets_are_refused_and_counted(hosts, keys):
    """From a third host, with the sender's address: by somebody who does not see the packets, and, where they are
    authenticated, by somebody who does. The data stay right; nothing ends."""
    with Pair(hosts, "most=3000", *keys, HARP_GSO="0") as pair:
        pair.go_on()
        for source, destination in (("h0", "h1"), ("h1", "h0")):
            address = {host: hosts.addresses(host)[0] for host in ("h0", "h1", "h2")}
            real = sniff(hosts, destination, address[source], 200)
            packets = off_path(real) + (on_path(real) if keys else [])
            forge(hosts, address[source], address[destination], packets)
            forge(hosts, address["h2"], address[destination], packets)
            pair.go_on()
        for host, stats in pair.stop().items():
            refused = {name: counted(stats, name) for name in REFUSED}
            print(host, refused)
            # Sockets overflow, and what is no packet at all the port has dropped.
            assert refused["out_of_window"] >= 200
            if keys:
                assert refused["unauthenticated"] > 100 and sum(refused.values()) > len(packets)


# ---- idle

def test_idle_connections_cost_nothing(hosts):
    address = hosts.addresses("h1")[0]
    server = hosts.popen("h1", [str(BENCH), "--listen", f"{address}:4720", "--sessions", "1", "--interface", "eth0"])
    try:
        line = hosts.run("h0", [
            str(BENCH), "--connect", f"{address}:4720", "--interface", "eth0", "--mode", "idle", "--connections",
            str(IDLE_CONNECTIONS), "--message", "64", "--depth", "1", "--engine-mode", "threads", "--seconds",
            str(IDLE_S)])
        assert server.wait(10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
    cores = {side: json.loads(line)[side]["cores"] for side in ("client", "server")}
    print(cores)
    assert max(cores.values()) < IDLE_CORES, cores

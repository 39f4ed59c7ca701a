"""Two programs of HARP that send each other messages and check every byte, and packets that are forged. The programs
are looked for in build/cmake, or in HARP_BUILD."""
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import needs

BUILD = Path(os.environ.get("HARP_BUILD", Path(__file__).resolve().parents[2] / "build" / "cmake"))
MARGIN_S = 20      # for the machine's other work, beyond a time-out
READY_S, PROGRESS_S = 60, 60


def needs_programs(*programs):
    """The mark of a module that cannot run without them."""
    missing = [program.name for program in programs if not program.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"{needs.MISSING}{', '.join(missing)} in {BUILD} (make unit)")


class Pair:
    """A peer on h0 that connects to one on h1. What they print goes to files, so that no wait is without a deadline.
    Both are started with this command, then what they do and these keys."""
    pids = set()  # of all that were started

    def __init__(self, hosts, command, keys, variables):
        self.hosts = hosts
        self.command = command
        self.keys = keys
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
            self.processes[host] = self.hosts.popen(host, [*self.command, *words, *self.keys], stdin=subprocess.PIPE,
                                                    stdout=out, stderr=subprocess.STDOUT, env=self.environment)
        self.pids.add(self.processes[host].pid)

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
        """In order."""
        self.tell("h0", "stop")
        for host, process in self.processes.items():
            assert process.wait(seconds) == 0, f"{host}: {self.said(host)[-1000:]}"

    def expect_error(self, host, since, within_s, codes):
        """A connection's error, which names the port and the peer's address."""
        line = self.wait(host, "error", seconds=max(0.0, since + within_s - time.monotonic()))
        print(f"{host}: {time.monotonic() - since:.2f} s: {line}")
        _, code, text = line.split(" ", 2)
        peer = self.hosts.addresses("h1" if host == "h0" else "h0")[0]
        assert int(code) in codes and f"{peer}:" in text and "udp" in text, line
        assert self.processes[host].wait(60) == 3


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
CONTROL_TYPES = (1, 2, 3, 4, 5)  # ACK, GRANT, PROBE, CLOSE, RESET


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

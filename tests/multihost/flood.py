"""A flood of datagrams, as a stranger sends them; programs run it where the stranger is.

    python -S flood.py ADDRESS PORT[,PORT...] PAYLOAD [--rate 350000] [--seconds 60] [--user 65534] [--core 1] [--apart]

PAYLOAD is in hexadecimal, or empty. Says "flooding" when it has begun, and at its end how many datagrams were sent in
how many seconds. The kernel is handed many at once (sendmmsg) and makes several of what it is handed (UDP_SEGMENT), so
that Python's time does not count. sniff() records datagrams of a job, so that they can be sent to another.
"""
import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

UDP_SEGMENT = 103
AT_ONCE, MOST_SEGMENTS, MOST_BYTES = 256, 64, 60_000  # together

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


class _Pieces(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class _Message(ctypes.Structure):  # mmsghdr
    _fields_ = [("name", ctypes.c_void_p), ("name_bytes", ctypes.c_uint32), ("pieces", ctypes.POINTER(_Pieces)),
                ("piece_count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_bytes", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("sent", ctypes.c_uint)]


def flood(address: str, ports, payload: bytes, rate: float, seconds: float, apart: bool = False) -> int:
    """Returns how many were sent. rate: datagrams a second over all ports; fewer where the machine can do no more."""
    libc = ctypes.CDLL(None, use_errno=True)
    segments = max(1, min(MOST_SEGMENTS, MOST_BYTES // len(payload))) if payload and not apart else 1
    memory = ctypes.create_string_buffer(payload * segments, len(payload) * segments + 1)
    piece = _Pieces(ctypes.cast(memory, ctypes.c_void_p), len(payload) * segments)
    messages = (_Message * (AT_ONCE // segments))()
    for message in messages:
        message.pieces, message.piece_count = ctypes.pointer(piece), 1
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sockets = [socket.socket(family, socket.SOCK_DGRAM) for _ in ports]
    for one, port in zip(sockets, ports):
        if segments > 1:
            one.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(payload))
        one.connect((address, port))
    sent, turn, start = 0, 0, time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        ahead_s = sent / rate - passed
        if ahead_s > 0:
            time.sleep(ahead_s)
        # What ICMP says of datagrams before is an error of the next call, and no reason to stop.
        sent += segments * max(0, libc.sendmmsg(sockets[turn].fileno(), messages, len(messages), 0))
        turn = (turn + 1) % len(sockets)
    return sent


def sniff(hosts, at, source, count):
    """UDP packets, header included, that come from this address."""
    sniffer = hosts.popen(at, [sys.executable, "-S", "-c", SNIFF, source, str(count)], stdout=subprocess.PIPE)
    try:
        lines = sniffer.communicate(timeout=60)[0].split()
    finally:
        sniffer.kill()
        sniffer.communicate()
    assert lines[0] == "sniffing" and len(lines) == count + 1, lines[:1]
    return [bytes.fromhex(line) for line in lines[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("ports", type=lambda text: list(map(int, text.split(","))))
    parser.add_argument("payload", type=bytes.fromhex)
    parser.add_argument("--rate", type=float, default=350_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--user", type=int, help="a number; default: who starts it")
    parser.add_argument("--core", type=int, help="the one that it runs on; default: any")
    parser.add_argument("--apart", action="store_true", help="each is handed to the kernel by itself, and so arrives")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    if args.user is not None:
        os.setgroups([])
        os.setgid(args.user)
        os.setuid(args.user)
    ends = time.monotonic() + args.seconds
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("flooding", flush=True)
    start = time.monotonic()
    sent = flood(args.address, args.ports, args.payload, args.rate, ends - start, args.apart)
    print("sent", sent, time.monotonic() - start, flush=True)


if __name__ == "__main__":
    main()

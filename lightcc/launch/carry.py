"""Carries the three streams of a process elsewhere, as ssh does: its standard input, output and error are ours.

As a program, of an agent whose host has come by itself (offers.py): python -m lightcc.launch.carry SOCKET HOST.
"""
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Callable, Optional

CHUNK_BYTES = 1 << 20
LOST = 255  # as ssh says it
START = b"!"  # what an offer waits for


def carry(write: Callable[[bytes], object], read: Callable[[int], Optional[bytes]], outputs: Mapping[int, int]) -> None:
    """Returns when the process's outputs have ended.

    write: to its standard input; b"" ends it. read: of its standard output, 1, or standard error, 2; nothing at its
    end. outputs: our descriptors for these two.
    """
    threading.Thread(target=_carry_in, args=(write,), daemon=True).start()
    threads = [threading.Thread(target=_carry_out, args=(read, number, fd), daemon=True)
               for number, fd in outputs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _carry_in(write: Callable[[bytes], object]) -> None:
    while True:
        chunk = os.read(0, CHUNK_BYTES)
        write(chunk)
        if not chunk:
            return


def _carry_out(read: Callable[[int], Optional[bytes]], number: int, fd: int) -> None:
    while chunk := read(number):
        while chunk:
            chunk = chunk[os.write(fd, chunk):]


def main(name: str, host: str) -> int:
    """name: of the driver's socket in the abstract namespace."""
    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as driver, contextlib.suppress(OSError):
        driver.connect("\0" + name)
        driver.sendall(host.encode())
        _, descriptors, _, _ = socket.recv_fds(driver, 1, 3)
    if len(descriptors) != 3:
        os.write(2, f"the task of host {host} has ended\n".encode())
        return LOST
    streams = [socket.socket(fileno=fd) for fd in descriptors]

    def write(chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # its outputs end as well
            if chunk:
                streams[0].sendall(chunk)
            else:
                streams[0].shutdown(socket.SHUT_WR)

    def read(number: int) -> bytes:
        try:
            return streams[number].recv(CHUNK_BYTES)
        except OSError:
            return b""

    write(START)
    carry(write, read, {1: 1, 2: 2})
    return LOST  # an agent that is over has said so; then nobody asks for a code


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:3]))  # a thread may still read our input

"""Hosts that come by themselves. Where a scheduler starts tasks but cannot carry calls to them, a task connects to the
driver of an elastic job and offers to run an agent; the driver takes up the offer when it wants to use that host.

Three connections, each proven by both sides to know the job's secret, carry the agent's standard input, output and
error. They belong to the driver, which hands them to the process that stands in for ssh (carry.py).
"""
import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Callable, NamedTuple

from lightcc.launch import network
from lightcc.launch.carry import CHUNK_BYTES
from lightcc.launch.local import pythonpath_setting

_HANDSHAKE_S = 30
_CONNECT_S = 10.0
_SILENCE_MS = 30_000  # for which a host may not answer
_IDLE_S, _EVERY_S, _TIMES = 10, 5, 4
_WORD_BYTES = 1000
_KNOWN = b"+"


class Invitation(NamedTuple):
    """What the driver sends to a task, by the scheduler."""

    number: int            # of the offer
    addresses: list[str]   # of the driver, to be tried in this order
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"Invitation(number={self.number}, addresses={self.addresses}, port={self.port})"


class _Offer:
    def __init__(self, host: str) -> None:
        self.host = host
        self.streams: dict[int, socket.socket] = {}
        self.taken = False

    def close(self) -> None:
        while self.streams:
            self.streams.popitem()[1].close()


class Offers:
    """The driver's side. To be closed."""

    def __init__(self, addresses: list[str], ports: str = "") -> None:
        """addresses: of this host, as tasks reach it. ports: as LIGHTCC_PORT_RANGE."""
        listener = network.hold_port(ports)
        if listener is None:
            raise RuntimeError(f"no port of LIGHTCC_PORT_RANGE={ports} is free for the tasks of an elastic job")
        self._listener = listener
        self._addresses, self._secret = addresses, secrets.token_bytes(32)
        self._name = f"lightcc-offers-{secrets.token_hex(16)}"
        self._lock = threading.Lock()  # guards what follows
        self._offers: dict[int, _Offer] = {}
        self._came: dict[int, int] = {}  # how often, by number
        self._closed = False
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._local.bind("\0" + self._name)
        for listening, serve in ((self._listener, self._welcome), (self._local, self._hand_over)):
            listening.listen(128)
            threading.Thread(target=self._accept, args=(listening, serve), daemon=True).start()

    def invitation(self, number: int) -> Invitation:
        return Invitation(number, self._addresses, self._listener.getsockname()[1], self._secret)

    def hosts(self) -> dict[str, int]:
        """The hosts that are there, in the order of their coming, with a slot each."""
        with self._lock:
            return {offer.host: 1 for offer in self._offers.values() if offer.taken or len(offer.streams) == 3}

    def has_come(self, number: int) -> bool:
        with self._lock:
            return number in self._came

    def withdraw(self, number: int) -> None:
        """The task has ended."""
        with self._lock:
            if offer := self._offers.pop(number, None):
                offer.close()

    def agent_command(self, host: str) -> list[str]:
        return [sys.executable, "-m", "lightcc.launch.carry", self._name, host]

    def close(self) -> None:
        """Tasks whose offers were not taken up end."""
        with self._lock:
            self._closed = True
            for offer in self._offers.values():
                offer.close()
        for listening in (self._listener, self._local):
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listening.close()

    def _accept(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection = listening.accept()[0]
            except OSError:
                if self._closed:
                    return
                continue
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def _welcome(self, stream: socket.socket) -> None:
        """A connection of a task; or of somebody else, who gets no answer."""
        try:
            number, index, host = self._proven(stream)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError
                if index == 0:  # the scheduler may run a task again
                    if number in self._offers:
                        self._offers.pop(number).close()
                    again = self._came.get(number, 0)
                    self._came[number] = again + 1
                    self._offers[number] = _Offer(f"{host}-{number}" + (f".{again}" if again else ""))
                stream.sendall(_KNOWN)
                self._offers[number].streams[index] = stream
        except Exception:
            stream.close()

    def _proven(self, stream: socket.socket) -> tuple[int, int, str]:
        _keep_alive(stream)
        with _within(stream, _HANDSHAKE_S) as connection:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            number, index, host = connection.recv_bytes(_WORD_BYTES).decode().split(" ", 2)
        return int(number), int(index), host

    def _hand_over(self, carrier: socket.socket) -> None:
        with carrier, contextlib.suppress(OSError):
            peer = carrier.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] != os.geteuid():
                return
            host = carrier.recv(_WORD_BYTES).decode()
            with self._lock:
                offer = next((one for one in self._offers.values() if one.host == host and len(one.streams) == 3), None)
                if offer is None:  # the carrier says so
                    return
                offer.taken = True
                try:
                    socket.send_fds(carrier, [b"!"], [offer.streams[index].fileno() for index in range(3)])
                finally:  # where the carrier is gone, the task ends
                    offer.close()


def offer(invitation: Invitation, environment: Mapping[str, str]) -> None:
    """The task's side: offers to run an agent, with these variables beside ours, and runs it when it is wanted; returns
    when it has ended, or the driver wants none. ConnectionError if the driver cannot be reached."""
    streams: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for index in range(3):
            streams.append(stack.enter_context(_connected(invitation, index)))
        wanted = b""
        with contextlib.suppress(OSError):
            wanted = streams[0].recv(1)
        if not wanted:
            return
        process = subprocess.Popen([sys.executable, "-m", "lightcc.launch.agent"], bufsize=0, stdin=subprocess.PIPE,
                                   stdout=streams[1].fileno(), stderr=streams[2].fileno(), start_new_session=True,
                                   env={**os.environ, **pythonpath_setting(), **environment})
        streams[1].close()
        streams[2].close()
        assert process.stdin is not None
        try:
            with process.stdin as stdin, contextlib.suppress(OSError):  # it or the driver has ended
                while chunk := streams[0].recv(CHUNK_BYTES):
                    while chunk:
                        chunk = chunk[os.write(stdin.fileno(), chunk):]
        finally:
            process.wait()


def _connected(invitation: Invitation, index: int) -> socket.socket:
    errors = []
    for address in invitation.addresses:
        try:
            return _proven_to(address, invitation, index)
        except Exception as error:
            errors.append(f"{address}: {error}")
    raise ConnectionError(f"the driver of an elastic job cannot be reached from host {socket.gethostname()} at port "
                          f"{invitation.port} ({'; '.join(errors)}). Open a way there, or name its network interface "
                          "(nics)")


def _proven_to(address: str, invitation: Invitation, index: int) -> socket.socket:
    stream = socket.create_connection((address, invitation.port), _CONNECT_S)
    try:
        _keep_alive(stream)
        with _within(stream, _HANDSHAKE_S) as connection:
            answer_challenge(connection, invitation.secret)
            deliver_challenge(connection, invitation.secret)
            connection.send_bytes(f"{invitation.number} {index} {socket.gethostname()}".encode())
            if stream.recv(1) != _KNOWN:  # then the next stream comes after this one
                raise ConnectionAbortedError("the job is over")
        return stream
    except BaseException:
        stream.close()
        raise


@contextlib.contextmanager
def _within(stream: socket.socket, seconds: int) -> Iterator["Connection"]:
    """The stream as a Connection, for which each message may take so long."""
    stream.settimeout(None)
    limit, none = struct.pack("ll", seconds, 0), struct.pack("ll", 0, 0)
    options = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
    for option in options:
        stream.setsockopt(socket.SOL_SOCKET, option, limit)
    with Connection(os.dup(stream.fileno())) as connection:
        yield connection
    for option in options:
        stream.setsockopt(socket.SOL_SOCKET, option, none)


def _keep_alive(stream: socket.socket) -> None:
    """Its host's silence ends a connection."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, _IDLE_S), (socket.TCP_KEEPINTVL, _EVERY_S),
                          (socket.TCP_KEEPCNT, _TIMES), (socket.TCP_USER_TIMEOUT, _SILENCE_MS)):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)

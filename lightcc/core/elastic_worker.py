"""A worker's end of its talk with the driver of an elastic job: which rank of which epoch it is, and what it tells.

A thread reads what the driver says. Whoever calls init() waits here until the worker has a place in an epoch and the
members have met; a member that ends before they have costs the others nothing but another try.
"""
import atexit
import contextlib
import logging
import os
import socket
import threading
import traceback
from typing import Any, Callable, Optional

from lightcc.core import lib
from lightcc.core.elastic_messages import VARIABLE, Unpacker, pack
from lightcc.core.exceptions import HorovodInternalError

_READ_BYTES = 1 << 16
_TRIES = 3  # epochs in a row that could not be met for without somebody's end
_NO_RANK_0 = "init: rank 0 did not come "  # the core's words, where it cannot be reached
_GONE = "the launcher of this elastic job is gone"
_CLOSED = "it has closed the connection"

_logger = logging.getLogger("lightcc")
_connection: Optional["Connection"] = None
_lock = threading.Lock()


def available() -> bool:
    """Whether a driver has started this process."""
    return _connection is not None or VARIABLE in os.environ


def is_elastic() -> bool:
    """Whether ranks may come later. What they make then, the others have already: so that must not communicate.

    >>> is_elastic()
    False
    """
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def connection() -> "Connection":
    """That with the driver; there is one."""
    global _connection
    with _lock:
        if _connection is None:
            _connection = Connection(_inherited(os.environ[VARIABLE]))
            del os.environ[VARIABLE]  # what this process starts is no worker
        return _connection


def _inherited(text: str) -> socket.socket:
    try:
        return socket.socket(fileno=int(text.partition(":")[0]))  # behind it: its inode (lightcc/launch/local.py)
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"init: {VARIABLE}={text}: expected the number of a socket that lightccrun has handed on "
                         f"({error}); unset it if this process is no worker of an elastic job") from None


def subscribe(callback: Callable[[int, int], None]) -> None:
    """Has callback(timestamp, result) called, by the reading thread, when hosts were added or removed. Rank 0 hears of
    it."""
    connection().on_hosts_updated = callback


def leaving_ranks() -> list[int]:
    """Those that the driver wants to leave this world, as rank 0 has heard last.

    >>> leaving_ranks()
    []
    """
    return connection().leaving if available() else []


def synced() -> None:
    """Tells the driver that this worker has the state of rank 0."""
    if available():
        connection().synced()


class Connection:
    def __init__(self, connected: socket.socket) -> None:
        connected.set_inheritable(False)
        self.on_hosts_updated: Callable[[int, int], None] = lambda timestamp, result: None
        self.leaving: list[int] = []  # ranks of this epoch
        self._socket = connected
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._said: dict[str, dict[str, Any]] = {}  # the last message of each kind that was not taken
        self._epoch = 0
        self._job = ""  # of the epoch
        self._cancelled = 0  # the last epoch that was cancelled
        self._gone = ""      # why nothing more will come
        atexit.register(self._leave)
        threading.Thread(target=self._read, name="lightcc-elastic", daemon=True).start()

    def join_epoch(self, agree: Callable[[], None]) -> None:
        """Forms the next world that this worker is a member of. SystemExit(0) if it is not wanted any more.

        agree: collectives that the members begin with, part of their meeting. If they fail it leaves the world."""
        if os.getpid() != self._process:
            raise HorovodInternalError("init: a process forked from a worker is no worker of the elastic job")
        for tries in range(1, _TRIES + 1):
            if self._meet(agree, last=tries == _TRIES):
                return

    def synced(self) -> None:
        self._send("synced", epoch=self._epoch)

    def _leave(self) -> None:
        if os.getpid() == self._process:
            self._send("leaving")

    def _meet(self, agree: Callable[[], None], last: bool) -> bool:
        """Whether the members have met; one of them may end before, which is no try of ours."""
        while True:
            place = self._place()
            try:
                self._init(place)
                agree()
            except HorovodInternalError as error:
                if self._cancelled >= place["epoch"]:
                    continue
                if error.status == lib.TIMEOUT:
                    self._send("timed_out", epoch=place["epoch"], apart=str(error).startswith(_NO_RANK_0))
                if last:
                    raise
                return False
            self.leaving = []
            self._send("joined", epoch=place["epoch"])
            return True

    def _place(self) -> dict[str, Any]:
        with self._changed:
            self._said.pop("form", None)
        self._send("waiting")
        message = self._await("form", "dismiss")
        if message["what"] == "dismiss":
            raise SystemExit(0)
        with self._changed:
            self._epoch, self._job = message["epoch"], message["job"]
        return message

    def _init(self, place: dict[str, Any]) -> None:
        if self._cancelled >= place["epoch"]:  # before we knew of it; from then on the core is told
            raise HorovodInternalError("init: the epoch was cancelled")
        if place["rank"] == 0:
            where = lib.open_meeting()
            self._send("meeting", epoch=place["epoch"], where=where)
        else:
            where = self._meeting(place["epoch"])
        lib.init_at(place["rank"], place["size"], place["job"], place["secret"], where)

    def _meeting(self, epoch: int) -> str:
        """Where rank 0 of the epoch waits."""
        while True:
            message = self._await("meet", "cancel")
            if message["epoch"] == epoch:
                if message["what"] == "meet":
                    return message["where"]
                raise HorovodInternalError(f"init: {message['cause']}")

    def _await(self, *kinds: str) -> dict[str, Any]:
        """Without a deadline of its own: the driver has one for the job (--elastic-timeout), and its end is seen."""
        with self._changed:
            while not any(kind in self._said for kind in kinds):
                if self._gone:
                    raise RuntimeError(f"init: {_GONE}: {self._gone}")
                self._changed.wait()
            return self._said.pop(next(kind for kind in kinds if kind in self._said))

    def _send(self, what: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the reading thread sees it too, and says why
            self._socket.sendall(pack(what, **fields))

    def _read(self) -> None:
        unpacker = Unpacker()
        try:
            while chunk := self._socket.recv(_READ_BYTES):
                for message in unpacker.feed(chunk):
                    self._take(message)
            why = _CLOSED
        except ConnectionResetError:  # it has ended before it had read all
            why = _CLOSED
        except (OSError, ValueError) as error:
            why = str(error)
        _logger.error("%s: %s", _GONE, why)
        with self._changed:
            self._gone = why
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        what = message["what"]
        if what == "ping":
            self._send("pong")
        elif what == "hosts_updated":
            self.leaving = message["leaving"]
            try:
                self.on_hosts_updated(message["timestamp"], message["result"])
            except Exception:  # of somebody who listens; this thread goes on
                traceback.print_exc()
        else:
            with self._changed:
                self._said[what] = message
                self._changed.notify_all()
                job = self._job if what == "cancel" and message["epoch"] == self._epoch else ""
                if what == "cancel":
                    self._cancelled = message["epoch"]
            if job:
                lib.cancel_init(job, message["cause"])

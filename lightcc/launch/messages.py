"""The messages between a launcher and its agents: tuples, packed into bytes. Half of them are also the events of ranks
in event_loop.py, whichever host they are on.

Before its first message an agent writes a line, greeting(). What stands before it (a login shell's banner) is no
message.
"""

import json
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union, get_origin

from lightcc._version import __version__

MAX_BYTES = 256 << 20  # a larger "message" is none
_HEAD = struct.Struct("!BI")    # kind, bytes that follow
_GREETING = re.compile(rb"lightcc-agent (\S+)\n")


# To an agent.
class Load(NamedTuple):
    """A part of the function that the ranks are to run (run_files.py); all of it comes before Begin."""

    chunk: bytes


class Begin(NamedTuple):
    host: str
    places: list[list[Any]]  # as hosts.Place
    command: list[str]
    environment: dict[str, str]
    folder: str
    talk_variable: str  # as Job's
    slots: int          # as Job's


class HoldPort(NamedTuple):
    """Take a port for a server that rank 0 may open, and answer PortHeld."""

    ports: str  # LIGHTCC_PORT_RANGE


class StartRank(NamedTuple):
    """One more rank of the job that has begun."""

    place: list[Any]


class Tell(NamedTuple):
    """What a rank gets by its own socket."""

    rank: int
    chunk: bytes


class Signal(NamedTuple):
    rank: int
    signum: int


class Pause(NamedTuple):
    """Read nothing more from the ranks, or go on."""

    on: bool


class Input(NamedTuple):
    """A part of our standard input, for rank 0. standard_input.py limits the bytes in flight."""

    chunk: bytes  # empty at its end


class End(NamedTuple):
    """End what is left of the ranks and their groups, send what they have printed, say Over."""


# From an agent.
class Alive(NamedTuple):
    """A heartbeat, by which both ends notice when the connection is gone."""


class PortHeld(NamedTuple):
    port: int  # 0: none is free


class Started(NamedTuple):
    rank: int
    pid: int


class Threads(NamedTuple):
    """OMP_NUM_THREADS was not set; these are the threads that each rank of a host gets, fewer than it would take."""

    each: int
    cores: int
    ranks: int

    def text(self) -> str:
        cores, ranks = (f"{count} {what}{'s' * (count != 1)}" for what, count in (("core", self.cores),
                                                                                  ("rank", self.ranks)))
        return f"OMP_NUM_THREADS is not set; it is {self.each} for each rank: {cores} for {ranks} of a host"


class NotStarted(NamedTuple):
    """One of the ranks that come and go could not be started; the others go on."""

    rank: int
    text: str
    exit_code: int


class Failed(NamedTuple):
    """A rank could not be started, which ends the job."""

    text: str
    exit_code: int


class Output(NamedTuple):
    rank: int
    stream: int   # 1 or 2
    chunk: bytes  # empty at its end


class Taken(NamedTuple):
    """Rank 0 has read so many bytes of its input."""

    size: int
    over: bool  # it reads no more


class Said(NamedTuple):
    """What a rank has said by its own socket."""

    rank: int
    chunk: bytes


class ResultPart(NamedTuple):
    """A part of the result file of a rank of run() (result_file.py). All of it comes before the rank's Ended."""

    rank: int
    is_error: bool
    begin: int    # where the chunk belongs
    size: int     # of the whole
    age_s: float  # since the rank wrote it
    mac: bytes    # of all other fields (result_transfer.py)
    chunk: bytes


class Ended(NamedTuple):
    rank: int
    code: int  # as subprocess has it


class Remark(NamedTuple):
    text: str


class Over(NamedTuple):
    """The last message of an agent."""

    host: str
    stuck: list[int]  # processes that SIGKILL did not end


Message = Union[Load, HoldPort, Begin, StartRank, Tell, Signal, Pause, Input, End, Alive, PortHeld, Started,
                NotStarted, Threads, Failed, Output, Taken, Said, ResultPart, Ended, Remark, Over]
_KINDS = (Begin, Signal, Pause, End, Alive, Started, Failed, Output, Ended, Remark, Over, Load, ResultPart,
          Threads, Input, Taken, StartRank, Tell, Said, NotStarted, HoldPort, PortHeld)
# Those that end in a chunk, and what stands before it; the others are JSON.
_HEADS = {Load: struct.Struct("!"), Input: struct.Struct("!"), Output: struct.Struct("!IB"), Tell: struct.Struct("!I"),
          Said: struct.Struct("!I"), ResultPart: struct.Struct("!I?QQd32s")}
_TYPES: dict[type, list[type]] = {kind: [get_origin(type_) or type_ for type_ in kind.__annotations__.values()]
                                 for kind in _KINDS}


def greeting() -> bytes:
    return f"\nlightcc-agent {__version__}\n".encode()


def find_greeting(text: bytes) -> Optional[tuple[str, int]]:
    """The agent's version and where its messages begin."""
    match = _GREETING.search(text)
    return (match[1].decode(errors="replace"), match.end()) if match else None


def pack(message: Message) -> bytes:
    fields: tuple[Any, ...] = message
    head = _HEADS.get(type(message))
    body = head.pack(*fields[:-1]) + fields[-1] if head else json.dumps(fields).encode()
    return _HEAD.pack(_KINDS.index(type(message)), len(body)) + body


class Unpacker:
    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Gives the messages that are whole. Raises ValueError on what is none; there is no going on after that."""
        self._buffer += chunk
        begin = 0
        while len(self._buffer) - begin >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._buffer, begin)
            if kind >= len(_KINDS) or size > MAX_BYTES:
                raise ValueError(f"no message begins with {bytes(self._buffer[begin:begin + 40])!r}")
            end = begin + _HEAD.size + size
            if len(self._buffer) < end:
                break
            yield _unpack(_KINDS[kind], bytes(self._buffer[begin + _HEAD.size:end]))
            begin = end
        del self._buffer[:begin]


def _unpack(kind: type, body: bytes) -> Message:
    try:
        head = _HEADS.get(kind)
        fields = [*head.unpack_from(body), body[head.size:]] if head else json.loads(body)
        if type(fields) is list and [type(field) for field in fields] == _TYPES[kind]:
            return kind(*fields)
        reason = f"expected {', '.join(type_.__name__ for type_ in _TYPES[kind]) or 'nothing'}"
    except (ValueError, RecursionError, struct.error) as error:
        reason = str(error)
    raise ValueError(f"no {kind.__name__}: {body[:40]!r} ({reason})")

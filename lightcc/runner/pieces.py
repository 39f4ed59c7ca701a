"""Results of ranks on other hosts, on their way from the agent's memory to the launcher's (exchange.py) in pieces
(messages.Piece). Each piece proves, before anything is done with it, that its sender knows the job's secret: what
arrives here is unpickled later, and not every launch command keeps strangers out as ssh does. The way of the function
to the agent needs no such proof: who can write there can have the agent run any command.
"""

import hmac
import os
import struct
import time
from collections import deque
from collections.abc import Iterator

from lightcc.runner import record
from lightcc.runner.exchange import Exchange
from lightcc.runner.messages import Ended, Message, Piece

PIECE_BYTES = 256 << 10  # small beside what may be pending, so that other messages do not wait for long
_PURPOSE = b"lightcc: a piece of a result of run()\n"  # the secret has other uses
_PROVEN = struct.Struct("!I?QQd")


def proven(piece: Piece, secret: str) -> Piece:
    """With its proof: HMAC-SHA256 (RFC 2104) over all there is in it, so that no piece stands for another."""
    head = _PROVEN.pack(piece.rank, piece.is_error, piece.begin, piece.size, piece.age_s)
    return piece._replace(proof=hmac.digest(secret.encode(), _PURPOSE + head + piece.chunk, "sha256"))


class Outbox:
    """The agent's: what its ranks have left, value or traceback, and after each the word that the rank has ended."""

    def __init__(self, exchange: Exchange, secret: str) -> None:
        self._exchange = exchange
        self._secret = secret
        self._waiting: deque[tuple[Ended, bool, Iterator[Piece]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ended: Ended) -> None:
        found = record.find(self._exchange.results[ended.rank])
        if found and found.is_error:  # the launcher waits for it to say what the cause was
            self._waiting.appendleft((ended, True, self._pieces(ended.rank, found)))
        else:
            wanted = found and ended.code == 0
            self._waiting.append((ended, False, self._pieces(ended.rank, found) if wanted else iter(())))

    def take(self) -> Message:
        """The next message."""
        ended, _, pieces = self._waiting[0]
        piece = next(pieces, None)
        if piece:
            return piece
        self._waiting.popleft()
        return self._gone(ended)

    def drop_value(self, rank: int) -> Iterator[Ended]:
        """Nobody wants it any more: the job has failed."""
        for entry in [entry for entry in self._waiting if entry[0].rank == rank and not entry[1]]:
            self._waiting.remove(entry)
            yield self._gone(entry[0])

    def _gone(self, ended: Ended) -> Ended:
        self._exchange.forget_result(ended.rank)
        return ended

    def _pieces(self, rank: int, found: record.Record) -> Iterator[Piece]:
        begin = 0
        while begin < found.size:
            chunk = os.pread(self._exchange.results[rank], min(PIECE_BYTES, found.size - begin),
                             record.BODY_AT + begin)
            if not chunk:  # somebody has cut it; the launcher will miss it
                return
            age_s = time.monotonic() - found.time_s
            yield proven(Piece(rank, found.is_error, begin, found.size, age_s, b"", chunk), self._secret)
            begin += len(chunk)


class Inbox:
    """The launcher's."""

    def __init__(self, exchange: Exchange, secret: str) -> None:
        self._exchange = exchange
        self._secret = secret
        self._have: dict[int, int] = {}  # rank -> bytes

    def put(self, piece: Piece) -> None:
        """Raises ValueError if it is not of this job or not the next one; then nothing has happened."""
        whose = f"a piece of rank {piece.rank}'s result"
        if not hmac.compare_digest(piece.proof, proven(piece, self._secret).proof):
            raise ValueError(f"{whose} does not prove that its sender knows this job's secret")
        have, end = self._have.get(piece.rank, 0), piece.begin + len(piece.chunk)
        if piece.begin != have or not piece.chunk or end > piece.size:
            raise ValueError(f"{whose}, bytes {piece.begin} to {end} of {piece.size}, is not what follows {have} bytes")
        fd = self._exchange.results[piece.rank]
        _write(fd, piece.chunk, record.BODY_AT + have)
        self._have[piece.rank] = end
        if end == piece.size:  # ages agree on all hosts, clocks do not
            record.seal(fd, record.Record(piece.is_error, time.monotonic() - piece.age_s, piece.size))


def _write(fd: int, chunk: bytes, begin: int) -> None:
    with memoryview(chunk) as rest:
        while rest:
            written = os.pwrite(fd, rest, begin)
            rest, begin = rest[written:], begin + written

"""Carries the results of ranks on other hosts from the agent's result files to the launcher's (run_files.py), in parts
(messages.ResultPart). Each part carries a message authentication code, which proves that its sender knows the job's
secret and is checked before anything else: results are unpickled later, and not every launch command lets only this
user's agent answer, as ssh does. The function needs no such code on its way to the agent: who can write to the agent
can have it run any command.
"""

import hmac
import os
import struct
import time
from collections import deque
from collections.abc import Iterator

from lightcc.launch import result_file
from lightcc.launch.messages import Ended, Message, ResultPart
from lightcc.launch.run_files import RunFiles

PART_BYTES = 256 << 10  # small beside what may be pending, so that other messages do not wait for long
_PURPOSE = b"lightcc: a piece of a result of run()\n"  # the secret has other uses
_AUTHENTICATED = struct.Struct("!I?QQd")


def authenticated(part: ResultPart, secret: str) -> ResultPart:
    """The part with its mac: HMAC-SHA256 (RFC 2104) over all other fields, so that no part passes for another."""
    head = _AUTHENTICATED.pack(part.rank, part.is_error, part.begin, part.size, part.age_s)
    return part._replace(mac=hmac.digest(secret.encode(), _PURPOSE + head + part.chunk, "sha256"))


class ResultSender:
    """The agent's end: sends what its ranks have left, value or traceback, and after each the rank's Ended."""

    def __init__(self, run_files: RunFiles, secret: str) -> None:
        self._run_files = run_files
        self._secret = secret
        self._waiting: deque[tuple[Ended, bool, Iterator[ResultPart]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, ended: Ended) -> None:
        found = result_file.read_header(self._run_files.results[ended.rank])
        if found and found.is_error:  # the launcher waits for it to name the cause
            self._waiting.appendleft((ended, True, self._parts(ended.rank, found)))
        else:
            parts = self._parts(ended.rank, found) if found and ended.code == 0 else iter(())
            self._waiting.append((ended, False, parts))

    def take(self) -> Message:
        """The next message."""
        ended, _, parts = self._waiting[0]
        part = next(parts, None)
        if part:
            return part
        self._waiting.popleft()
        return self._gone(ended)

    def drop_value(self, rank: int) -> Iterator[Ended]:
        """The job has failed, so the values of ranks are not needed any more."""
        for entry in [entry for entry in self._waiting if entry[0].rank == rank and not entry[1]]:
            self._waiting.remove(entry)
            yield self._gone(entry[0])

    def _gone(self, ended: Ended) -> Ended:
        self._run_files.close_result(ended.rank)
        return ended

    def _parts(self, rank: int, found: result_file.Header) -> Iterator[ResultPart]:
        begin = 0
        while begin < found.size:
            chunk = os.pread(self._run_files.results[rank], min(PART_BYTES, found.size - begin),
                             result_file.BODY_AT + begin)
            if not chunk:  # somebody has truncated the file; the launcher finds no whole result
                return
            age_s = time.monotonic() - found.time_s
            yield authenticated(ResultPart(rank, found.is_error, begin, found.size, age_s, b"", chunk), self._secret)
            begin += len(chunk)


class ResultReceiver:
    """The launcher's end."""

    def __init__(self, run_files: RunFiles, secret: str) -> None:
        self._run_files = run_files
        self._secret = secret
        self._have: dict[int, int] = {}  # rank -> bytes

    def put(self, part: ResultPart) -> None:
        """Raises ValueError if it is not of this job or not the next one; then nothing has happened."""
        whose = f"a part of rank {part.rank}'s result"
        if not hmac.compare_digest(part.mac, authenticated(part, self._secret).mac):
            raise ValueError(f"{whose} does not prove that its sender knows this job's secret")
        have, end = self._have.get(part.rank, 0), part.begin + len(part.chunk)
        if part.begin != have or not part.chunk or end > part.size:
            raise ValueError(f"{whose}, bytes {part.begin} to {end} of {part.size}, is not what follows {have} bytes")
        fd = self._run_files.results[part.rank]
        _write(fd, part.chunk, result_file.BODY_AT + have)
        self._have[part.rank] = end
        if end == part.size:  # ages agree on all hosts, clocks do not
            result_file.write_header(fd, result_file.Header(part.is_error, time.monotonic() - part.age_s, part.size))


def _write(fd: int, chunk: bytes, begin: int) -> None:
    with memoryview(chunk) as rest:
        while rest:
            written = os.pwrite(fd, rest, begin)
            rest, begin = rest[written:], begin + written

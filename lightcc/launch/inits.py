"""Decides whose init() can never succeed, because a rank that it waits for has ended. Pure: its input is what ranks say
of their inits and how ranks end, its output what ranks are told.

A rank tells by the socket whose number is in LIGHTCC_LAUNCHER_FD (csrc/api/launcher_channel.h), in lines: "begin NUMBER
RANKS" (all, or launched ranks as 0,2), "formed NUMBER", "left NUMBER". It is told "cancel NUMBER CAUSE". Ranks that
say nothing are no ranks of lightcc, and are told nothing.

The ranks of a world call init equally often. So an init waits in vain for a rank that has ended with no more inits of
these ranks behind it than whoever waits; a rank that had one more has met this one before it ended.
"""

import re
from collections import Counter
from typing import NamedTuple, Optional

VARIABLE = "LIGHTCC_LAUNCHER_FD"
MAX_BYTES = 1 << 20  # a longer line is none

_LINE = re.compile(r"(begin|formed|left) (\d+)(?: (all|\d+(?:,\d+)*))?")


class Cancel(NamedTuple):
    """What a rank is to be told."""

    rank: int
    number: str  # its init's
    ended: int   # the rank that it waits for in vain
    cause: str

    @property
    def chunk(self) -> bytes:
        return f"cancel {self.number} {self.cause}\n".encode()


class _Init(NamedTuple):
    number: str
    ranks: str  # as the rank has said it


class Inits:
    def __init__(self) -> None:
        self._pending: dict[int, bytes] = {}
        self._under_way: dict[int, _Init] = {}
        self._formed: Counter[tuple[int, str]] = Counter()  # by rank and the ranks of the world
        self._ends: dict[int, str] = {}  # of ranks, the first first

    def heard(self, rank: int, chunk: bytes) -> list[Cancel]:
        """What a rank says. What makes no sense is passed over: another program may have got hold of the socket."""
        *lines, rest = (self._pending.get(rank, b"") + chunk).split(b"\n")
        self._pending[rank] = rest[-MAX_BYTES:]
        return [cancel for line in lines if (cancel := self._heed(rank, line.decode(errors="replace")))]

    def ended(self, rank: int, how: str) -> list[Cancel]:
        """how: "rank 3 (pid 17) on host h1 exited with code 0"."""
        if rank in self._under_way:
            when = "during init()"
        else:
            when = "before it called init()" + (" again" if any(r == rank for r, _ in self._formed) else "")
        self._ends[rank] = f"{how} {when}, and the others wait for it there"
        return [cancel for other in sorted(self._under_way) if (cancel := self._in_vain(other, [rank]))]

    def _heed(self, rank: int, line: str) -> Optional[Cancel]:
        match = _LINE.fullmatch(line)
        if not match:
            return None
        what, number, ranks = match.groups()
        if what == "begin" and ranks:
            self._under_way[rank] = _Init(number, ranks)
            return self._in_vain(rank, list(self._ends))
        if what != "begin" and rank in self._under_way and self._under_way[rank].number == number:
            init = self._under_way.pop(rank)
            if what == "formed":
                self._formed[rank, init.ranks] += 1
        return None

    def _in_vain(self, waiting: int, ended: list[int]) -> Optional[Cancel]:
        init = self._under_way[waiting]
        members = None if init.ranks == "all" else {int(rank) for rank in init.ranks.split(",")}
        for rank in ended:
            is_member = rank != waiting and (members is None or rank in members)
            if is_member and self._formed[rank, init.ranks] <= self._formed[waiting, init.ranks]:
                return Cancel(waiting, init.number, rank, self._ends[rank])
        return None

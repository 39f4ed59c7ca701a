"""Decides what of the ranks' standard error is printed when, and which rank failed first. Pure: its input is lines,
ends of ranks and the time, its output the lines to print.

1. A line is printed as it comes, unless a traceback began before it: the traceback, and what the rank writes to
   standard error after it, is held, since the rank may be about to end. If the rank goes on, it is printed HOLD_S
   later, or MAX_UNLOAD_S later if another rank names this one as the cause; if it grows beyond HELD_BYTES, at once.
2. What ranks held when they failed is printed once all have ended, one rank after the other, the first failure last,
   where it is seen; but at the latest when SIGKILL has been sent. From then on nothing is held.
3. The first failure is not the first exit: a rank that raised tells the others as it leaves, and may be the last to be
   gone. So the time of a rank's failure is that of its last traceback, and a rank whose traceback names another rank
   as the cause comes after all that name none.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple, Optional

from lightcc.launch.termination import FAR_GRACE_S, TERM_GRACE_S

HOLD_S = 5.0           # frameworks take about a second to unload after a traceback, longer on a busy host
HELD_BYTES = 64 << 10  # of one rank
MAX_UNLOAD_S = 30.0    # a traceback that is older than this when its rank ends was not why

# Of Python, with what torch, rich and exception groups put around it; of faulthandler; of libstdc++.
_BEGIN = re.compile(rb"Traceback \(most recent call last\)|Fatal Python error: |terminate called ")
_NAMED = re.compile(rb"\brank (\d+) \(pid \d+\) on host ")  # as the core names a rank in an error
_LOG = b"[lightcc "  # begins lines of the core's log, which are no errors

OWN, SHARED, OF_ANOTHER = range(3)  # whose fault an error is: SHARED if it is the library's and names no rank


class Exit(NamedTuple):
    code: int     # as subprocess has it
    at: float
    by_us: bool   # it had been told to end


class Traceback(NamedTuple):
    """The last traceback of a rank: when it began, whose fault it says the failure is."""

    at: float
    blame: int
    named: frozenset[int] = frozenset()  # the ranks that it says are the cause

    def extended(self, rank: int, lines: bytes) -> "Traceback":
        """The same with these further lines of the rank."""
        lines = b"\n".join(line for line in lines.splitlines() if _LOG not in line)
        named = self.named | {int(number) for number in _NAMED.findall(lines)} - {rank}
        blame = OF_ANOTHER if named else SHARED if b"HorovodInternalError" in lines else self.blame
        return Traceback(self.at, blame, named)


def first_failure(ends: Mapping[int, Exit], tracebacks: Mapping[int, Traceback]) -> Optional[int]:
    """None if no rank failed by itself. If all that did blame another, it is the one they name that had raised by then
    and was still unloading when it was told to end, if there is one."""
    recent = {rank: said for rank, said in tracebacks.items()
              if rank in ends and ends[rank].at - said.at <= MAX_UNLOAD_S}
    failed = []
    for rank, end in ends.items():
        if end.code != 0 and not end.by_us:
            said = recent.get(rank, Traceback(end.at, OWN))
            # If two have ended at one look, a signal is the cause: peers of a dead rank exit with a code.
            failed.append((said.blame, said.at, end.code > 0, rank))
    if not failed:
        return None
    blamed, _, _, rank = min(failed)
    if blamed != OF_ANOTHER:
        return rank
    # Not when the others printed theirs: a busy launcher may read those first.
    began = min(ends[other].at for *_, other in failed)
    named = {culprit for *_, other in failed for culprit in tracebacks[other].named}
    unloading = [(tracebacks[other].at, other) for other in named & tracebacks.keys() & ends.keys()
                 if ends[other].by_us and tracebacks[other].blame == OWN and tracebacks[other].at <= began]
    return min(unloading)[1] if unloading else rank


class ErrorOutput:
    def __init__(self, term_grace_s: float = TERM_GRACE_S) -> None:
        self._ending_s = FAR_GRACE_S + term_grace_s  # from when the job begins to end to SIGKILL, at the latest
        self.ends: dict[int, Exit] = {}
        self._tracebacks: dict[int, Traceback] = {}
        self._held: dict[int, bytearray] = {}
        self._show_at: dict[int, float] = {}  # when the held lines of a rank are printed, if it has not failed by then
        self._all_at: Optional[float] = None  # when all held lines are printed

    def first_failure(self) -> Optional[int]:
        return first_failure(self.ends, self._tracebacks)

    def put(self, rank: int, lines: bytes, now: float) -> bytes:
        """Takes whole lines of a rank's standard error; returns those to print at once."""
        live = b""
        if rank not in self._held:
            begin = _BEGIN.search(lines)
            if not begin or (self._all_at is not None and now >= self._all_at):
                return lines
            cut = max(lines.rfind(end, 0, begin.start()) for end in (b"\n", b"\r")) + 1
            live, lines = lines[:cut], lines[cut:]
            self._held[rank], self._show_at[rank] = bytearray(), now + HOLD_S
            self._tracebacks[rank] = Traceback(now, OWN)
        self._held[rank] += lines
        self._tracebacks[rank] = self._tracebacks[rank].extended(rank, lines)
        return live + self._release(rank) if len(self._held[rank]) > HELD_BYTES else live

    def ended(self, rank: int, code: int, now: float, by_us: bool) -> None:
        self.ends[rank] = Exit(code, now, by_us)

    def ending(self, now: float) -> None:
        """The job has begun to end."""
        if self._all_at is None:
            self._all_at = now + self._ending_s

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """What is to be printed now, by rank."""
        if self._all_at is not None and now >= self._all_at:
            return self.rest()
        return [(rank, self._release(rank)) for rank in list(self._held) if self._due_at(rank) <= now]

    def wait_s(self, now: float) -> Optional[float]:
        """Time until something is due; None: nothing is held."""
        times = [self._due_at(rank) for rank in self._held]
        if not times:
            return None
        return max(0.0, min([*times, *([self._all_at] if self._all_at is not None else [])]) - now)

    def rest(self) -> list[tuple[int, bytes]]:
        """All that is held, the first failure last."""
        first = self.first_failure()
        ranks = sorted(self._held, key=lambda rank: (rank == first, -self._tracebacks[rank].blame, rank))
        return [(rank, self._release(rank)) for rank in ranks]

    def _due_at(self, rank: int) -> float:
        end = self.ends.get(rank)
        if end and end.code == 0:
            return end.at
        if end or self._all_at is not None:
            return math.inf  # with the others
        named = any(rank in said.named for said in self._tracebacks.values())  # then it is surely at its end
        return self._show_at[rank] + (MAX_UNLOAD_S - HOLD_S if named else 0)

    def _release(self, rank: int) -> bytes:
        del self._show_at[rank]
        return bytes(self._held.pop(rank))

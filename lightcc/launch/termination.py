"""Decides how a job ends. Pure: its input is exits, signals and the time, its output which signal the ranks get when.

The first failure is the cause and ends the job; later failures are its consequences. A rank that exits with 0 early
is no failure. How the job ends is a schedule of pairs (time, signal).
"""

import signal
from dataclasses import dataclass
from typing import NamedTuple, Optional

FAILURE_GRACE_S = 1.0  # the other ranks notice the loss themselves; their tracebacks are worth this wait
FAR_GRACE_S = 2.0      # on several hosts, where they need a second to be sure
TERM_GRACE_S = 5.0     # from the first signal to SIGKILL, unless the user says another time
GIVE_UP_S = 5.0        # from SIGKILL to "does not die"
LOST_CODE = 1          # of ranks that are lost with their host


class Cause(NamedTuple):
    """Why the job ended. rank is None when somebody interrupted the launcher; then code is minus the signal."""

    rank: Optional[int]
    code: int    # as subprocess has it: minus the number of the signal that killed it
    others: int  # ranks that still ran

    @property
    def exit_code(self) -> int:
        return exit_code(self.code)


@dataclass
class Outcome:
    """How a job ended."""

    cause: Optional[Cause]
    text: str  # one line an event: why the job ended and what was lost; "" if all went well
    failed_at: float = 0.0  # when the cause was seen, time.monotonic()

    @property
    def exit_code(self) -> int:
        return self.cause.exit_code if self.cause else 0


def exit_code(code: int) -> int:
    """The shell's convention: 128 + signal."""
    return code if code >= 0 else 128 - code


def signal_name(signum: int) -> str:
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def how_ended(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


class Termination:
    def __init__(self, num_ranks: int, grace_s: float = FAILURE_GRACE_S, term_grace_s: float = TERM_GRACE_S) -> None:
        """grace_s: from a failure to the first signal. term_grace_s: from the first signal to SIGKILL."""
        self.running = set(range(num_ranks))
        self.term_grace_s = term_grace_s
        self._grace_s = grace_s
        self.cause: Optional[Cause] = None
        self.killed: set[int] = set()  # ranks that were sent SIGKILL, since they had not ended
        self._schedule: list[tuple[float, Optional[int]]] = []

    def exited(self, codes: dict[int, int], now: float) -> None:
        """These ranks were found ended at one look, rank -> code."""
        others = len(self.running) - 1
        self.running -= codes.keys()
        failed = [(code > 0, rank) for rank, code in codes.items() if code != 0]
        if failed and self.cause is None:
            # If two have ended at one look, a signal is the cause: peers of a dead rank exit with a code.
            rank = min(failed)[1]
            self.cause = Cause(rank, codes[rank], others)
            self._plan(now + self._grace_s, signal.SIGTERM)

    def interrupted(self, signum: int, now: float, what: str = "rank") -> str:
        """The launcher got a signal. Ctrl-C while the job is ending already kills at once. Returns what to tell the
        user, if anything; what: what ranks are called."""
        count = f"{len(self.running)} {what}{'s' * (len(self.running) != 1)}"
        if self.cause is None:
            self.cause = Cause(None, -signum, len(self.running))
            # SIGINT becomes KeyboardInterrupt in Python; everything else is passed on as the polite request.
            self._plan(now, signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
            has = "has" if len(self.running) == 1 else "have"
            text = f"{count} {has} {self.term_grace_s:g} s to end; a second Ctrl-C kills at once"
        elif signum == signal.SIGINT:
            self._schedule = [(now, signal.SIGKILL), (now + GIVE_UP_S, None)]
            text = f"killing {count}"
        return text if signum == signal.SIGINT and self.running else ""

    def end(self, now: float) -> None:
        """The job is over, though ranks still run."""
        self._plan(now, signal.SIGTERM)

    def _plan(self, first: float, signum: int) -> None:
        kill_at = first + self.term_grace_s
        self._schedule = [(first, signum), (kill_at, signal.SIGKILL), (kill_at + GIVE_UP_S, None)]

    def due(self, now: float) -> list[Optional[int]]:
        """The signals to send to all running ranks now, each once; None: give up."""
        due = [signum for when, signum in self._schedule if when <= now]
        if signal.SIGKILL in due:
            self.killed |= self.running
        self._schedule = self._schedule[len(due):]
        return due

    def killed_text(self, what: str = "rank") -> str:
        """Names those that had to be killed, after what was ended."""
        numbers = ", ".join(map(str, sorted(self.killed)))
        return f"; killed {what}{'s' * (len(self.killed) > 1)} {numbers}, which did not end" if numbers else ""

    def wait_s(self, now: float) -> Optional[float]:
        """Time until something is due; None: nothing is planned."""
        return max(0.0, self._schedule[0][0] - now) if self._schedule else None

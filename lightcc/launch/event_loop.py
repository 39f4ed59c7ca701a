"""The loop of a launcher, for every kind of job: it waits for what ranks print, for how they end, for our own signals
and for whoever reads our output, and sends the signals that termination.py has due. What else there is to do, a Policy
says: the one of a job of fixed ranks (supervise.py) or of an elastic job (elastic/driver.py).
"""
import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional, Protocol

from lightcc.launch.local import StartError
from lightcc.launch.messages import Failed, Output, Over, Remark, Threads
from lightcc.launch.output import Sink
from lightcc.launch.own_signals import signals_as_bytes
from lightcc.launch.rank_outputs import RankOutputs, wait_for
from lightcc.launch.remote import Event
from lightcc.launch.termination import Cause, Termination, signal_name

CHECK_S = 1.0  # how often agents' silence is measured, and all else that no event tells of
FLUSH_S = 1.0  # after a failure, a reader that does not read for this long misses the rest


class Policy(Protocol):
    """What is particular to a kind of job."""

    def waits(self, now: float) -> Iterable[Optional[float]]:
        """The times until it has something to do of which no event tells; None: there is nothing."""

    def handle(self, events: Sequence[Event]) -> None:
        """The events of one look that concern its ranks."""

    def turn(self, now: float) -> None:
        """Whatever is due now."""

    def send(self, number: int, signum: int) -> None:
        """Sends a signal to a rank that runs."""

    def pace(self) -> Sequence[Sink]:
        """Reads on from the ranks or not; returns what is slow to take what it is told."""


class EventLoop:
    """The data of a key in the selector is a callable: it is called when its descriptor is ready, and returns events or
    None."""

    def __init__(self, policy: Policy, outputs: RankOutputs, termination: Termination, signals: Sequence[int],
                 stack: contextlib.ExitStack, process: Callable[[int], str], noun: str = "rank") -> None:
        """signals: those that end the job (main thread only). process: which one a rank is, "pid 17 on host h1"; noun:
        what ranks are called."""
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.stuck: list[str] = []  # processes that SIGKILL has not ended
        self._policy = policy
        self._outputs = outputs
        self._termination = termination
        self._process = process
        self._noun = noun
        self._signals = stack.enter_context(signals_as_bytes(signals))
        self.selector.register(self._signals, selectors.EVENT_READ, self._take_signals)

    def step(self, most_s: Optional[float] = None) -> None:
        """Waits until something happens, at most so long."""
        now = time.monotonic()
        waits = [most_s, self._termination.wait_s(now), *self._policy.waits(now)]
        events: list[Event] = []
        for key, _ in self.selector.select(min((wait for wait in waits if wait is not None), default=None)):
            events += key.data() or ()
        self.handle(events)
        now = time.monotonic()
        self._policy.turn(now)
        if self._outputs.unread and not self._termination.cause:
            self._termination.interrupted(signal.SIGPIPE, now)
        for signum in self._termination.due(now):
            self._send(signum)
        self.pace()

    def handle(self, events: Iterable[Event]) -> None:
        of_ranks: list[Event] = []
        for event in events:
            if isinstance(event, Output):
                self._outputs.put(*event)
            elif isinstance(event, Failed):
                raise StartError(event.text, event.exit_code)
            elif isinstance(event, Threads):
                self._outputs.say_once(event.text())
            elif isinstance(event, Remark):
                self._outputs.say(event.text)
            elif isinstance(event, Over):
                self.stuck += [f"pid {pid} on host {event.host}" for pid in event.stuck]
            else:
                of_ranks.append(event)
        if of_ranks:
            self._policy.handle(of_ranks)

    def pace(self) -> None:
        """Waits for slow sinks; has no more read from the ranks while too much is pending."""
        wait_for([*self._outputs.sinks, *self._policy.pace()], self.selector)

    def flush(self, failed: bool = False) -> None:
        """Waits for our readers, but not for ever once the job has failed or was interrupted."""
        self.pace()
        while any(before := self._outputs.pending):
            self.step(FLUSH_S)
            if (failed or self._termination.cause) and before == self._outputs.pending:
                return

    def report(self, cause: Optional[Cause]) -> Iterator[str]:
        """Why the job ended if that was not a rank's doing, a line each."""
        if cause and cause is self._termination.cause and cause.rank is None:
            how = ("nobody reads our output any more" if cause.code == -signal.SIGPIPE
                   else f"interrupted by {signal_name(-cause.code)}")
            ended = f"; ended {cause.others} {self._noun}{'s' * (cause.others != 1)}" if cause.others else ""
            yield how + ended + self._termination.killed_text(self._noun)

    def report_leftovers(self) -> Iterator[str]:
        """What could not be ended or written, a line each."""
        if self.stuck:
            yield f"did not end after SIGKILL, stuck in the kernel: {', '.join(dict.fromkeys(self.stuck))}"
        yield from self._outputs.errors()

    def _take_signals(self) -> None:
        for signum in self._signals.take():
            if text := self._termination.interrupted(signum, time.monotonic(), self._noun):
                self._outputs.say(text)

    def _send(self, signum: Optional[int]) -> None:
        for number in sorted(self._termination.running):
            if signum is None:
                self.stuck.append(self._process(number))
            else:
                self._policy.send(number, signum)

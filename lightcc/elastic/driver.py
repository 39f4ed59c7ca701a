"""The driver of an elastic job: one loop over the hosts that there are, what workers say and print, how they end, and
our own signals. It decides nothing itself: membership.py says what is to be done.
"""
import contextlib
import secrets
import selectors
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple, Optional, Union

from lightcc.core import elastic_messages
from lightcc.elastic.actions import Action, Cancel, Dismiss, Form, Notify, Start, State, Worker
from lightcc.elastic.discovery_thread import DiscoveryThread
from lightcc.elastic.limits import Limits
from lightcc.elastic.membership import Membership
from lightcc.elastic.worker_processes import WorkerProcesses
from lightcc.launch import network
from lightcc.launch.discovery import DiscoveryError, HostDiscovery
from lightcc.launch.hosts import Place
from lightcc.launch.local import Job, StartError, job_environment
from lightcc.launch.messages import Ended, Failed, NotStarted, Output, Over, Remark, Said, Started, Threads
from lightcc.launch.rank_outputs import RankOutputs, wait_for
from lightcc.launch.remote import Event, Lost
from lightcc.launch.supervise import LOST_CODE, Outcome, Signals, signals_as_bytes
from lightcc.launch.termination import FAILURE_GRACE_S, TERM_GRACE_S, Cause, Termination, signal_name

WORKER_TIMEOUT_S = 30.0
CHECK_S = 1.0  # how often workers are asked whether they live, and agents' silence is measured
PAUSE_S = 2.0  # if this process stood still for longer, silence of others says nothing


class WorkerEnd(NamedTuple):
    """How a worker has ended."""

    name: str  # worker 3 (pid 17 on host h1)
    code: int
    how: str   # exited with code 1
    dismissed: bool


@dataclass
class ElasticOutcome(Outcome):
    """And what run() needs to know of the workers."""

    ends: dict[int, WorkerEnd] = field(default_factory=dict)  # of all workers, by number
    members: list[int] = field(default_factory=list)          # those of the last epoch, by rank; [] if there was none


def drive(job: Job, limits: Limits, discovery: HostDiscovery, stdout: int, stderr: int, signals: Sequence[int] = (),
          worker_timeout_s: float = WORKER_TIMEOUT_S,
          is_here: Callable[[str], bool] = network.is_here) -> ElasticOutcome:
    """Runs the job, which has no places; returns when all its processes have ended. A worker that does not answer for
    worker_timeout_s is killed. is_here: whether a host is this one. The other arguments and errors are those of
    supervise(). DiscoveryError if the first discovery of hosts fails."""
    job = replace(job, talk_variable=elastic_messages.VARIABLE,
                  settings={**job.settings, **job_environment(), "HOROVOD_ELASTIC": "1"})
    with contextlib.ExitStack() as stack:
        outputs = RankOutputs([stdout, stderr], job.timestamps, job.output_dir, limits.num_proc, stack)
        thread = DiscoveryThread(discovery, is_here)
        stack.callback(thread.close)
        driver = _Driver(job, limits, thread, outputs, stack, worker_timeout_s)
        driver.take_signals(stack.enter_context(signals_as_bytes(signals)))
        return driver.run()


@dataclass
class _Talk:
    """With a worker."""

    unpacker: elastic_messages.Unpacker = field(default_factory=elastic_messages.Unpacker)
    answers: bool = False             # from its first word on, until it leaves
    leaves: bool = False              # its program has ended
    asked_at: Optional[float] = None  # whether it lives; not answered yet
    kill_at: Optional[float] = None   # it was told to end


class _Driver:
    def __init__(self, job: Job, limits: Limits, discovery: DiscoveryThread, outputs: RankOutputs,
                 stack: contextlib.ExitStack, worker_timeout_s: float) -> None:
        self.verbose = job.verbose
        self.outputs = outputs
        self.worker_timeout_s = worker_timeout_s
        # The data of a key is a callable: it is called when its descriptor is ready, and returns events or None.
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.discovery = discovery
        self.selector.register(discovery.fd, selectors.EVENT_READ, self._take_hosts)
        self.processes = WorkerProcesses(job, self.selector, stack)
        self.membership = Membership(limits)
        self.termination = Termination(0, FAILURE_GRACE_S)
        self.talks: dict[int, _Talk] = {}
        self.ends: dict[int, WorkerEnd] = {}
        self.has_hosts = False  # some were found, or that there are none
        self.stuck: list[str] = []
        self.told_at = 0  # of the last news of hosts
        self.next_check = self.last_step = time.monotonic()

    def take_signals(self, signals: Signals) -> None:
        def take() -> None:
            for signum in signals.take():
                if text := self.termination.interrupted(signum, time.monotonic(), "worker"):
                    self.outputs.say(text)

        self.selector.register(signals, selectors.EVENT_READ, take)

    def run(self) -> ElasticOutcome:
        while not (self.membership.over or self.termination.cause or self.stuck):
            self._step()
        if not self.termination.cause:
            self.termination.end(time.monotonic())
        while self.termination.running and not self.stuck:
            self._step()
        self._end()
        cause = self._cause()
        return ElasticOutcome(cause, "\n".join(self._report(cause)), ends=self.ends,
                              members=[worker.number for worker in self.membership.members])

    # What happens.

    def _step(self) -> None:
        now = time.monotonic()
        waits = (None if self.termination.cause else self.membership.wait_s(now), self.termination.wait_s(now),
                 self.processes.wait_s(), max(0.0, self.next_check - now))
        events: list[Event] = []
        for key, _ in self.selector.select(min(wait for wait in waits if wait is not None)):
            events += key.data() or ()
        now = time.monotonic()
        self._handle(events)
        self._handle(self.processes.step(now, self.membership.awaited_hosts()))
        if self.outputs.unread and not self.termination.cause:
            self.termination.interrupted(signal.SIGPIPE, now)
        for action in self.membership.due(now) if not self.termination.cause else ():
            self._perform(action, now)
        self._send_signals(now)
        if now >= self.next_check:
            self._check(now)
            self.next_check = now + CHECK_S
        slow = self.processes.pace(pause=self.outputs.too_much_pending)
        wait_for([*self.outputs.sinks, *slow], self.selector)
        self.last_step = now

    def _handle(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self.outputs.put(*event)
            elif isinstance(event, Said):
                self._hear(event)
            elif isinstance(event, Started):
                self.processes.started(event)
                if self.verbose:
                    self.outputs.say(f"worker {event.rank} is {self.processes.described(event.rank)}")
            elif isinstance(event, NotStarted):
                self._ended(event.rank, event.exit_code or LOST_CODE, f"was not started: {event.text}")
            elif isinstance(event, Ended):
                self._ended(event.rank, event.code, _how(event.code))
            elif isinstance(event, Lost):
                self.processes.lost(event.host)
                self.outputs.say(f"lost host {event.host}: {event.text}")
                for number in self.processes.on_host(event.host):
                    self._ended(number, LOST_CODE, "was lost with its host", event.text)
            elif isinstance(event, Failed):
                raise StartError(event.text, event.exit_code)
            elif isinstance(event, Threads):
                self.outputs.say_once(event.text())
            elif isinstance(event, Remark):
                self.outputs.say(event.text)
            elif isinstance(event, Over):
                self.stuck += [f"pid {pid} on host {event.host}" for pid in event.stuck]

    def _take_hosts(self) -> None:
        hosts, error = self.discovery.take()
        if error and not self.has_hosts:
            raise DiscoveryError(error)
        if error:
            self.outputs.say(f"{error}; the hosts are those found before")
        if hosts is not None:
            self.has_hosts = True
            self.membership.found(hosts, {host.name for host in hosts if self.discovery.is_here(host.name)})

    def _hear(self, said: Said) -> None:
        talk = self.talks[said.rank]
        talk.answers, talk.asked_at = not talk.leaves, None
        try:
            for message in talk.unpacker.feed(said.chunk):
                self._heed(said.rank, message)
        except ValueError as error:
            self.outputs.say(f"{self._named(said.rank)} is killed: on its socket to the driver was {error}")
            self.processes.send(said.rank, signal.SIGKILL)

    def _heed(self, number: int, message: dict[str, Any]) -> None:
        what, epoch = message["what"], message.get("epoch", self.membership.epoch)
        if epoch != self.membership.epoch:  # it has been overtaken
            return
        if what == "waiting":
            self.membership.waiting(number)
        elif what == "joined":
            self.membership.joined(number)
        elif what == "timed_out":
            self.membership.timed_out(number, message["apart"])
            if self.membership.workers[number].apart:
                self.outputs.say(f"{self._named(number)} cannot reach {self._named(self.membership.members[0].number)}")
        elif what == "synced":
            self.membership.synced(number)
        elif what == "leaving":
            self.talks[number].answers, self.talks[number].leaves = False, True
        elif what == "meeting":
            for worker in self.membership.members[1:]:
                self._tell(worker.number, "meet", epoch=epoch, where=message["where"])

    def _ended(self, number: int, code: int, how: str, why: str = "") -> None:
        if number not in self.termination.running:
            return
        self.termination.running.discard(number)
        self.processes.send(number, signal.SIGTERM)  # to what it has left running
        name, dismissed = self._named(number), self.membership.workers[number].dismissed
        self.ends[number] = WorkerEnd(name, code, f"{how}: {why}" if why else how, dismissed)
        if code != 0 and not dismissed and not self.termination.cause:
            self.outputs.say(f"{name} {how}")
        self.membership.exited(number, code, f"{name} {how}", time.monotonic())

    # What is done.

    def _perform(self, action: Action, now: float) -> None:
        if isinstance(action, Start):
            self._start(action.worker, now)
        elif isinstance(action, Dismiss):
            self._dismiss(action.worker, now)
        elif isinstance(action, Form):
            self._form(action)
        elif isinstance(action, Cancel):
            for worker in action.members:
                self._tell(worker.number, "cancel", epoch=action.epoch, cause=action.cause)
        elif isinstance(action, Notify):
            # Microseconds, which a double holds exactly. It only grows, whatever is done to the clock.
            self.told_at = max(self.told_at + 1, time.time_ns() // 1000)
            self._tell(action.worker.number, "hosts_updated", timestamp=self.told_at, result=action.result)

    def _start(self, worker: Worker, now: float) -> None:
        place = Place(worker.host, self.discovery.is_here(worker.host), worker.number,
                      max(self.membership.limits.num_proc, worker.number + 1), worker.local_rank,
                      *self.membership.surroundings(worker.host))
        self.talks[worker.number] = _Talk()
        self.termination.running.add(worker.number)
        self.outputs.add(worker.number)
        self._handle(self.processes.start(place, now))

    def _dismiss(self, worker: Worker, now: float) -> None:
        if not self.processes.is_started(worker.number):
            self._drop(worker.number)
        elif worker.state is State.WAITING:
            self._tell(worker.number, "dismiss")
            first = next((end for end in self.ends.values() if end.code == 0 and not end.dismissed), None)
            if first and not self.membership.epoch:  # else it may have done what was to be done
                self.outputs.say_once(f"{first.name} {first.how} before it had met the others in init(): the job is "
                                      "over, and those who wait there are dismissed")
        else:
            self.processes.send(worker.number, signal.SIGTERM)
        self.talks[worker.number].kill_at = now + TERM_GRACE_S

    def _drop(self, number: int) -> None:
        self.processes.drop(number)
        self._ended(number, 0, "was not started")

    def _form(self, action: Form) -> None:
        job, secret = secrets.token_hex(16), secrets.token_hex(32)
        size = len(action.members)
        for rank, worker in enumerate(action.members):
            self._tell(worker.number, "form", epoch=action.epoch, rank=rank, size=size, job=job, secret=secret)
        if action.epoch > 1 or self.verbose:
            hosts = ", ".join(dict.fromkeys(worker.host for worker in action.members))
            self.outputs.say(f"epoch {action.epoch}: {size} worker{'s' * (size != 1)} on {hosts}")

    def _check(self, now: float) -> None:
        """Says what the job waits for; asks workers whether they live, and kills those that do not answer or end."""
        stood_still = now - self.last_step > PAUSE_S
        if not self.termination.cause and (remark := self.membership.remark(now)):
            self.outputs.say(remark)
        for number in sorted(self.termination.running):
            talk = self.talks[number]
            if stood_still:
                talk.asked_at = None
            if talk.kill_at is not None:
                if now >= talk.kill_at:
                    self.processes.send(number, signal.SIGKILL)
            elif talk.asked_at is not None and now - talk.asked_at > self.worker_timeout_s:
                self.outputs.say(f"{self._named(number)} has not answered for {self.worker_timeout_s:g} s "
                                 "(--worker-timeout); it is killed")
                talk.kill_at = now
                self.processes.send(number, signal.SIGKILL)
            elif talk.answers and talk.asked_at is None:
                talk.asked_at = now
                self._tell(number, "ping")

    def _tell(self, number: int, what: str, **fields: Union[int, str]) -> None:
        if number in self.termination.running:
            self.processes.tell(number, elastic_messages.pack(what, **fields))

    def _send_signals(self, now: float) -> None:
        for signum in self.termination.due(now):
            for number in sorted(self.termination.running):
                if not self.processes.is_started(number):
                    self._drop(number)
                elif signum is None:
                    self.stuck.append(self.processes.described(number))
                else:
                    self.processes.send(number, signum)

    # The end.

    def _end(self) -> None:
        self._handle(self.processes.end())
        while not self.processes.is_over:
            self._step()
        self.outputs.finish()
        while any(before := self.outputs.pending):
            self._step()
            if before == self.outputs.pending:  # nobody has read for CHECK_S
                return

    def _cause(self) -> Optional[Cause]:
        end = self.membership.over
        if self.termination.cause or end is None or not end.text:
            return self.termination.cause
        return Cause(end.failure.worker.number, end.failure.code, 0) if end.failure else Cause(None, 1, 0)

    def _report(self, cause: Optional[Cause]) -> Iterator[str]:
        if cause and cause is self.termination.cause:
            yield ("nobody reads our output any more" if cause.code == -signal.SIGPIPE
                   else f"interrupted by {signal_name(-cause.code)}") \
                + (f"; ended {cause.others} worker{'s' * (cause.others != 1)}" if cause.others else "") \
                + self.termination.killed_text("worker")
        elif cause:
            first = self.ends.get(cause.rank)
            yield self.membership.over.text + (f"; the first: {first.name} {first.how}" if first else "")
        if self.stuck:
            yield f"did not end after SIGKILL, stuck in the kernel: {', '.join(dict.fromkeys(self.stuck))}"
        yield from self.outputs.errors()

    def _named(self, number: int) -> str:
        return f"worker {number} ({self.processes.described(number)})"


def _how(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"

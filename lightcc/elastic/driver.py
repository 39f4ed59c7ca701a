"""The driver of an elastic job: what the launcher's loop (event_loop.py) does for one. It hears which hosts there are,
what workers say and how they end, and carries out what membership.py decides.
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
from lightcc.launch.event_loop import CHECK_S, EventLoop
from lightcc.launch.hosts import Place
from lightcc.launch.local import Job, job_environment
from lightcc.launch.messages import Ended, NotStarted, Said, Started
from lightcc.launch.output import Sink
from lightcc.launch.rank_outputs import RankOutputs
from lightcc.launch.remote import Event, Lost
from lightcc.launch.termination import FAILURE_GRACE_S, LOST_CODE, Cause, Outcome, Termination, how_ended

WORKER_TIMEOUT_S = 30.0
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
        return _ElasticJob(job, limits, thread, outputs, signals, stack, worker_timeout_s).run()


@dataclass
class _WorkerChannel:
    """The socket to a worker."""

    unpacker: elastic_messages.Unpacker = field(default_factory=elastic_messages.Unpacker)
    answers: bool = False             # from its first word on, until it leaves
    leaves: bool = False              # its program has ended
    asked_at: Optional[float] = None  # whether it lives; not answered yet
    kill_at: Optional[float] = None   # it was told to end


class _ElasticJob:
    """The policy of the event loop."""

    def __init__(self, job: Job, limits: Limits, discovery: DiscoveryThread, outputs: RankOutputs,
                 signals: Sequence[int], stack: contextlib.ExitStack, worker_timeout_s: float) -> None:
        self.verbose = job.verbose
        self.outputs = outputs
        self.worker_timeout_s = worker_timeout_s
        self.discovery = discovery
        self.termination = Termination(0, FAILURE_GRACE_S, job.term_grace_s)
        self.loop = EventLoop(self, outputs, self.termination, signals, stack, self._process, "worker")
        self.loop.selector.register(discovery.fd, selectors.EVENT_READ, self._take_hosts)
        self.processes = WorkerProcesses(job, self.loop.selector, stack)
        self.membership = Membership(limits)
        self.channels: dict[int, _WorkerChannel] = {}
        self.ends: dict[int, WorkerEnd] = {}
        self.has_hosts = False  # some were found, or that there are none
        self.told_at = 0  # of the last news of hosts
        self.next_check = self.last_turn = time.monotonic()

    def run(self) -> ElasticOutcome:
        while not (self.membership.over or self.termination.cause or self.loop.stuck):
            self.loop.step()
        if not self.termination.cause:
            self.termination.end(time.monotonic())
        while self.termination.running and not self.loop.stuck:
            self.loop.step()
        cause = self._cause()
        self._end(failed=cause is not None)
        return ElasticOutcome(cause, "\n".join(self._report(cause)), ends=self.ends,
                              members=[worker.number for worker in self.membership.members])

    # What the loop asks for.

    def waits(self, now: float) -> Iterable[Optional[float]]:
        return (None if self.termination.cause else self.membership.wait_s(now), self.processes.wait_s(),
                max(0.0, self.next_check - now))

    def turn(self, now: float) -> None:
        self.loop.handle(self.processes.step(now, self.membership.awaited_hosts()))
        for action in self.membership.due(now) if not self.termination.cause else ():
            self._perform(action, now)
        if now >= self.next_check:
            self._check(now)
            self.next_check = now + CHECK_S
        self.last_turn = now

    def send(self, number: int, signum: int) -> None:
        if self.processes.is_started(number):
            self.processes.send(number, signum)
        else:
            self._drop(number)

    def pace(self) -> Sequence[Sink]:
        return self.processes.pace(pause=self.outputs.too_much_pending)

    def handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Said):
                self._on_bytes(event)
            elif isinstance(event, Started):
                self.processes.started(event)
                if self.verbose:
                    self.outputs.say(f"worker {event.rank} is {self._process(event.rank)}")
            elif isinstance(event, NotStarted):
                self._ended(event.rank, event.exit_code or LOST_CODE, f"was not started: {event.text}")
            elif isinstance(event, Ended):
                self._ended(event.rank, event.code, how_ended(event.code))
            elif isinstance(event, Lost):
                self.processes.lost(event.host)
                self.outputs.say(f"lost host {event.host}: {event.text}")
                for number in self.processes.on_host(event.host):
                    self._ended(number, LOST_CODE, "was lost with its host", event.text)

    # What happens.

    def _take_hosts(self) -> None:
        hosts, error = self.discovery.take()
        if error and not self.has_hosts:
            raise DiscoveryError(error)
        if error:
            self.outputs.say(f"{error}; the hosts are those found before")
        if hosts is not None:
            self.has_hosts = True
            self.membership.found(hosts, {host.name for host in hosts if self.discovery.is_here(host.name)})

    def _on_bytes(self, said: Said) -> None:
        channel = self.channels[said.rank]
        channel.answers, channel.asked_at = not channel.leaves, None
        try:
            for message in channel.unpacker.feed(said.chunk):
                self._on_message(said.rank, message)
        except ValueError as error:
            self.outputs.say(f"{self._named(said.rank)} is killed: on its socket to the driver was {error}")
            self.processes.send(said.rank, signal.SIGKILL)

    def _on_message(self, number: int, message: dict[str, Any]) -> None:
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
            self.channels[number].answers, self.channels[number].leaves = False, True
        elif what == "meeting":
            for worker in self.membership.members[1:]:
                self._send(worker.number, "meet", epoch=epoch, where=message["where"])

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
                self._send(worker.number, "cancel", epoch=action.epoch, cause=action.cause)
        elif isinstance(action, Notify):
            # Microseconds, which a double holds exactly. It only grows, whatever is done to the clock.
            self.told_at = max(self.told_at + 1, time.time_ns() // 1000)
            self._send(action.worker.number, "hosts_updated", timestamp=self.told_at, result=action.result,
                       leaving=list(action.leaving))

    def _start(self, worker: Worker, now: float) -> None:
        place = Place(worker.host, self.discovery.is_here(worker.host), worker.number,
                      max(self.membership.limits.num_proc, worker.number + 1), worker.local_rank,
                      *self.membership.surroundings(worker.host))
        self.channels[worker.number] = _WorkerChannel()
        self.termination.running.add(worker.number)
        self.outputs.add(worker.number)
        self.loop.handle(self.processes.start(place, now))

    def _dismiss(self, worker: Worker, now: float) -> None:
        if not self.processes.is_started(worker.number):
            self._drop(worker.number)
        elif worker.state is State.WAITING:
            self._send(worker.number, "dismiss")
            first = next((end for end in self.ends.values() if end.code == 0 and not end.dismissed), None)
            if first and not self.membership.epoch:  # else it may have done what was to be done
                self.outputs.say_once(f"{first.name} {first.how} before it had met the others in init(): the job is "
                                      "over, and those who wait there are dismissed")
        else:
            self.processes.send(worker.number, signal.SIGTERM)
        self.channels[worker.number].kill_at = now + self.termination.term_grace_s

    def _drop(self, number: int) -> None:
        self.processes.drop(number)
        self._ended(number, 0, "was not started")

    def _form(self, action: Form) -> None:
        job, secret = secrets.token_hex(16), secrets.token_hex(32)
        size = len(action.members)
        for rank, worker in enumerate(action.members):
            self._send(worker.number, "form", epoch=action.epoch, rank=rank, size=size, job=job, secret=secret)
        if action.epoch > 1 or self.verbose:
            hosts = ", ".join(dict.fromkeys(worker.host for worker in action.members))
            self.outputs.say(f"epoch {action.epoch}: {size} worker{'s' * (size != 1)} on {hosts}")

    def _check(self, now: float) -> None:
        """Says what the job waits for; asks workers whether they live, and kills those that do not answer or end."""
        stood_still = now - self.last_turn > PAUSE_S
        if not self.termination.cause and (remark := self.membership.remark(now)):
            self.outputs.say(remark)
        for number in sorted(self.termination.running):
            channel = self.channels[number]
            if stood_still:
                channel.asked_at = None
            if channel.kill_at is not None:
                if now >= channel.kill_at:
                    self.processes.send(number, signal.SIGKILL)
            elif channel.asked_at is not None and now - channel.asked_at > self.worker_timeout_s:
                self.outputs.say(f"{self._named(number)} has not answered for {self.worker_timeout_s:g} s "
                                 "(--worker-timeout); it is killed")
                channel.kill_at = now
                self.processes.send(number, signal.SIGKILL)
            elif channel.answers and channel.asked_at is None:
                channel.asked_at = now
                self._send(number, "ping")

    def _send(self, number: int, what: str, **fields: Union[int, str, list[int]]) -> None:
        if number in self.termination.running:
            self.processes.tell(number, elastic_messages.pack(what, **fields))

    # The end.

    def _end(self, failed: bool) -> None:
        self.loop.handle(self.processes.end())
        while not self.processes.is_over:
            self.loop.step()
        self.outputs.finish()
        self.loop.flush(failed)

    def _cause(self) -> Optional[Cause]:
        end = self.membership.over
        if self.termination.cause or end is None or not end.text:
            return self.termination.cause
        return Cause(end.failure.worker.number, end.failure.code, 0) if end.failure else Cause(None, 1, 0)

    def _report(self, cause: Optional[Cause]) -> Iterator[str]:
        yield from self.loop.report(cause)
        end = self.membership.over
        if cause and end and cause is not self.termination.cause:
            first = None if cause.rank is None else self.ends.get(cause.rank)
            yield end.text + (f"; the first: {first.name} {first.how}" if first else "")
        yield from self.loop.report_leftovers()

    def _named(self, number: int) -> str:
        return f"worker {number} ({self._process(number)})"

    def _process(self, number: int) -> str:
        return self.processes.described(number)

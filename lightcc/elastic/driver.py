"""Runs an elastic job from its first worker to its last byte: one loop over the hosts that there are, what workers say,
print and how they end, and our own signals. It decides nothing itself: membership.py says what is to be done.

A worker is a rank to the runner (host_ranks.py, remote.py): its number there is the worker's, and stays as it is while
its rank changes from epoch to epoch.
"""
import contextlib
import os
import secrets
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional, Union

from lightcc.elastic import messages
from lightcc.elastic.discovery_thread import DiscoveryThread
from lightcc.elastic.membership import (
    Action,
    Cancel,
    Dismiss,
    End,
    Form,
    Limits,
    Membership,
    Notify,
    Start,
    State,
    Worker,
)
from lightcc.runner import network
from lightcc.runner.elastic.discovery import DiscoveryError, HostDiscovery
from lightcc.runner.host_ranks import HostRanks
from lightcc.runner.hosts import Host, Place
from lightcc.runner.local import Job, StartError, rank_starter, with_threads
from lightcc.runner.messages import Ended, Failed, Output, Over, Remark, Said, Started, Threads
from lightcc.runner.rank_outputs import RankOutputs, wait_for
from lightcc.runner.remote import Agent, Event, Lost, forwarded
from lightcc.runner.supervise import Outcome, signals_as_bytes
from lightcc.runner.termination import FAILURE_GRACE_S, Cause, Termination, signal_name

CHECK_S = 1.0     # how often workers are asked whether they live, and agents' silence is measured
WORKER_TIMEOUT_S = 30.0
PAUSE_S = 2.0     # if this process stood still for longer, silence of others says nothing
LOST_CODE = 1     # of workers that are lost with their host
KILL_S = 5.0      # from asking a worker to end to SIGKILL


@dataclass
class _Peer:
    """What the driver knows of a worker's process."""

    place: Place
    pid: Optional[int] = None
    unpacker: messages.Unpacker = field(default_factory=messages.Unpacker)
    asked_at: Optional[float] = None  # whether it lives; not answered yet
    speaks: bool = False
    kill_at: Optional[float] = None   # if it was asked to end


class _RemoteHost:
    """A host that is not this one: its agent, and the workers that are to be started there once it has answered."""

    def __init__(self, agent: Agent, answer_by: float) -> None:
        self.agent, self.answer_by = agent, answer_by
        self.begun = False
        self.waiting: list[Place] = []


def drive(job: Job, limits: Limits, discovery: HostDiscovery, stdout: int, stderr: int,
          signals: Sequence[int] = (), worker_timeout_s: float = WORKER_TIMEOUT_S) -> Outcome:
    """Runs the job, which has no places; returns when all its processes have ended. A worker that does not answer for
    worker_timeout_s is killed. The other arguments and errors are those of supervise(). DiscoveryError if the first
    discovery of hosts fails."""
    with contextlib.ExitStack() as stack:
        outputs = RankOutputs([stdout, stderr], job.timestamps, job.output_dir, limits.num_proc, stack)
        thread = DiscoveryThread(discovery)
        stack.callback(thread.close)
        driver = _Driver(job, limits, thread, outputs, stack, worker_timeout_s)
        driver.take_signals(stack.enter_context(signals_as_bytes(signals)))
        return driver.run()


class _Driver:
    def __init__(self, job: Job, limits: Limits, discovery: DiscoveryThread, outputs: RankOutputs,
                 stack: contextlib.ExitStack, worker_timeout_s: float) -> None:
        self.job = job
        self.stack = stack
        self.outputs = outputs
        self.worker_timeout_s = worker_timeout_s
        self.membership = Membership(limits)
        self.termination = Termination(0, FAILURE_GRACE_S)
        self.peers: dict[int, _Peer] = {}
        self.here: Optional[HostRanks] = None
        self.remote: dict[str, _RemoteHost] = {}
        self.slots: dict[str, int] = {}        # of the hosts found last
        self.discovered = False
        self.stuck: list[str] = []
        self.threads: set[Threads] = set()
        self.cause: Optional[Cause] = None
        self.cause_text = ""
        self.next_check = self.last_step = time.monotonic()
        # The data of a key is a callable: it is called when its descriptor is ready, and returns events or None.
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.discovery = discovery
        self.selector.register(discovery.fd, selectors.EVENT_READ, self._take_hosts)

    def take_signals(self, signals: socket.socket) -> None:
        def take() -> None:
            for signum in signals.recv(4096):
                self.termination.interrupted(signum, time.monotonic())

        self.selector.register(signals, selectors.EVENT_READ, take)

    def run(self) -> Outcome:
        while not (self.membership.over or self.termination.cause or self.stuck):
            self._step()
        if self.membership.over and not self.termination.cause:
            self._conclude(self.membership.over)
        while self.termination.running and not self.stuck:
            self._step()
        self._end()
        return self._outcome()

    # What happens.

    def _step(self) -> None:
        now = time.monotonic()
        waits = (self.membership.wait_s(now), self.termination.wait_s(now), max(0.0, self.next_check - now))
        events: list[Event] = []
        for key, _ in self.selector.select(min(wait for wait in waits if wait is not None)):
            events += key.data() or ()
        now = time.monotonic()
        for host in self.remote.values():
            events += host.agent.check(now)
        self._handle(events)
        self._begin_on_hosts(now)
        if self.outputs.unread and not self.termination.cause:
            self.termination.interrupted(signal.SIGPIPE, now)
        if not self.termination.cause:
            for action in self.membership.due(now):
                self._perform(action, now)
        self._signal(now)
        if now >= self.next_check:
            self._check(now)
            self.next_check = now + CHECK_S
        self._pace()
        self.last_step = now

    def _handle(self, events: Iterable[Event]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, Output):
                self.outputs.put(*event)
            elif isinstance(event, Said):
                self._hear(event)
            elif isinstance(event, Started):
                self.peers[event.rank].pid = event.pid
                if self.job.verbose:
                    self.outputs.say(f"worker {event.rank} is {self._process(event.rank)}")
            elif isinstance(event, Ended):
                self._ended(event.rank, event.code, _how(event.code), now)
            elif isinstance(event, Lost):
                self._lost(event, now)
            elif isinstance(event, Failed):
                raise StartError(event.text, event.exit_code)
            elif isinstance(event, Threads):
                if event not in self.threads:  # once for hosts of one kind
                    self.threads.add(event)
                    self.outputs.say(f"OMP_NUM_THREADS is not set; it is {event.each} for each worker: {event.cores} "
                                     f"cores for {event.ranks} slots of a host")
            elif isinstance(event, Remark):
                self.outputs.say(event.text)
            elif isinstance(event, Over):
                self.stuck += [f"pid {pid} on host {event.host}" for pid in event.stuck]

    def _take_hosts(self) -> None:
        hosts, error = self.discovery.take()
        if error and not self.discovered:
            raise DiscoveryError(error)
        if error:
            self.outputs.say(f"{error}; the hosts are those found before")
        if hosts is not None:
            self.discovered = True
            self.slots = {host.name: host.slots for host in hosts}
            self.membership.found([Host(*host) for host in hosts])

    def _hear(self, said: Said) -> None:
        peer = self.peers[said.rank]
        peer.speaks = True
        try:
            for message in peer.unpacker.feed(said.chunk):
                self._heed(said.rank, peer, message)
        except ValueError as error:
            self.outputs.say(f"{self._named(said.rank)} is killed: on its socket to the driver was {error}")
            self._host(said.rank).send(said.rank, signal.SIGKILL)

    def _heed(self, number: int, peer: _Peer, message: dict) -> None:
        peer.asked_at = None
        what, epoch = message["what"], message.get("epoch", self.membership.epoch)
        if epoch != self.membership.epoch:  # it has been overtaken
            return
        if what == "waiting":
            self.membership.waiting(number)
        elif what == "joined":
            self.membership.joined(number)
        elif what == "synced":
            self.membership.synced(number)
        elif what == "leaving":
            peer.speaks = False
        elif what == "meeting":
            for worker in self.membership.members[1:]:
                self._tell(worker.number, "meet", epoch=epoch, where=message["where"])

    def _ended(self, number: int, code: int, how: str, now: float) -> None:
        if number not in self.termination.running:
            return
        self.termination.running.discard(number)
        worker = self.membership.workers[number]
        if self.peers[number].pid is not None:
            self._host(number).send(number, signal.SIGTERM)  # what it has left running
        if code != 0 and not worker.dismissed and not self.termination.cause:
            self.outputs.say(f"{self._named(number)} {how}")
        self.membership.exited(number, code, f"{self._named(number)} {how}", now)

    def _lost(self, event: Lost, now: float) -> None:
        self.remote.pop(event.host, None)
        self.outputs.say(f"lost host {event.host}: {event.text}")
        for number in sorted(self.termination.running):
            place = self.peers[number].place
            if place.host == event.host and not place.here:
                self._ended(number, LOST_CODE, "was lost with its host", now)

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
            self._tell(action.worker.number, "hosts_updated", timestamp=time.time_ns(), result=action.result)

    def _start(self, worker: Worker, now: float) -> None:
        names = list(self.slots)
        here = network.is_here(worker.host)
        place = Place(worker.host, here, worker.number, max(self.membership.limits.num_proc, worker.number + 1),
                      worker.slot, self.slots[worker.host], names.index(worker.host), len(names))
        self.peers[worker.number] = _Peer(place)
        self.termination.running.add(worker.number)
        self.outputs.add(worker.number)
        if here:
            self._start_here(place)
        else:
            self._agent(worker.host, now).waiting.append(place)

    def _start_here(self, place: Place) -> None:
        if self.here is None:
            job, remarks = with_threads(replace(self.job, slots=place.local_size))
            self._start_rank = self.stack.enter_context(rank_starter(job))
            pipes = self.stack.enter_context(selectors.DefaultSelector())
            self.here = HostRanks(socket.gethostname(), [], self.selector, pipes)
            self._handle(remarks)
        try:
            rank = self._start_rank(place)
        except StartError as error:
            self.outputs.say(str(error))
            self._ended(place.rank, error.exit_code, "could not be started", time.monotonic())
            return
        self.here.add(rank)
        self._handle([Started(rank.number, rank.pid)])

    def _agent(self, host: str, now: float) -> _RemoteHost:
        if host not in self.remote:
            command = self.job.agent_command(host)
            if self.job.verbose:
                self.outputs.say(f"host {host}: {shlex.join(command)}")
            agent = Agent(host, [], command, self.selector)
            self.stack.callback(_disconnect, agent)
            self.remote[host] = _RemoteHost(agent, now + self.job.start_timeout_s)
        return self.remote[host]

    def _begin_on_hosts(self, now: float) -> None:
        late = [host for host in self.remote.values() if not host.agent.ready and now >= host.answer_by]
        for host in late:
            lines = host.agent.last_lines()
            host.agent.disconnect()
            self._lost(Lost(host.agent.host, f"no answer within {self.job.start_timeout_s:g} s (--start-timeout)"
                            + (f"; {lines}" if lines else "")), now)
        for host in self.remote.values():
            if host.agent.ready and host.waiting:
                if not host.begun:
                    host.begun = True
                    host.agent.begin(self.job.command(0), {**forwarded(os.environ), **self.job.settings},
                                     self.job.talk_variable, host.waiting[0].local_size)
                for place in host.waiting:
                    host.agent.start_rank(place)
                host.waiting = []

    def _form(self, action: Form) -> None:
        job, secret = secrets.token_hex(16), secrets.token_hex(32)
        size = len(action.members)
        for rank, worker in enumerate(action.members):
            self._tell(worker.number, "form", epoch=action.epoch, rank=rank, size=size, job=job, secret=secret)
        if action.epoch > 1 or self.job.verbose:
            hosts = ", ".join(dict.fromkeys(worker.host for worker in action.members))
            self.outputs.say(f"epoch {action.epoch}: {size} worker{'s' * (size != 1)} on {hosts}")

    def _dismiss(self, worker: Worker, now: float) -> None:
        if self._not_started(worker.number):
            self._drop(worker.number, now)
        elif worker.state is State.WAITING:
            self._tell(worker.number, "dismiss")
        else:
            self._host(worker.number).send(worker.number, signal.SIGTERM)
        self.peers[worker.number].kill_at = now + KILL_S

    def _not_started(self, number: int) -> bool:
        """Its host's agent has not answered yet."""
        remote = self.remote.get(self.peers[number].place.host)
        return remote is not None and self.peers[number].place in remote.waiting

    def _drop(self, number: int, now: float) -> None:
        self.remote[self.peers[number].place.host].waiting.remove(self.peers[number].place)
        self._ended(number, 0, "was not started", now)

    def _check(self, now: float) -> None:
        """Asks workers whether they live, and kills those that do not answer."""
        stood_still = now - self.last_step > PAUSE_S
        for number in sorted(self.termination.running):
            peer = self.peers[number]
            if stood_still:
                peer.asked_at = None
            if peer.kill_at is not None and now >= peer.kill_at:
                self._host(number).send(number, signal.SIGKILL)
            elif peer.asked_at is not None and now - peer.asked_at > self.worker_timeout_s and peer.kill_at is None:
                self.outputs.say(f"{self._named(number)} has not answered for {self.worker_timeout_s:g} s "
                                 "(--worker-timeout); it is killed")
                self._host(number).send(number, signal.SIGKILL)
                peer.kill_at = now
            elif peer.speaks and peer.asked_at is None:
                peer.asked_at = now
                self._tell(number, "ping")

    def _tell(self, number: int, what: str, **fields: Union[int, str]) -> None:
        if number in self.termination.running:
            self._host(number).tell(number, messages.pack(what, **fields))

    def _host(self, number: int) -> Union[HostRanks, Agent, "_Nobody"]:
        place = self.peers[number].place
        if place.here:
            return self.here
        remote = self.remote.get(place.host)
        return remote.agent if remote and remote.begun else _NOBODY

    def _signal(self, now: float) -> None:
        for signum in self.termination.due(now):
            for number in sorted(self.termination.running):
                if self._not_started(number):
                    self._drop(number, now)
                elif signum is None:
                    self.stuck.append(self._process(number))
                else:
                    self._host(number).send(number, signum)

    def _pace(self) -> None:
        if self.here:
            self.here.flush()
        agents = [host.agent for host in self.remote.values()]
        wait_for(self.outputs.sinks + [agent.commands for agent in agents if not agent.over], self.selector)
        for host in [*agents, *([self.here] if self.here else [])]:
            host.pause(self.outputs.too_much_pending)

    # The end.

    def _conclude(self, end: End) -> None:
        """Ends what still runs."""
        if end.text or end.failure:
            failure = end.failure
            self.cause = Cause(failure.worker.number if failure else None, failure.code if failure else 1,
                               len(self.termination.running))
            self.cause_text = end.text
        self.termination.end(time.monotonic())

    def _end(self) -> None:
        hosts = [host.agent for host in self.remote.values() if host.begun and not host.agent.over]
        for host in [*hosts, *([self.here] if self.here else [])]:
            self._handle(host.end())
        while not all(agent.over for agent in hosts):
            self._step()
        self.outputs.finish()
        self._pace()
        while any(before := self.outputs.pending):
            self._step()
            if before == self.outputs.pending:  # nobody has read for CHECK_S
                return

    def _outcome(self) -> Outcome:
        lines = []
        cause = self.termination.cause or self.cause
        if self.termination.cause and self.termination.cause.rank is None and not self.cause:
            others = cause.others
            lines.append(("nobody reads our output any more" if cause.code == -signal.SIGPIPE
                          else f"interrupted by {signal_name(-cause.code)}")
                         + (f"; ended {others} worker{'s' * (others != 1)}" if others else ""))
        elif cause:
            first = "" if cause.rank is None else f"; the first: {self._named(cause.rank)} {_how(cause.code)}"
            lines.append(f"{self.cause_text}{first}")
        if self.stuck:
            lines.append(f"did not end after SIGKILL, stuck in the kernel: {', '.join(dict.fromkeys(self.stuck))}")
        return Outcome(cause, "\n".join(lines + self.outputs.errors()))

    def _named(self, number: int) -> str:
        return f"worker {number} ({self._process(number)})"

    def _process(self, number: int) -> str:
        peer = self.peers[number]
        host = socket.gethostname() if peer.place.here else peer.place.host
        return f"pid {peer.pid or 'unknown'} on host {host}"


class _Nobody:
    """In place of a host that is not there any more, or not yet."""

    def send(self, rank: int, signum: int) -> None:
        pass

    def tell(self, rank: int, chunk: bytes) -> None:
        pass


_NOBODY = _Nobody()


def _how(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def _disconnect(agent: Agent) -> None:
    agent.disconnect()
    agent.wait(time.monotonic() + 10)

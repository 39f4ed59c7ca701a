"""The processes of an elastic job's workers, on this host and, by way of agents, on others: starts them one by one,
signals them, and carries what they and the driver say to each other. A worker is a rank to the runner (host_ranks.py,
remote.py), by its number.
"""
import contextlib
import os
import selectors
import shlex
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Callable, Optional, Union

from lightcc.launch.host_ranks import HostRanks
from lightcc.launch.hosts import Place
from lightcc.launch.local import Job, Rank, StartError, rank_starter, with_threads
from lightcc.launch.messages import NotStarted, Remark, Started
from lightcc.launch.output import Sink
from lightcc.launch.remote import END_S, Agent, Event, Lost, forwarded
from lightcc.launch.result_transfer import PART_BYTES, ResultReceiver
from lightcc.launch.run_files import read_chunks


@dataclass
class _RemoteHost:
    agent: Agent
    answer_by: float
    begun: bool = False
    waiting: list[Place] = field(default_factory=list)  # to be started once it has answered and has the function


class WorkerProcesses:
    """What happens to them is returned as events (messages.py, Lost), by these methods and by what is registered in the
    selector."""

    def __init__(self, job: Job, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        self._job = job
        self._receiver = ResultReceiver(job.run_files, job.settings["LIGHTCC_SECRET"]) if job.run_files else None
        self._selector = selector
        self._stack = stack
        self._places: dict[int, Place] = {}
        self._pids: dict[int, int] = {}
        self._here: Optional[HostRanks] = None
        self._start_rank: Callable[[Place], Rank]  # on it
        self._remote: dict[str, _RemoteHost] = {}  # those that are connected, or about to be
        self._ending: list[Agent] = []

    def start(self, place: Place, now: float) -> list[Event]:
        """place.rank: the worker's number."""
        self._places[place.rank] = place
        if self._job.run_files:
            self._job.run_files.add(place.rank)
        if place.here:
            return self._start_here(place)
        events = self._connect(place.host, now)
        self._remote[place.host].waiting.append(place)
        return events

    def started(self, event: Started) -> None:
        """Is to be told of these events."""
        self._pids[event.rank] = event.pid

    def is_started(self, number: int) -> bool:
        """False until its host's agent has answered and has the function, if there is one."""
        remote = self._remote.get(self._places[number].host)
        return remote is None or self._places[number] not in remote.waiting

    def drop(self, number: int) -> None:
        """It need not be started."""
        self._remote[self._places[number].host].waiting.remove(self._places[number])

    def send(self, number: int, signum: int) -> None:
        if number in self._pids and (host := self._host_of(number)):
            host.send(number, signum)

    def tell(self, number: int, chunk: bytes) -> None:
        if number in self._pids and (host := self._host_of(number)):
            host.tell(number, chunk)

    def on_host(self, name: str) -> list[int]:
        """Those on a host that is not this one."""
        return [number for number, place in self._places.items() if place.host == name and not place.here]

    def step(self, now: float, awaited: Collection[str]) -> list[Event]:
        """Is to be called often: notices hosts that are silent, and begins on those that have answered. awaited: hosts
        with members of an epoch that others have left, which is a sign that such a host is lost."""
        events: list[Event] = []
        for name, host in list(self._remote.items()):
            events += host.agent.check(now, doubtful=name in awaited)
            if not host.agent.ready and now >= host.answer_by:
                host.agent.disconnect()
                lines = host.agent.last_lines()
                events.append(Lost(host.agent.host, f"no answer within {self._job.start_timeout_s:g} s "
                                                    "(--start-timeout)" + (f"; {lines}" if lines else "")))
            if host.agent.can_load():  # one part at a time: others are heard between
                host.agent.load_more()
            if host.agent.ready and host.waiting and not host.agent.loading:
                self._begin(host)
        return events

    def wait_s(self) -> Optional[float]:
        """The time until the next step() has something to do that no event tells of; None: there is nothing."""
        return 0.0 if any(host.agent.can_load() for host in self._remote.values()) else None

    def lost(self, name: str) -> None:
        """A host's agent is gone. A new one is started if there is something to start there."""
        if remote := self._remote.pop(name, None):
            remote.agent.disconnect()

    def pace(self, pause: bool) -> list[Sink]:
        """Reads on from workers or not; returns what is slow to take what it is told."""
        if self._here:
            self._here.flush()
        agents = [host.agent for host in self._remote.values()]
        for host in self._with_here(agents):
            host.pause(pause)
        return [agent.commands for agent in agents if not agent.over]

    def end(self) -> Iterator[Event]:
        """Ends what is left on every host; there is more to come until is_over."""
        self._ending = [host.agent for host in self._remote.values() if host.begun and not host.agent.over]
        for host in self._with_here(self._ending):
            yield from host.end()

    @property
    def is_over(self) -> bool:
        return all(agent.over for agent in self._ending)

    def described(self, number: int) -> str:
        place = self._places[number]
        return f"pid {self._pids.get(number, 'unknown')} on host {socket.gethostname() if place.here else place.host}"

    def _start_here(self, place: Place) -> list[Event]:
        events: list[Event] = []
        if self._here is None:
            job, remarks = with_threads(replace(self._job, slots=place.local_size))
            self._start_rank = self._stack.enter_context(rank_starter(job))
            pipes = self._stack.enter_context(selectors.DefaultSelector())
            self._here = HostRanks(socket.gethostname(), [], self._selector, pipes)
            events += remarks
        try:
            rank = self._start_rank(place)
        except StartError as error:
            return [*events, NotStarted(place.rank, str(error), error.exit_code)]
        self._here.add(rank)
        return [*events, Started(rank.number, rank.pid)]

    def _connect(self, name: str, now: float) -> list[Event]:
        if name in self._remote:
            return []
        command = self._job.agent_on(name)
        agent = Agent(name, [], command, self._selector, self._receiver)
        if self._job.run_files:
            agent.load(read_chunks(self._job.run_files.function, PART_BYTES))
        self._stack.callback(_disconnect, agent)
        self._remote[name] = _RemoteHost(agent, now + self._job.start_timeout_s)
        return [Remark(f"host {name}: {shlex.join(command)}")] if self._job.verbose else []

    def _begin(self, host: _RemoteHost) -> None:
        if not host.begun:
            host.begun = True
            ours = {k: v for k, v in forwarded(os.environ).items() if k not in self._job.set_on_hosts}
            host.agent.begin(self._job.command(0), {**ours, **self._job.settings}, self._job.talk_variable,
                             host.waiting[0].local_size)
        for place in host.waiting:
            host.agent.start_rank(place)
        host.waiting = []

    def _with_here(self, agents: Iterable[Agent]) -> list[Union[HostRanks, Agent]]:
        return [*agents, *([self._here] if self._here else [])]

    def _host_of(self, number: int) -> Union[HostRanks, Agent, None]:
        place = self._places[number]
        if place.here:
            return self._here
        return self._remote[place.host].agent if place.host in self._remote else None


def _disconnect(agent: Agent) -> None:
    agent.disconnect()
    agent.wait(time.monotonic() + END_S)

"""Runs a job of fixed ranks, on this host (host_ranks.py) and others (remote.py), from its first process to its last
byte. It decides nothing itself: termination.py says which signal is sent when, output.py how lines are tagged,
error_output.py when lines of standard error are printed and who failed first.
"""

import contextlib
import functools
import os
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Optional, Union

from lightcc.launch import inits, network
from lightcc.launch.error_output import ErrorOutput
from lightcc.launch.event_loop import CHECK_S, EventLoop
from lightcc.launch.host_ranks import HostRanks
from lightcc.launch.local import Job, StartError, job_environment, started, with_threads
from lightcc.launch.messages import Ended, Said, Started, Taken
from lightcc.launch.output import Sink
from lightcc.launch.rank_outputs import RankOutputs
from lightcc.launch.remote import Agent, Event, Lost, agents, forwarded
from lightcc.launch.result_transfer import PART_BYTES, ResultReceiver
from lightcc.launch.run_files import read_chunks
from lightcc.launch.standard_input import Source
from lightcc.launch.termination import FAILURE_GRACE_S, FAR_GRACE_S, LOST_CODE, Cause, Outcome, Termination, how_ended

PROMPT_S = 0.1  # what rank 0 has begun to write and not ended by then is a prompt, if somebody can answer


def supervise(job: Job, stdout: int, stderr: int, signals: Sequence[int] = ()) -> Outcome:
    """Runs the job; returns when all its processes have ended. stdout and stderr are descriptors for the tagged
    output. These signals end the job (main thread only); one that is ignored stays ignored, as under nohup. Raises
    StartError, or OSError when the output directory cannot be written."""
    with contextlib.ExitStack() as stack:
        job = replace(job, settings={**job.settings, **job_environment()}, talk_variable=inits.VARIABLE)
        outputs = RankOutputs([stdout, stderr], job.timestamps, job.output_dir, len(job.places), stack)
        return _FixedJob(job, outputs, signals, stack).run()


class _Lost(NamedTuple):
    why: str
    ranks: list[int]  # that still ran


class _FixedJob:
    """The policy of the event loop."""

    def __init__(self, job: Job, outputs: RankOutputs, signals: Sequence[int], stack: contextlib.ExitStack) -> None:
        self.job = job
        self.stack = stack
        self.outputs = outputs
        grace_s = FAILURE_GRACE_S if all(place.here for place in job.places) else FAR_GRACE_S
        self.termination = Termination(0, grace_s, job.term_grace_s)
        self.failed_at = 0.0
        self.host = {p.rank: socket.gethostname() if p.here else p.host for p in job.places}
        self.pid: dict[int, int] = {}
        self.lost: dict[str, _Lost] = {}  # by host
        self.error_output = ErrorOutput(job.term_grace_s)
        self.inits = inits.Inits()
        self.signalled: set[int] = set()  # ranks that got a signal of ours
        for place in job.places:
            outputs.add(place.rank, functools.partial(self._errors_to_print, place.rank))
        self.loop = EventLoop(self, outputs, self.termination, signals, stack, self._process)
        self.input: Optional[Source] = None
        self.agents: list[Agent] = []
        self.host_ranks: dict[int, Union[HostRanks, Agent]] = {}  # by rank

    def run(self) -> Outcome:
        self._connect_to_hosts()
        if not self.termination.cause:
            self._start()
        while self.termination.running and not self.loop.stuck:
            self.loop.step()
        self._end()
        self.loop.flush()
        cause = self._cause()
        return Outcome(cause, "\n".join(self._report(cause)), self.failed_at)

    def _connect_to_hosts(self) -> None:
        """Nothing is started before every host has answered, and has the function if there is one."""
        if all(place.here for place in self.job.places):
            return
        deadline = time.monotonic() + self.job.start_timeout_s
        run_files = self.job.run_files
        receiver = ResultReceiver(run_files, self.job.settings["LIGHTCC_SECRET"]) if run_files else None
        self.agents = self.stack.enter_context(
            agents(self.job.places, self.job.agent_on, self.loop.selector, receiver))
        for agent in self.agents if self.job.verbose else ():
            self.outputs.say(f"host {agent.host}: {shlex.join(agent.command)}")
        while not self.termination.cause and (missing := [agent for agent in self.agents if not agent.ready]):
            left = deadline - time.monotonic()
            if left <= 0:
                lines = "".join(f"; {agent.host}: {agent.last_lines()}" for agent in missing if agent.last_lines())
                raise StartError(f"no answer within {self.job.start_timeout_s:g} s (--start-timeout) from lightcc's "
                                 f"agent on {', '.join(agent.host for agent in missing)}{lines}", 1)
            self.loop.step(left)
        if not self.termination.cause and not self.job.places[0].here:  # its host is the first
            self.agents[0].hold_port(_ports())
        for agent in self.agents:
            if run_files:
                agent.load(read_chunks(run_files.function, PART_BYTES))
        while not self.termination.cause and any(agent.loading for agent in self.agents):
            self.loop.step(0 if any(agent.can_load() for agent in self.agents) else None)
            for agent in self.agents:
                if agent.can_load():
                    agent.load_more()
            self.loop.pace()
        while not self.termination.cause and any(a.holds_port and a.master_port is None for a in self.agents):
            self.loop.step()

    def _hold_master_port(self) -> None:
        """MASTER_PORT, at rank 0: for what wants to meet at MASTER_ADDR."""
        if "MASTER_ADDR" not in self.job.settings:
            return
        if self.job.places[0].here:
            holder = network.hold_port(_ports())
            port = self.stack.enter_context(holder).getsockname()[1] if holder else 0
        else:
            port = self.agents[0].master_port
        if port:
            self.job = replace(self.job, settings={**self.job.settings, "MASTER_PORT": str(port)})
        else:
            self.outputs.say(f"no port of LIGHTCC_PORT_RANGE={_ports()} is free on host {self.host[0]}, so MASTER_PORT "
                             "is not set, which torch.distributed needs")

    def _start(self) -> None:
        self._hold_master_port()
        self.termination.running.update(range(len(self.job.places)))
        for agent in self.agents:
            self.host_ranks.update(dict.fromkeys(agent.ranks, agent))
            agent.begin(self.job.command(agent.ranks[0]), {**forwarded(os.environ), **self.job.settings},
                        self.job.talk_variable)
        if any(place.here for place in self.job.places):
            job, remarks = with_threads(self.job)
            ranks = self.stack.enter_context(started(job))
            pipes = self.stack.enter_context(selectors.DefaultSelector())
            here = HostRanks(socket.gethostname(), ranks, self.loop.selector, pipes)
            self.host_ranks.update({rank.number: here for rank in ranks})
            self.loop.handle([*remarks, *here.started()])
        if self.job.run_files:
            self.job.run_files.close_function()
        elif self.job.stdin == subprocess.PIPE or not self.job.places[0].here:
            self.input = Source(0, self.loop.selector, self._give)

    def _give(self, chunk: bytes) -> None:
        self.host_ranks[0].give(chunk)
        if self.input and self.input.is_terminal and chunk.endswith(b"\n"):
            self.outputs.streams[0, 1].entered()

    def _prompt_at(self) -> Optional[float]:
        """When the beginning of a line of rank 0 is shown without its end; None: not at all."""
        began = self.outputs.streams[0, 1].partial_at
        return began + PROMPT_S if began is not None and self.input and self.input.is_terminal else None

    # What the loop asks for.

    def waits(self, now: float) -> Iterable[Optional[float]]:
        prompt_at = self._prompt_at()
        return (CHECK_S if self.agents or (self.input and self.input.in_background) else None,
                self.error_output.wait_s(now), None if prompt_at is None else max(0.0, prompt_at - now))

    def turn(self, now: float) -> None:
        for agent in self.agents:
            self.loop.handle(agent.check(now))
        if self.termination.cause and not self.failed_at:
            self.failed_at = now
            self.error_output.ending(now)
        for rank, lines in self.error_output.due(now):
            self.outputs.print_errors(rank, lines)
        prompt_at = self._prompt_at()
        if prompt_at is not None and prompt_at <= now:
            self.outputs.streams[0, 1].show_partial()

    def send(self, number: int, signum: int) -> None:
        self.signalled.add(number)
        self.host_ranks[number].send(number, signum)

    def pace(self) -> Sequence[Sink]:
        if self.input:
            self.input.pace()
        for host in set(self.host_ranks.values()):
            host.pause(self.outputs.too_much_pending)
            if isinstance(host, HostRanks):
                host.flush()
        return [agent.commands for agent in self.agents if not agent.over]

    def handle(self, events: Sequence[Event]) -> None:
        ended: dict[int, int] = {}
        lost: set[int] = set()
        for event in events:
            if isinstance(event, Said):
                self._cancel(self.inits.heard(event.rank, event.chunk))
            elif isinstance(event, Ended):
                ended[event.rank] = event.code
            elif isinstance(event, Started):
                self.pid[event.rank] = event.pid
                if self.job.verbose:
                    self.outputs.say(f"rank {event.rank} is {self._process(event.rank)}")
            elif isinstance(event, Lost):
                if not self.host_ranks:
                    raise StartError(f"cannot start lightcc's agent on host {event.host}: {event.text}", 1)
                lost.update(self._lose(event.host, event.text))
                ended.update(dict.fromkeys(lost, LOST_CODE))
            elif isinstance(event, Taken) and self.input:
                self.input.taken(event.size, event.over)
        now = time.monotonic()
        self.termination.exited(ended, now)
        for rank, code in ended.items():
            self.error_output.ended(rank, code, now, by_us=rank in self.signalled and rank not in lost)
            how = "was lost with its host" if rank in lost else how_ended(code)
            name = f"rank {rank} (pid {self.pid.get(rank, 'unknown')}) on host {self.host[rank]}"  # as the core has it
            self._cancel(self.inits.ended(rank, f"{name} {how}"))

    def _cancel(self, cancels: Iterable[inits.Cancel]) -> None:
        for cancel in cancels:
            if cancel.rank in self.termination.running:
                self.host_ranks[cancel.rank].tell(cancel.rank, cancel.chunk)
            if self.error_output.ends[cancel.ended].code == 0:  # which by itself ends no job
                self.outputs.say_once(cancel.cause)

    def _end(self) -> None:
        """Ends on every host what the ranks have left running; then the last of their output comes."""
        if self.input:
            self.input.close()
        # This host comes last, since its end() waits until all is over.
        for host in sorted(set(self.host_ranks.values()), key=lambda host: isinstance(host, HostRanks)):
            self.loop.handle(host.end())
        while self.host_ranks and not all(agent.over for agent in self.agents):  # a silent one is lost, and so over
            self.loop.step(CHECK_S)
        self.outputs.finish()
        for rank, lines in self.error_output.rest():
            self.outputs.print_errors(rank, lines)

    def _errors_to_print(self, rank: int, lines: bytes) -> bytes:
        return self.error_output.put(rank, lines, time.monotonic())

    def _lose(self, host: str, why: str) -> list[int]:
        running = self.termination.running
        ranks = [p.rank for p in self.job.places if p.host == host and not p.here and p.rank in running]
        self.lost[host] = _Lost(why, ranks)
        return ranks

    def _process(self, rank: int) -> str:
        return f"pid {self.pid.get(rank, 'unknown')} on host {self.host[rank]}"

    def _cause(self) -> Optional[Cause]:
        """The failure that ended the job may be the consequence of another rank's, which is then the cause."""
        seen, first = self.termination.cause, self.error_output.first_failure()
        if seen is None or seen.rank is None or first is None:
            return seen
        code = seen.code if first in self.signalled else self.error_output.ends[first].code
        return seen._replace(rank=first, code=code)

    def _report(self, cause: Optional[Cause]) -> Iterator[str]:
        yield from self.loop.report(cause)
        if cause and cause.rank is not None:
            host = self.host[cause.rank]
            lost = self.lost.pop(host) if host in self.lost and cause.rank in self.lost[host].ranks else None
            if lost:
                yield _lost(host, lost) + _ended(cause.others + 1 - len(lost.ranks))
            else:
                # And then it was ended by our signal.
                how = "raised an exception" if cause.rank in self.signalled else how_ended(cause.code)
                yield f"rank {cause.rank} (pid {self.pid[cause.rank]}, host {host}) {how}{_ended(cause.others)}"
        for host, lost in self.lost.items():
            yield _lost(host, lost)
        yield from self.loop.report_leftovers()


def _lost(host: str, lost: _Lost) -> str:
    ranks = ", ".join(map(str, lost.ranks))
    whose = f" with {'rank' if len(lost.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
    return f"lost host {host}{whose}: {lost.why}"


def _ports() -> str:
    return os.environ.get("LIGHTCC_PORT_RANGE", "")


def _ended(others: int) -> str:
    return {0: "", 1: "; ended the other rank"}.get(others, f"; ended the other {others} ranks")

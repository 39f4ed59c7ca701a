"""Who belongs to an elastic job. Pure: its input is hosts, what workers say and how they end, and the time; its output
(due) which workers to start and to send away, which epoch to form, whom to tell, and how the job ends.

An epoch is a world of ranks between two resets. The rules:

1. An epoch is formed when no member of the last one still runs in it and enough workers wait; never beside another.
2. A worker whose state was synced has what the job has learned. While any such worker lives, rank 0 of an epoch is one.
   Once all members of an epoch were and none is left on a host that may be used, now or after a cooldown, the job ends:
   what others would train from is not what was learned.
3. Free slots of usable hosts are filled at once, and newcomers are announced when they wait, those of one discovery
   together, so nobody waits for their imports and they are one reset. Who is late comes with the next one. After a
   failure those who are left go on without newcomers if they are enough.
4. A worker that fails counts against its host, which is not used any more after `failures_per_host` of them, for ever
   or, with a cooldown, for a while that doubles. So does one that cannot reach rank 0, unless most members cannot: then
   it is rank 0 that has failed.
5. The first worker that ends well ends the job well: nobody is started after it, and who waits is sent away.
"""
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from lightcc.elastic.actions import (
    ADDED,
    NO_UPDATE,
    REMOVED,
    Action,
    Cancel,
    Dismiss,
    End,
    Exit,
    Form,
    Notify,
    Start,
    State,
    Worker,
)
from lightcc.elastic.limits import Limits
from lightcc.launch.hosts import Host

FIRST_EPOCH_S = 600.0  # for the other workers' imports once one waits; --elastic-timeout if that is longer
SAY_AFTER_S = 5.0      # that the job waits
STARTS_AT_ONCE = 64    # so that whoever starts them can be interrupted
_NO_STATE = "no worker that has the state of the job is left"


@dataclass
class _Usage:
    """How a host is used."""

    slots: int
    failures: int = 0
    blacklisted: int = 0       # times
    until: float = 0.0         # when it may be used again


@dataclass
class Membership:
    limits: Limits
    epoch: int = 0                                               # the last that was formed; 0: none
    members: list[Worker] = field(default_factory=list)          # of it, by rank
    workers: dict[int, Worker] = field(default_factory=dict)     # all that ever were
    over: Optional[End] = None
    _hosts: dict[str, _Usage] = field(default_factory=dict)      # those there are, the oldest first
    _past: dict[str, _Usage] = field(default_factory=dict)       # that went away: a failure is not forgotten
    _first_failure: Optional[Exit] = None
    _succeeded: bool = False
    _had_state: bool = False
    _short_since: Optional[float] = None                         # since when too few are there
    _said_short: bool = False                                    # since then
    _more_to_start: bool = False
    _here: set[str] = field(default_factory=set)                 # names of the machine that the driver is on
    _discovery: int = 0                                          # the last
    _ready_since: dict[int, float] = field(default_factory=dict)  # discovery -> since when a newcomer of it waits
    _announced: dict[int, int] = field(default_factory=dict)     # worker -> what rank 0 was told of it, in this epoch
    _broken: Optional[str] = None                                # why not all can meet for the present epoch
    _cancelled: int = 0                                          # the last epoch that was cancelled

    # What happens.

    def found(self, hosts: Sequence[Host], here: Collection[str] = ()) -> None:
        """The hosts that there are now. here: the names of those that are the driver's machine, and so the same one."""
        self._here |= set(here)
        self._discovery += 1
        slots = {host.name: host.slots for host in hosts}
        for name in [name for name in self._hosts if name not in slots]:
            self._past[name] = self._hosts.pop(name)
        for name, count in slots.items():
            usage = self._hosts.setdefault(name, self._past.pop(name, _Usage(count)))
            usage.slots = count

    def waiting(self, number: int) -> None:
        """The worker waits for an epoch."""
        worker = self.workers[number]
        if not worker.timed_out:  # the others' time is up as well, and then they say whether they are apart
            self._leaves(worker, f"worker {number} on host {worker.host} could not join")
        worker.state, worker.joined = State.WAITING, False

    def joined(self, number: int) -> None:
        """Its init has returned."""
        self.workers[number].joined = self.workers[number].state is State.MEMBER

    def timed_out(self, number: int, apart: bool) -> None:
        """Its init has waited in vain; apart: for rank 0, which cannot be reached."""
        worker = self.workers[number]
        worker.timed_out = worker.state is State.MEMBER
        worker.apart = worker.timed_out and apart and worker.host != self.members[0].host  # there it is slow, at most

    def synced(self, number: int) -> None:
        """It has the state of rank 0."""
        worker = self.workers[number]
        worker.synced = worker.state is State.MEMBER
        worker.has_state = True
        # Before, no step can have been trained that needs all.
        self._had_state = self._had_state or all(w.synced for w in self.members)

    def exited(self, number: int, code: int, how: str, now: float) -> None:
        """how: in words, for the others."""
        worker = self.workers[number]
        self._leaves(worker, how)
        worker.state = State.ENDED
        worker.apart = False  # this is its failure
        if worker.dismissed:
            return
        if code == 0:
            self._succeeded = True
            return
        self._first_failure = self._first_failure or Exit(worker, code)
        self._failed(worker, now)

    def _failed(self, worker: Worker, now: float) -> None:
        usage = self._usage(worker.host)
        if usage.until <= now:  # else the host has just been found to fail, and this is of the same cause
            usage.failures += 1
            if usage.failures >= self.limits.failures_per_host:
                usage.failures, usage.blacklisted = 0, usage.blacklisted + 1
                usage.until = now + self._cooldown_s(usage.blacklisted)

    def _leaves(self, worker: Worker, how: str) -> None:
        if worker.state is State.MEMBER and not all(w.joined for w in self.members):
            self._broken = self._broken or how

    # What follows from it.

    def due(self, now: float) -> list[Action]:
        """What is to be done now. Each action is returned once."""
        actions: list[Action] = []
        self._more_to_start = False
        if self.over:
            return actions
        if self._broken and self._cancelled < self.epoch:
            self._cancelled = self.epoch
            actions.append(Cancel(self.epoch, [w for w in self.members if w.state is State.MEMBER], self._broken))
        if self._succeeded:
            unneeded = (State.WAITING, State.STARTING) if self.epoch else (State.WAITING,)  # else all may yet begin
            actions += self._dismiss(w for w in self._alive() if w.state in unneeded)
            return actions + self._end_if_empty()
        if not self._running():
            self._count_apart(now)
        if end := self._hopeless(now):
            return actions + [end]
        actions += self._start(now)
        actions += self._announce(now) if self._running() else self._form(now)
        return actions

    def wait_s(self, now: float) -> Optional[float]:
        """The time until something may be due that nobody reports; None: nothing is."""
        if self._more_to_start:
            return 0.0
        times = [usage.until for usage in self._hosts.values() if usage.until < float("inf")]
        if self._short_since is not None:
            times.append(self._short_since + self.limits.elastic_timeout_s)
        times += [since + self._newcomer_timeout_s for since in self._ready_since.values()]
        times = [time for time in times if time > now]
        return min(times) - now if times and not self.over else None

    def remark(self, now: float) -> str:
        """What to say of a wait that has lasted for SAY_AFTER_S, once; else ""."""
        if self.over or self._short_since is None or self._said_short or now < self._short_since + SAY_AFTER_S:
            return ""
        self._said_short = True
        have, need, what = self._counted(now)
        if have >= need:
            return "waiting for a worker that has the state of the job, until its host is used again"
        return f"waiting for {what}: {have} of {need} are there; at most {self.limits.elastic_timeout_s:g} s " \
               "(--elastic-timeout)"

    def surroundings(self, host: str) -> tuple[int, int, int]:
        """How many workers may run on a host's machine, its number among all machines, and how many there are."""
        slots: dict[str, int] = {}
        for name, usage in self._hosts.items():
            slots[self._machine(name)] = slots.get(self._machine(name), 0) + usage.slots
        machine = self._machine(host)
        return int(min(slots[machine], self.limits.most)), list(slots).index(machine), len(slots)

    def awaited_hosts(self) -> set[str]:
        """Those with members that still run in an epoch that another member has left and waits for the next."""
        left = any(w.state is State.WAITING for w in self.members)
        return {w.host for w in self._running()} if left else set()

    def _start(self, now: float) -> list[Action]:
        """A worker for each free slot, as far as that many may run."""
        usable = self._usable(now)
        if self.epoch == 0 and not self.workers and sum(usable.values()) < self.limits.num_proc:
            return self._wait_for_more(now)
        taken = {(w.host, w.slot) for w in self._alive()}
        room = self.limits.most - sum(w.slot < usable.get(w.host, 0) for w in self._alive())
        free = ((host, slot) for host, slots in usable.items() for slot in range(slots) if (host, slot) not in taken)
        actions: list[Action] = []
        for host, slot in itertools.islice(free, max(0, int(min(room, STARTS_AT_ONCE)))):
            worker = Worker(len(self.workers), host, slot, self._free_local_rank(host), self._discovery)
            self.workers[worker.number] = worker
            actions.append(Start(worker))
        self._more_to_start = len(actions) == STARTS_AT_ONCE
        return actions

    def _free_local_rank(self, host: str) -> int:
        taken = {w.local_rank for w in self._alive() if self._machine(w.host) == self._machine(host)}
        return next(number for number in itertools.count() if number not in taken)

    def _announce(self, now: float) -> list[Action]:
        """Tells rank 0 of newcomers that wait and of members that must go."""
        usable = self._usable(now)
        newcomers = [w for w in self._alive() if w.state is State.WAITING and w not in self.members
                     and w.slot < usable.get(w.host, 0)]
        self._note_ready(newcomers, now)
        incomplete = {w.discovery for w in self._starting(usable)} - self._late_discoveries(now)
        changes = {w.number: ADDED for w in newcomers if w.discovery not in incomplete}
        changes.update({w.number: REMOVED for w in self.members
                        if w.state is State.MEMBER and w.slot >= usable.get(w.host, 0)})
        room = self.limits.most - sum(w.state is State.MEMBER and w.number not in changes for w in self.members)
        if room <= 0:
            changes = {number: change for number, change in changes.items() if change is not ADDED}
        news = {number: change for number, change in changes.items() if self._announced.get(number) != change}
        leader = self.members[0]
        if not news or leader.state is not State.MEMBER or not leader.synced:  # before, it forgets what it hears
            return []
        self._announced.update(news)
        result = NO_UPDATE
        for change in news.values():
            result |= change
        leaving = (rank for rank, w in enumerate(self.members) if changes.get(w.number) is REMOVED)
        return [Notify(leader, result, tuple(leaving))]

    def _form(self, now: float) -> list[Action]:
        """The next epoch if enough wait."""
        usable = self._usable(now)
        chosen = self._in_order([w for w in self._alive()
                                 if w.state is State.WAITING and w.slot < usable.get(w.host, 0)])
        starting = self._starting(usable)
        if self.epoch == 0 and starting and len(chosen) + len(starting) >= self.limits.min_num_proc:
            self._short_since = None  # the slots are there
            self._note_ready(chosen, now)
            if not self._late_discoveries(now):
                return []
            if len(chosen) < self.limits.min_num_proc:
                names = ", ".join(f"worker {w.number} on host {w.host}" for w in starting)
                return [self._finish(f"not in init() {self._newcomer_timeout_s:g} s after the first: {names}")]
        if len(chosen) < self.limits.min_num_proc:
            return self._wait_for_more(now)
        if self._had_state and not any(w.has_state for w in chosen):
            if any(w.has_state and self._comes_back(w.host, now) for w in self._alive()):
                return self._wait_for_more(now)
            return [self._finish(f"{_NO_STATE} on a host that may be used")]
        if self.limits.reset_limit is not None and self.epoch > self.limits.reset_limit:
            return [self._finish(f"the job was reset {self.limits.reset_limit} times, the most by --reset-limit")]
        chosen = chosen[:None if self.limits.max_num_proc is None else self.limits.max_num_proc]
        self.epoch += 1
        self.members, self._announced, self._ready_since = chosen, {}, {}
        self._short_since, self._broken = None, None
        for worker in chosen:
            worker.state, worker.joined, worker.synced, worker.timed_out = State.MEMBER, False, False, False
        unwanted = [w for w in self._alive() if w.state is State.WAITING or w.slot >= usable.get(w.host, 0)]
        return [Form(self.epoch, chosen), *self._dismiss(w for w in unwanted if w not in chosen)]

    def _count_apart(self, now: float) -> None:
        apart = [w for w in self.members if w.apart]
        for worker in apart if 2 * len(apart) <= len(self.members) else self.members[:1]:
            self._failed(worker, now)
        for worker in apart:
            worker.apart = False

    def _in_order(self, workers: Sequence[Worker]) -> list[Worker]:
        """By host, those whose workers have the state first, in a host by slot; but rank 0 has the state."""
        with_state = {w.host for w in workers if w.has_state}
        order = {name: index for index, name in enumerate(self._hosts)}
        found = sorted(workers, key=lambda w: (w.host not in with_state, order[w.host], w.slot))
        first = next((w for w in found if w.has_state), None)
        return found if first is None else [first, *(w for w in found if w is not first)]

    def _hopeless(self, now: float) -> Optional[End]:
        if self._had_state and not any(w.has_state for w in self._alive()):
            return self._finish(_NO_STATE)
        blocked = all(usage.until == float("inf") for usage in self._hosts.values())
        all_failed = self._hosts and not any(self._alive())  # on other hosts the same would come of it
        if self.workers and blocked and (all_failed or not self.limits.hosts_may_come):
            return self._finish("no host is left whose workers have not failed (--failures-per-host "
                                f"{self.limits.failures_per_host})")
        if self._had_state and not any(w.has_state and self._usage(w.host).until < float("inf") for w in self._alive()):
            hosts = dict.fromkeys(w.host for w in self._alive() if w.has_state)
            return self._finish(f"{_NO_STATE} on a host that may be used: workers have failed on {', '.join(hosts)} "
                                f"(--failures-per-host {self.limits.failures_per_host})")
        return self._late_end(now)

    def _late_end(self, now: float) -> Optional[End]:
        if not self._is_late(now) or self._running():
            return None
        have, need, what = self._counted(now)
        if have >= need:
            return None
        return self._finish(f"after {self.limits.elastic_timeout_s:g} s (--elastic-timeout) there were {have} of "
                            f"{need} {what}")

    def _counted(self, now: float) -> tuple[int, int, str]:
        """How many are there to go on with, how many are needed, and of what."""
        usable = self._usable(now)
        if not self.workers:
            return sum(usable.values()), self.limits.num_proc, "slots"
        waiting = sum(w.state is State.WAITING and w.slot < usable.get(w.host, 0) for w in self._alive())
        return waiting, self.limits.min_num_proc, "workers"

    def _finish(self, text: str) -> End:
        self.over = End(self._first_failure, text)
        return self.over

    def _end_if_empty(self) -> list[Action]:
        if any(w.state is not State.ENDED for w in self.workers.values()):
            return []
        self.over = End(None, "")
        return [self.over]

    def _dismiss(self, workers: Iterable[Worker]) -> list[Action]:
        found = [w for w in workers if not w.dismissed]
        for worker in found:
            worker.dismissed = True
        return [Dismiss(w) for w in found]

    def _wait_for_more(self, now: float) -> list[Action]:
        if self._short_since is None:
            self._short_since, self._said_short = now, False
        return []

    def _is_late(self, now: float) -> bool:
        return self._short_since is not None and now >= self._short_since + self.limits.elastic_timeout_s

    @property
    def _newcomer_timeout_s(self) -> float:
        """How long those who wait do so for others of their discovery; all are newcomers to the first epoch."""
        if self.epoch == 0:
            return max(FIRST_EPOCH_S, self.limits.elastic_timeout_s)
        return self.limits.newcomer_timeout_s

    def _note_ready(self, newcomers: Iterable[Worker], now: float) -> None:
        for worker in newcomers:
            self._ready_since.setdefault(worker.discovery, now)

    def _late_discoveries(self, now: float) -> set[int]:
        """Those whose other newcomers are waited for no longer."""
        return {number for number, since in self._ready_since.items() if now >= since + self._newcomer_timeout_s}

    def _starting(self, usable: Mapping[str, int]) -> list[Worker]:
        return [w for w in self._alive() if w.state is State.STARTING and w.slot < usable.get(w.host, 0)]

    def _comes_back(self, host: str, now: float) -> bool:
        """Whether it may be used again after a while."""
        return host in self._hosts and now < self._hosts[host].until < float("inf")

    def _machine(self, host: str) -> str:
        return "" if host in self._here else host

    def _usage(self, host: str) -> _Usage:
        """How a host that has or had a worker is used."""
        return self._hosts.get(host) or self._past[host]

    def _usable(self, now: float) -> Mapping[str, int]:
        return {name: usage.slots for name, usage in self._hosts.items() if usage.until <= now}

    def _cooldown_s(self, times: int) -> float:
        if self.limits.cooldown_s is None:
            return float("inf")
        shortest, longest = self.limits.cooldown_s
        return min(longest, shortest * 2 ** min(times - 1, 60))

    def _alive(self) -> Iterator[Worker]:
        return (w for w in self.workers.values() if w.state is not State.ENDED and not w.dismissed)

    def _running(self) -> list[Worker]:
        return [w for w in self.members if w.state is State.MEMBER]

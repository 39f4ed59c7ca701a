"""What a user can ask of an elastic job, by lightccrun's flags (command_line.py) or by arguments of run(), and what it
means together."""
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from lightcc.elastic.limits import Limits
from lightcc.launch import hosts
from lightcc.launch.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from lightcc.launch.seconds import from_environment, seconds

# What values may be: of a flag's text or of an argument. ValueError says what was expected.

def whole(value: Any) -> int:
    if not str(value).isdecimal():
        raise ValueError(f"'{value}' is not a whole number, 0 or more")
    return int(value)


def count(value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"'{value}' is not a whole number, 1 or more")
    return int(value)


def cooldown(value: Any) -> tuple[float, float]:
    with contextlib.suppress(TypeError, ValueError):
        shortest, longest = map(seconds, value)
        if 0 < shortest <= longest:
            return shortest, longest
    raise ValueError("expected two times in seconds, the shorter first")


_MAKE_ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script")
_FOR_ELASTIC = {"slots_per_host": count, "reset_limit": whole, "blacklist_cooldown_range": cooldown,
                "elastic_timeout": seconds, "failures_per_host": count, "newcomer_timeout": seconds,
                "worker_timeout": seconds}
_NUMBERS = {"num_proc": count, "min_num_proc": count, "max_num_proc": count, **_FOR_ELASTIC}


@dataclass
class Options:
    """None: the user did not say. called: how an option is called where the user says it."""

    called: Callable[[str], str]
    num_proc: Optional[int] = None
    min_num_proc: Optional[int] = None
    max_num_proc: Optional[int] = None
    hosts: Optional[str] = None
    hostfile: Optional[str] = None
    host_discovery_script: Optional[str] = None
    slots_per_host: Optional[int] = None
    reset_limit: Optional[int] = None
    blacklist_cooldown_range: Optional[Sequence[float]] = None
    elastic_timeout: Optional[float] = None
    failures_per_host: Optional[int] = None
    newcomer_timeout: Optional[float] = None
    worker_timeout: Optional[float] = None

    @property
    def is_elastic(self) -> bool:
        return any(getattr(self, name) is not None for name in _MAKE_ELASTIC)

    def check(self) -> None:
        """Raises ValueError for values that are none, and for what cannot be together. Fills in num_proc."""
        if not self.is_elastic:
            for name in _FOR_ELASTIC:
                if getattr(self, name) is not None:
                    *some, last = map(self.called, _MAKE_ELASTIC)
                    raise ValueError(f"{self.called(name)} is for elastic jobs: say {', '.join(some)} or {last} too")
            return
        for name, kind in _NUMBERS.items():
            if getattr(self, name) is not None:
                try:
                    setattr(self, name, kind(getattr(self, name)))
                except ValueError as error:
                    raise ValueError(f"{self.called(name)}: {error}") from None
        if self.num_proc is None:
            self.num_proc = self.min_num_proc
        script = self.called("host_discovery_script")
        if self.host_discovery_script and (self.hosts or self.hostfile):
            raise ValueError(f"give either {script} or hosts ({self.called('hosts')}, {self.called('hostfile')}), not "
                             "both")
        if self.slots_per_host is not None and not self.host_discovery_script:
            raise ValueError(f"{self.called('slots_per_host')} is for hosts that a {script} names")

    def limits(self) -> Limits:
        """After check(). Raises ValueError if the numbers contradict each other."""
        num_proc, most = self._checked_num_proc(), self.max_num_proc
        least = num_proc if self.min_num_proc is None else self.min_num_proc
        names = [self.called(name) for name in ("min_num_proc", "num_proc", "max_num_proc")]
        if least > num_proc or (most is not None and most < num_proc):
            said = ", ".join(f"{name} {value}" for name, value in zip(names, (least, num_proc, most))
                             if value is not None)
            raise ValueError(f"{said}: expected {' <= '.join(names)}")
        timeout_s = self.elastic_timeout
        if timeout_s is None:
            timeout_s = from_environment("HOROVOD_ELASTIC_TIMEOUT", 600)
        cooldown_s = None if self.blacklist_cooldown_range is None else cooldown(self.blacklist_cooldown_range)
        return Limits(num_proc, least, most, timeout_s, self.reset_limit, cooldown_s,
                      self.failures_per_host or 1, bool(self.host_discovery_script),
                      Limits.newcomer_timeout_s if self.newcomer_timeout is None else self.newcomer_timeout)

    def discovery(self) -> HostDiscovery:
        """Raises ValueError or OSError as hosts.listed does, ValueError if the hosts have too few slots."""
        if self.host_discovery_script:
            return HostDiscoveryScript(self.host_discovery_script, self.slots_per_host)
        num_proc = self._checked_num_proc()
        listed = hosts.listed(self.hosts, self.hostfile)
        if not (self.hosts or self.hostfile):
            listed = [hosts.Host(socket.gethostname(), self.max_num_proc or num_proc)]
        found: dict[str, int] = {}
        for host in listed:
            found[host.name] = found.get(host.name, 0) + host.slots
        if sum(found.values()) < num_proc:
            raise ValueError(f"{num_proc} processes do not fit: the hosts have {sum(found.values())} slots")
        return FixedHosts(found)

    def _checked_num_proc(self) -> int:
        assert self.num_proc is not None  # check() has filled it in, or whoever made this
        return self.num_proc

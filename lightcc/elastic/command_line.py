"""lightccrun's flags of elastic jobs, and what they mean together."""
import argparse
import os
import socket
from typing import Optional

from lightcc.elastic.membership import Limits
from lightcc.runner import hosts
from lightcc.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript

_MAKE_ELASTIC = ("min_num_proc", "max_num_proc", "host_discovery_script")


def add_to(top: argparse.ArgumentParser) -> None:
    flags = top.add_argument_group("elastic jobs", "those with --min-np, --max-np or --host-discovery-script")
    flags.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=_count, metavar="N",
                       help="fewest workers that go on when others are lost; default: -np")
    flags.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=_count, metavar="N",
                       help="most workers that run; default: all slots of the hosts")
    flags.add_argument("--slots-per-host", type=_count, metavar="N",
                       help="workers of a host that the script names without a number")
    flags.add_argument("--host-discovery-script", metavar="SCRIPT",
                       help='a command that prints a line "host:slots" for each host; it is run every second')
    flags.add_argument("--elastic-timeout", type=_seconds, metavar="SECONDS",
                       help="that the job waits for -np slots at its start, and for --min-np workers after a loss; "
                            "default 600")
    flags.add_argument("--reset-limit", type=_whole, metavar="N", help="most resets of the job; default: no limit")
    flags.add_argument("--blacklist-cooldown-range", nargs=2, type=_seconds, metavar=("MIN", "MAX"),
                       help="seconds for which a host whose worker failed is not used, the first time and at most; "
                            "they double; default: for ever")
    flags.add_argument("--failures-per-host", type=_count, metavar="N",
                       help="failures of a host's workers until it is not used any more; default 1")
    flags.add_argument("--worker-timeout", type=_seconds, metavar="SECONDS",
                       help="a worker that does not answer for so long (stopped, stuck in the kernel) is killed; "
                            "default 30")


def is_elastic(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) is not None for name in _MAKE_ELASTIC)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be together. Fills in -np."""
    if not is_elastic(args):
        for name in ("slots_per_host", "elastic_timeout", "reset_limit", "blacklist_cooldown_range",
                     "failures_per_host", "worker_timeout"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for elastic jobs: say --min-np, --max-np or "
                                 "--host-discovery-script too")
        return
    if args.num_proc is None:
        args.num_proc = args.min_num_proc
    if args.host_discovery_script and (args.hosts or args.hostfile):
        raise ValueError("give either --host-discovery-script or hosts (-H, --hostfile), not both")
    if args.slots_per_host is not None and not args.host_discovery_script:
        raise ValueError("--slots-per-host is for hosts that a --host-discovery-script names")


def limits(args: argparse.Namespace) -> Limits:
    """Raises ValueError if the numbers contradict each other."""
    least = args.num_proc if args.min_num_proc is None else args.min_num_proc
    most = args.max_num_proc
    if not 1 <= least <= args.num_proc or (most is not None and most < args.num_proc):
        raise ValueError(f"--min-np {least}, -np {args.num_proc}" + ("" if most is None else f", --max-np {most}")
                         + ": expected --min-np <= -np <= --max-np")
    cooldown: Optional[tuple[float, float]] = None
    if args.blacklist_cooldown_range is not None:
        cooldown = tuple(args.blacklist_cooldown_range)
        if not 0 < cooldown[0] <= cooldown[1]:
            raise ValueError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: expected two times, the "
                             "shorter first")
    timeout_s = _timeout_s() if args.elastic_timeout is None else args.elastic_timeout
    return Limits(args.num_proc, least, most, timeout_s, args.reset_limit, cooldown, args.failures_per_host or 1,
                  hosts_may_come=bool(args.host_discovery_script))


def _timeout_s() -> float:
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
    try:
        return _seconds(text)
    except argparse.ArgumentTypeError:
        raise ValueError(f"HOROVOD_ELASTIC_TIMEOUT={text}: expected seconds, 0 or more") from None


def discovery(args: argparse.Namespace) -> HostDiscovery:
    """Raises ValueError or OSError as hosts.parse and hosts.parse_file do."""
    if args.host_discovery_script:
        return HostDiscoveryScript(args.host_discovery_script, args.slots_per_host)
    if args.hosts or args.hostfile:
        listed = hosts.parse(args.hosts) if args.hosts else hosts.parse_file(args.hostfile)
    else:
        listed = [hosts.Host(socket.gethostname(), args.max_num_proc or args.num_proc)]
    found: dict[str, int] = {}
    for host in listed:
        found[host.name] = found.get(host.name, 0) + host.slots
    if sum(found.values()) < args.num_proc:
        raise ValueError(f"{args.num_proc} processes do not fit: the hosts have {sum(found.values())} slots")
    return FixedHosts(found)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds, 0 or more")
    return value

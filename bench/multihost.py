"""What an all-reduce between hosts takes: lightcc beside torch.distributed's gloo, in the same processes, by turns.

    python bench/multihost.py                         # as root: 2 hosts of 1 rank, then 2 hosts of 2; two minutes
    python bench/multihost.py --hosts 1,1 --sizes 16M,64M --rounds 9
    python bench/multihost.py --loopback              # without root: hosts in name only, joined by the loopback device
    python bench/multihost.py --also old/_lightcc.so  # another build of the core as well, by turns
    python bench/multihost.py --rates 1gbit --hosts 2,2 2,2,2,2 3,1 --flat --sizes 16M,64M --rounds 9

The hosts are network namespaces on one bridge, made here and removed at the end (tests/multihost/emulated.py), so all
of them share this machine's cores and memory. Every size is first checked on random numbers. A round takes one sample
of each side, in turning order: the ranks begin together, after a pause, and the slowest counts. It reports medians,
the median of the rounds' ratios with its bootstrap interval, and how far the 90th percentile and the largest sample are
from the median. Goals that are missed are printed as such, and the exit code stays 0: speed is not a test.

With a rate, every host's cable carries so much each way, and a row is also held against the bound of its wire,
2 (H - 1) / H * bytes / goodput for H hosts. Goodput is what the best of five streams each way between two hosts brings,
before the rows and once more after them; where it is below 0.95 of the rate the bound would be too easy, and the row
says so.
"""
import argparse
import contextlib
import ctypes
import json
import os
import re
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from peers import gloo, own
from report import KIB, MIB, ratio_of, size_text, time_text
from teams import Team, become_rank
from where import heading, surroundings

import lightcc.torch as hvd

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "multihost"))
import emulated  # noqa: E402

SIDES = {side.NAME: side for side in (own, gloo)}
ALSO = "lightcc, other build"
FLAT = "lightcc, flat"
SIZES = (4 * KIB, MIB, 16 * MIB, 64 * MIB)
CALLS = {4 * KIB: 20}            # in one sample; 1 of other sizes
GOAL_RATIO = {((1, 1), 16 * MIB): 0.8, ((1, 1), 64 * MIB): 0.8}
GOAL_SPREAD = 2.0                # the largest sample, by the median: where there is a goal for the ratio
LEAST_BOUND_BYTES = MIB          # of a smaller message the bound says nothing
LEAST_GOODPUT = 0.95             # of the rate
STREAMS, STREAM_S, STREAM_BYTES, STREAM_TIMEOUT_S = 5, 0.6, 256 * KIB, 20
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Of a cable with a rate. A burst that is much of a message would refill between two calls; segments must fit in it, and
# small ones cost the machine more than the messages do.
CABLE, CABLE_OF_SMALL = {"burst": "128kb"}, {"burst": "32kb", "gso_bytes": 16 * KIB}
LEAST_BYTES_FOR_CABLE = 16 * MIB
CLONE_NEWNET = 0x40000000
STORE_PORT, STREAM_PORT = 4711, 4712


# What runs on every rank

class Place(NamedTuple):
    """Where a rank is: a host of its own, or one in name only."""
    host: int
    local_rank: int
    local_size: int
    store: str                # host:port
    namespace: Optional[str]  # None: the hosts are joined by the loopback device


class Rank:
    """One process, which takes part in both sides."""

    def __init__(self, rank: int, size: int, places: Sequence[Place], with_gloo: bool, folder: str, secret: str):
        place = places[rank]
        if place.namespace:
            enter(place.namespace)
        torch.set_num_threads(1)
        become_rank(rank, size, folder)
        os.environ.update(HOROVOD_LOCAL_RANK=str(place.local_rank), HOROVOD_LOCAL_SIZE=str(place.local_size),
                          LIGHTCC_STORE_ADDR=place.store, LIGHTCC_SECRET=secret,
                          GLOO_SOCKET_IFNAME="eth0" if place.namespace else "lo")
        if not place.namespace:
            os.environ.update(LIGHTCC_HOST_ID=str(place.host), LIGHTCC_IFACE="lo")
        hvd.init()
        self._with_gloo = with_gloo
        if with_gloo:
            gloo.init(rank, size, f"{folder}/gloo")
        self._rank, self._size = rank, size
        self._source = self._tensor = torch.empty(0)

    def shape(self) -> Tuple[int, int, int]:
        """What lightcc has found out: ranks, ranks of this host, hosts."""
        return hvd.size(), hvd.local_size(), hvd.cross_size()

    def check(self, side: str, nbytes: int) -> None:
        """AssertionError unless random numbers of so many bytes are added up."""
        self.prepare(nbytes)
        SIDES[side].allreduce_in_place(self._tensor)
        expected = sum(random_numbers(nbytes, rank) for rank in range(self._size))
        torch.testing.assert_close(self._tensor, expected, msg=lambda text: f"{side}, {size_text(nbytes)}: {text}")

    def prepare(self, nbytes: int) -> None:
        """The same numbers before each sample, in the same memory."""
        if self._source.numel() * 4 != nbytes:
            self._source = random_numbers(nbytes, self._rank)
            self._tensor = torch.empty_like(self._source)
        self._tensor.copy_(self._source)

    def measure(self, side: str, calls: int) -> float:
        """Seconds of a call."""
        reduce = SIDES[side].allreduce_in_place
        begin = time.perf_counter()
        for _ in range(calls):
            reduce(self._tensor)
        return (time.perf_counter() - begin) / calls

    def stream(self, listens: int, sends: int, address: str) -> Optional[float]:
        """Bytes a second that arrive in a stream to and fro between these two ranks; None on others."""
        if self._rank not in (listens, sends):
            return None
        if self._rank == listens:
            with socket.create_server((address, STREAM_PORT)) as listener:
                listener.settimeout(STREAM_TIMEOUT_S)
                joined, _ = listener.accept()
        else:
            joined = connect(address)
        with joined:
            joined.settimeout(STREAM_TIMEOUT_S)
            return duplex(joined)

    def end(self) -> None:
        if self._with_gloo:
            gloo.shutdown()
        hvd.shutdown()


def enter(namespace: str) -> None:
    """From now on this thread, and those that it starts, have the network of that host."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def connect(address: str) -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, STREAM_PORT), STREAM_TIMEOUT_S)
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens at {address}")


def duplex(joined: socket.socket) -> float:
    """Both ends send for STREAM_S; the rate between the first byte that comes and the last."""
    def send() -> None:
        data, until = bytes(STREAM_BYTES), time.perf_counter() + STREAM_S
        while time.perf_counter() < until:
            joined.sendall(data)
        joined.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer, received = bytearray(STREAM_BYTES), 0
    first = joined.recv_into(buffer)
    begin = time.perf_counter()
    while count := joined.recv_into(buffer):
        received += count
    seconds = time.perf_counter() - begin
    sender.join()
    return received / seconds if first else 0.0


def random_numbers(nbytes: int, rank: int) -> torch.Tensor:
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1000 + rank))


# Hosts and their ranks

@contextlib.contextmanager
def places_on(hosts: Sequence[int], loopback: bool, rate: str, least_bytes: int) -> Iterator[List[Place]]:
    """The ranks of hosts that have so many each. The hosts last as long as the context."""
    spots = [(host, local, ranks) for host, ranks in enumerate(hosts) for local in range(ranks)]
    if loopback:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield [Place(*spot, f"127.0.0.1:{port}", None) for spot in spots]
        return
    cable = {} if not rate else CABLE if least_bytes >= LEAST_BYTES_FOR_CABLE else CABLE_OF_SMALL
    with emulated.Hosts(len(hosts), rate, **cable) as made:
        store = f"{made.addresses('h0')[0]}:{STORE_PORT}"
        yield [Place(*spot, store, made.namespace(f"h{spot[0]}")) for spot in spots]


class Contest:
    """The teams that measure; which of them, and as which side, by the name of what is measured."""

    def __init__(self, stack: contextlib.ExitStack, hosts: Sequence[int], rate: str, args: argparse.Namespace):
        self._stack, self._hosts = stack, hosts
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        # All teams share the hosts, and thus the cables; one at a time uses them.
        self._places = stack.enter_context(places_on(hosts, args.loopback, rate, min(args.sizes)))
        self._main = self._team(own.NAME, True)
        self.sides = {side: (self._main, side) for side in SIDES}
        if args.flat:
            with environment(LIGHT_2D_ALLREDUCE="0"):
                self.sides[FLAT] = (self._team(FLAT, False), own.NAME)
        if args.also:
            with environment(LIGHTCC_LIBRARY=str(args.also.resolve())):
                self.sides[ALSO] = (self._team(ALSO, False), own.NAME)

    def goodput(self) -> float:
        """Bytes a second of the best stream each way between the first two hosts."""
        other, address = self._hosts[0], self._places[0].store.rpartition(":")[0]
        return max(min(rate for rate in self._main.ask("stream", 0, other, address) if rate is not None)
                   for _ in range(STREAMS))

    def _team(self, name: str, with_gloo: bool) -> Team:
        home = Path(self._folder) / name.replace(" ", "")
        home.mkdir()
        made = Team(name, len(self._places), Rank, (self._places, with_gloo, str(home), secrets.token_hex(16)))
        self._stack.callback(made.end)
        found = made.ask("shape")[0]
        if found != (sum(self._hosts), self._hosts[0], len(self._hosts)):
            raise SystemExit(f"{name} takes {self._hosts} for (ranks, of one host, hosts) = {found}")
        return made


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def samples_of(teams: Dict[str, Tuple[Team, str]], nbytes: int, rounds: int, pause_s: float) -> Dict[str, List[float]]:
    """Seconds of a call, of each name and round."""
    samples: Dict[str, List[float]] = {name: [] for name in teams}
    calls = CALLS.get(nbytes, 1)
    for team, side in teams.values():
        team.ask("check", side, nbytes)
    names = list(teams)
    for turn in range(rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            team, side = teams[name]
            team.ask("prepare", nbytes)
            time.sleep(pause_s)  # as between steps of a training: whoever watches the network has fallen asleep
            samples[name].append(max(team.ask("measure", side, calls)))
    return samples


# What the samples amount to

def row_of(hosts: Tuple[int, ...], rate: str, nbytes: int, samples: Dict[str, List[float]]) -> Dict[str, Any]:
    ours = samples[own.NAME]
    goal = None if rate else GOAL_RATIO.get((hosts, nbytes))
    ratios = {name: ratio_of(ours, xs) for name, xs in samples.items() if name != own.NAME}
    median = {name: statistics.median(xs) for name, xs in samples.items()}
    p90 = {name: sorted(xs)[int(0.9 * (len(xs) - 1) + 0.5)] for name, xs in samples.items()}
    spread = {name: max(xs) / median[name] for name, xs in samples.items()}
    met = None if goal is None else ratios[gloo.NAME][0] <= goal and spread[own.NAME] <= GOAL_SPREAD
    return {"hosts": hosts, "rate": rate, "bytes": nbytes, "median_s": median, "p90_s": p90, "spread": spread,
            "ratios": ratios, "goal": goal, "met": met, "samples_s": samples}


def hold_against_wire(row: Dict[str, Any], goodput: float) -> None:
    hosts = len(row["hosts"])
    row["bound_s"] = 2 * (hosts - 1) / hosts * row["bytes"] / goodput
    row["of_bound"] = {name: seconds / row["bound_s"] for name, seconds in row["median_s"].items()}


TITLE = (f"{'':<10} {'':<22} {'median':>9} {'p90':>9} {'largest':>9} {'/ median':>8}   {'lightcc to it':<22} goal")


def lines_of(row: Dict[str, Any]) -> str:
    lines, label = [], size_text(row["bytes"])
    for name, xs in row["samples_s"].items():
        ratio = goal = ""
        if name in row["ratios"]:
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*row["ratios"][name])
        elif row["goal"] is not None:
            verdict = "ok" if row["met"] else "MISSED"
            goal = f"<= {row['goal']:g} x {gloo.NAME}, no sample above {GOAL_SPREAD:g} x its median: {verdict}"
        lines.append(f"{label:<10} {name:<22} {time_text(row['median_s'][name]):>9} {time_text(row['p90_s'][name]):>9} "
                     f"{time_text(max(xs)):>9} {row['spread'][name]:>8.2f}   {ratio:<22} {goal}".rstrip())
        label = ""
    return "\n".join(lines)


def wire_line(row: Dict[str, Any]) -> str:
    return f"{size_text(row['bytes']):<10} {time_text(row['bound_s']):>9}  " + ", ".join(
        f"{name} {ratio:.3f}" for name, ratio in row["of_bound"].items())


def parse_rate(text: str) -> str:
    if not re.fullmatch(r"none|[\d.]+[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r}: none, or a rate as 100mbit or 1gbit")
    return "" if text == "none" else text


def bytes_a_second(rate: str) -> float:
    return float(rate[:-4]) * UNITS[rate[-4:]] / 8


def host_text(hosts: Sequence[int]) -> str:
    return f"{len(hosts)} hosts of {', '.join(map(str, hosts))} ranks"


def parse_hosts(text: str) -> Tuple[int, ...]:
    hosts = tuple(int(ranks) for ranks in text.split(","))
    if len(hosts) < 2 or min(hosts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: the ranks of two hosts or more, as 2,2")
    return hosts


def parse_size(text: str) -> int:
    unit = {"K": KIB, "M": MIB}.get(text[-1:].upper())
    nbytes = int(text[:-1]) * unit if unit else int(text)
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: whole floats of 4 bytes")
    return nbytes


def contest(hosts: Tuple[int, ...], rate: str, args: argparse.Namespace) -> List[Dict[str, Any]]:
    joined = ", joined by loopback" if args.loopback else f", {rate} each" if rate else ""
    print(f"\n{host_text(hosts)}{joined}\n{TITLE}", flush=True)
    rows = []
    with contextlib.ExitStack() as stack:
        sides = Contest(stack, hosts, rate, args)
        before = sides.goodput() if rate else 0.0
        for nbytes in args.sizes:
            rows.append(row_of(hosts, rate, nbytes, samples_of(sides.sides, nbytes, args.rounds, args.pause)))
            print(lines_of(rows[-1]), flush=True)
        if not rate:
            return rows
        goodput = max(before, sides.goodput())
    share = goodput / bytes_a_second(rate)
    print(f"goodput {goodput / 1e6:.1f} MB/s, {share:.2f} of the rate"
          f"{'' if share >= LEAST_GOODPUT else ': too little, this counts for nothing'}; time by the wire's bound:")
    for row in rows:
        if row["bytes"] >= LEAST_BOUND_BYTES:
            hold_against_wire(row, goodput)
            print(wire_line(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=parse_hosts, nargs="+", default=[(1, 1), (2, 2)], metavar="RANKS,RANKS",
                        help="ranks of each host; default 1,1 2,2")
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")], default=SIZES,
                        help="bytes, with K or M; default 4K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each case; default %(default)s")
    parser.add_argument("--pause", type=float, default=0.01, metavar="SECONDS",
                        help="between samples; default %(default)s")
    parser.add_argument("--rates", type=parse_rate, nargs="+", default=[""], metavar="RATE",
                        help="of each host's cable, each way, as 1gbit; none (the default) is what the machine can do")
    parser.add_argument("--flat", action="store_true", help="lightcc without its hierarchy as well, by turns")
    parser.add_argument("--loopback", action="store_true", help="hosts in name only; needs no root")
    parser.add_argument("--also", type=Path, metavar="LIBRARY", help="another build of _lightcc.so")
    parser.add_argument("--output", type=Path, default=Path("build/bench/multihost.json"), metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    if args.loopback and any(args.rates):
        parser.error("--rates: the loopback device has none")
    if not args.loopback and emulated.why_not():
        parser.error(f"{emulated.why_not()}; --loopback does without")
    where = surroundings(max(map(sum, args.hosts)), [own.VERSION, gloo.VERSION])
    where["congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"{heading(where)}; TCP: {where['congestion_control']}", flush=True)
    rows = []
    for rate in args.rates:
        for hosts in args.hosts:
            rows += contest(hosts, rate, args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "loopback": args.loopback, "rows": rows}, indent=1))
    print(f"\n{args.rounds} samples each, slowest rank; results were checked. All samples: {args.output}")


if __name__ == "__main__":
    main()

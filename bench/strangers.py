"""A job of two hosts whose UDP ports a stranger floods: its slowest step, and whether a host that is cut off meanwhile
is found in time.

    python bench/strangers.py                                # as root, on a quiet machine; about half an hour
    python bench/strangers.py --seconds 5 --rows 'tcp *'     # --list says which rows there are

Hosts are network namespaces (tests/multihost/emulated.py): h0 and h1 of the job, one rank each, and h2 of the stranger.
A step is an all-reduce of 4 KiB and one of 1 MiB. Flooded is h0's port: that of the heartbeats (rows `tcp`), or HARP's
(`harp`; `harp-auth` with HARP_AUTH), from h2 or by another user of h0 (tests/multihost/flood.py). The datagrams are
empty; random bytes of the length that the job's own have; or one of an earlier job's that had the same name, secret and
ports. After --seconds h1 is cut off while the flood goes on; "found" is when h0 raises. Ranks and flood share the cores
that there are, unless --core gives the flood one; --nice is the ranks', for a machine with other work.
"""
import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

from cables import emulated
from peers import own
from where import heading, surroundings

FLOOD = Path(emulated.__file__).with_name("flood.py")
sys.path.append(str(FLOOD.parent))
from flood import sniff  # noqa: E402

NETS: Dict[str, Dict[str, str]] = {
    "tcp": {}, "harp": {"LIGHTCC_NET": "harp"},
    "harp-auth": {"LIGHTCC_NET": "harp", "HARP_AUTH": "1", "HARP_SECRET": "bench"}}
SOURCES = ("another host", "another user")
PAYLOADS = ("empty", "right length", "replayed")
STORE_PORT, PORTS, NOBODY = 9900, "21000-21063", 65534
READY_S, ERROR_S, LIMIT_STEP_S, LIMIT_FOUND_S, STANDSTILL_S = 60, 30, 0.5, 5.0, 1.0
UDP_HEADER, HEARTBEAT = 8, b"lccb"

RANK = """
import time
import numpy as np
import lightcc.numpy as hvd

hvd.init()
small, large = np.ones(1 << 10, np.float32), np.ones(1 << 18, np.float32)
steps, slowest, said = 0, 0.0, time.monotonic()
try:
    while True:
        begin = time.monotonic()
        hvd.allreduce(small, name="small")
        hvd.allreduce(large, name="large")
        now = time.monotonic()
        steps, slowest = steps + 1, max(slowest, now - begin)
        if now > said + 0.1:
            print("at", now, steps, slowest, flush=True)
            said, slowest = now, 0.0
except hvd.HorovodInternalError as error:
    print("error", time.monotonic(), error, flush=True)
hvd.shutdown()
"""


class Job:
    def __init__(self, hosts: emulated.Hosts, net: str, nice: int) -> None:
        self.hosts = hosts
        self.folder = tempfile.TemporaryDirectory(prefix="lightcc-bench-")
        env = {**os.environ, "HOROVOD_SIZE": "2", "LIGHTCC_JOB_ID": "flood", "LIGHTCC_SECRET": "bench",
               "LIGHTCC_STORE_ADDR": f"{hosts.addresses('h0')[0]}:{STORE_PORT}", "LIGHTCC_PORT_RANGE": PORTS,
               **NETS[net]}
        self.ranks: List["subprocess.Popen[str]"] = []
        for rank in (0, 1):
            with open(self._file(rank), "w") as out:
                self.ranks.append(hosts.popen(
                    f"h{rank}", ["nice", "-n", str(nice), sys.executable, "-c", RANK], stdin=subprocess.DEVNULL,
                    stdout=out, stderr=subprocess.STDOUT, env={**env, "HOROVOD_RANK": str(rank)}))

    def __enter__(self) -> "Job":
        deadline = time.monotonic() + READY_S
        while any(len(self.steps(rank)) < 5 for rank in (0, 1)):
            if time.monotonic() > deadline or any(rank.poll() is not None for rank in self.ranks):
                self.__exit__()
                raise RuntimeError(f"the job does not begin: {self.said(0)} {self.said(1)}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def _file(self, rank: int) -> str:
        return os.path.join(self.folder.name, str(rank))

    def said(self, rank: int) -> str:
        with open(self._file(rank)) as file:
            return file.read()

    def steps(self, rank: int) -> List[Tuple[float, int, float]]:
        """When it said so: how many there were, and the slowest since it said so before."""
        found = re.findall(r"(?m)^at (\S+) (\d+) (\S+)$", self.said(rank))
        return [(float(now), int(count), float(slowest)) for now, count, slowest in found]

    def port(self, net: str) -> int:
        """That of h0 which is flooded. The heartbeats' is TCP's as well."""
        ports = {protocol: set(map(int, re.findall(r":(\d+) +\S+:\*", self.hosts.run("h0", ["ss", f"-H{protocol}na"]))))
                 for protocol in ("tl", "u")}
        found = ports["u"] & ports["tl"] if net == "tcp" else ports["u"] - ports["tl"]
        if len(found) != 1:
            raise RuntimeError(f"which of the ports of h0 is to be flooded? {ports}")
        return found.pop()

    def datagram(self, net: str) -> bytes:
        """One that h1 sends to that port."""
        port = self.port(net)
        for _ in range(20):
            for packet in sniff(self.hosts, "h0", self.hosts.addresses("h1")[0], 40 if net != "tcp" else 4):
                payload = packet[UDP_HEADER:]
                if int.from_bytes(packet[2:4], "big") == port and payload.startswith(HEARTBEAT) == (net == "tcp"):
                    return payload
        raise RuntimeError("no datagram was seen")

    def error(self, rank: int) -> Tuple[float, str]:
        deadline = time.monotonic() + ERROR_S
        while not (found := re.search(r"(?m)^error (\S+) (.*)$", self.said(rank))):
            if time.monotonic() > deadline:
                return float("inf"), "no error"
            time.sleep(0.05)
        return float(found[1]), found[2]


class Row(NamedTuple):
    net: str
    source: str
    payload: str

    @property
    def name(self) -> str:
        return f"{self.net} {self.source}, {self.payload}"


def measure(hosts: emulated.Hosts, row: Row, payload: bytes, args: argparse.Namespace) -> str:
    with Job(hosts, row.net, args.nice) as job:
        calm_from = time.monotonic()
        time.sleep(args.calm)
        calm_to = time.monotonic()
        command = [sys.executable, "-S", str(FLOOD), hosts.addresses("h0")[0],
                   str(job.port(row.net)), payload.hex(), "--rate", str(args.rate), "--seconds",
                   str(args.seconds + LIMIT_FOUND_S + 2)]
        if args.core is not None:
            command += ["--core", str(args.core)]
        if args.apart:
            command.append("--apart")
        if row.source == "another user":
            command += ["--user", str(NOBODY)]
        stranger = hosts.popen("h0" if row.source == "another user" else "h2", command, stdout=subprocess.PIPE)
        stranger.stdout.readline()
        flood_from = time.monotonic()
        while time.monotonic() < flood_from + args.seconds and job.ranks[0].poll() is None:
            time.sleep(0.05)
        hosts.cut("h1")
        cut = time.monotonic()
        try:
            found = job.error(0)
            sent, seconds = stranger.communicate(timeout=READY_S)[0].split()[1:]
        finally:
            hosts.restore("h1")
            stranger.kill()
        steps = job.steps(0)

    def within(start: float, end: float) -> Tuple[float, float]:
        """The slowest step, and how many a second. A step that is not over at the end counts with what it took."""
        chosen = [step for step in steps if start < step[0] <= end]
        if not chosen:
            return end - start, 0.0
        unfinished = end - chosen[-1][0]
        slowest = max(slowest for _, _, slowest in chosen)
        return (max(slowest, unfinished) if unfinished > STANDSTILL_S else slowest,
                (chosen[-1][1] - chosen[0][1]) / (end - start))

    calm, flooded = within(calm_from, calm_to), within(flood_from, cut)
    is_good = flooded[0] <= LIMIT_STEP_S and 0 < found[0] - cut <= LIMIT_FOUND_S
    return (f"{row.name:<40}{int(sent) / float(seconds):9,.0f}/s {calm[0]:8.3f} s {flooded[0]:8.3f} s {calm[1]:7.0f}/s "
            f"{flooded[1]:7.0f}/s {found[0] - cut:7.2f} s  {'' if is_good else 'MISSED: ' + found[1]}").rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=["*"], metavar="PATTERN", help="default: all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="of the flood before the cut; default %(default)s")
    parser.add_argument("--calm", type=float, default=10, help="seconds before the flood; default %(default)s")
    parser.add_argument("--rate", type=float, default=350_000, help="datagrams a second; default %(default)s")
    parser.add_argument("--apart", action="store_true", help="the kernel is handed each datagram by itself, and sends "
                                                             "fewer; else those that are not empty go together")
    parser.add_argument("--core", type=int, help="of the flood")
    parser.add_argument("--nice", type=int, default=0, help="of the ranks; default %(default)s")
    args = parser.parse_args()
    rows = [row for net in NETS for source in SOURCES for payload in PAYLOADS
            for row in [Row(net, source, payload)] if any(fnmatch.fnmatch(row.name, one) for one in args.rows)]
    if args.list:
        print("\n".join(row.name for row in rows))
        return
    print(heading(surroundings(2, [own.VERSION])))
    print(f"{'':<40}{'sent':>11} {'slowest step':>21} {'steps':>19}  {'found':>8}")
    with emulated.Hosts(3) as hosts:
        earlier: Dict[str, bytes] = {}
        for row in rows:
            if row.net not in earlier:
                with Job(hosts, row.net, args.nice) as job:
                    earlier[row.net] = job.datagram(row.net)
            one = earlier[row.net]
            payload = {"empty": b"", "right length": os.urandom(len(one)), "replayed": one}[row.payload]
            print(measure(hosts, row, payload, args), flush=True)


if __name__ == "__main__":
    main()

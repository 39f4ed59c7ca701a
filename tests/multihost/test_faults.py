"""What happens to a job on several hosts when hosts, ranks and connections fail, and others connect. Whoever is lost is
named on all other ranks; what is no loss is survived without a word."""
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import needs
from jobs import wait_until
from watched import Watched

pytestmark = pytest.mark.long

# Here two cores may have much else to do.
DEADLINE_S = 20.0  # from a loss to the exception on all others, which takes up to 4.3 s
KILLED_S = 15.0    # from the end of a rank alone: a second, which is spent on making sure
CUT_S = 1.5        # survived: a host is in doubt after 1 s, and lost after 4 s
STARTED_S = 300    # and five steps made
AGAIN_S = 120      # init may take as long as a connection that is being made, and more
FORGOTTEN_S = 120  # TCP gives up after 20 s

with_nft = pytest.mark.skipif(bool(needs.why_not("nft")), reason=needs.why_not("nft"))


def expect_errors(job, survivors, since, names, within=DEADLINE_S):
    """Returns what they raised."""
    names = list(names)
    errors = job.errors(survivors)
    for rank, (when, text) in errors.items():
        print(f"{job.places} rank {rank}: {when - since:.2f} s: {text}")
        assert when - since < within, f"rank {rank} took {when - since:.1f} s: {text}"
        for name in names:
            assert name in text, f"rank {rank}: {text}"
    return [text for _, text in errors.values()]


def cut_for_good(hosts, job, lost):
    """All ranks elsewhere name those of the lost host, which raise as well, since they have lost the others."""
    hosts.cut(lost)
    since = time.monotonic()
    try:
        gone = job.on(lost)
        expect_errors(job, set(job.ranks) - set(gone), since, map(job.name, gone))
        expect_errors(job, gone, since, [])
    finally:
        hosts.restore(lost)


# ---- losses

@pytest.mark.parametrize("lost", ["h1", "h0"])
def test_a_host_that_is_cut_for_good(hosts, lost):
    """All at once: inside collectives on two and on three hosts, and with ranks that compute and then call. When the
    cable is back, all can begin again."""
    with Watched(hosts, "h0:2,h1:2", "again") as two, Watched(hosts, "h0:1,h1:1,h2:1") as three, \
            Watched(hosts, "h0:2,h1:1", "compute=4.5") as idle:
        jobs = [two, three, idle]
        for job in jobs:
            job.wait_ready(steps=0 if job is idle else 2)
        hosts.cut(lost)
        since = time.monotonic()
        try:
            for job in jobs:
                gone = job.on(lost)
                expect_errors(job, set(job.ranks) - set(gone), since, map(job.name, gone))
                expect_errors(job, gone, since, [])  # cut off, they have lost the others
        finally:
            hosts.restore(lost)
        two.let_stop()
        assert two.wait_for("again", seconds=AGAIN_S) == {rank: ["again 4"] for rank in two.ranks}
        for job in jobs:
            assert job.finish() == ""


@pytest.mark.parametrize("places, victim, words", [
    ("h0:2,h1:1", 2, []),           # alone on its host
    ("h0:1,h1:2", 2, []),           # a mate sees it
    ("h0:1,h1:1,h2:1", 0, []),
    ("h0:1,h1:2", 0, ["fork"]),     # a child goes on and has what it had
    ("h0:1,h1:1", 1, ["fork", "compute=1"]),
])
def test_a_killed_rank_is_named_by_all_others(hosts, places, victim, words):
    with Watched(hosts, places, *words) as job:
        job.wait_ready()
        time.sleep(random.Random(victim).random() * 0.1)
        job.kill(victim)
        since = time.monotonic()
        survivors = set(job.ranks) - {victim}
        expect_errors(job, survivors, since, [f"{job.name(victim)} died"], KILLED_S)
        err = job.finish(137, survivors)
        assert err.startswith(f"lightccrun: rank {victim} (pid {job.pids[victim]}, host {job.host[victim]}) "), err


@with_nft
def test_where_no_datagram_passes_a_killed_rank_is_still_named(hosts):
    """A warning says so. The rank's mate, which ends first, is not taken for the cause."""
    with firewall(hosts, "h1", "meta l4proto udp drop"), Watched(hosts, "h0:1,h1:2") as job:
        job.wait_ready()
        wait_until(lambda: job.err().count("UDP does not get through") == 3, "the warning of each rank", job.err)
        job.kill(2)
        expect_errors(job, [0, 1], time.monotonic(), [f"{job.name(2)} died"], KILLED_S)
        job.finish(137, [0, 1])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_fails_or_is_interrupted_ends_the_others(hosts, victim):
    """With an exception of its own, or by Ctrl-C, which may hit it inside a call of ours or outside. It leaves;
    of those who hear of it and leave as well, the others may hear first. The launcher names the first."""
    with Watched(hosts, "h0:1,h1:2", f"fail={victim}") as fails, Watched(hosts, "h0:1,h1:2") as interrupted:
        began = time.monotonic()
        interrupted.wait_ready()
        since = time.monotonic()
        interrupted.kill(victim, signal.SIGINT)
        survivors = set(interrupted.ranks) - {victim}
        for text in expect_errors(interrupted, survivors, since, []):
            assert f"KeyboardInterrupt on rank {victim}" in text or "has left (it ended with KeyboardInt" in text, text
        assert f"rank {victim} (pid" in interrupted.finish(130, survivors)
        fails.wait_ready(0)
        expect_errors(fails, survivors, began, [f"{fails.name(victim)} has left (it ended with ValueError: its own"],
                      STARTED_S)
        err = fails.finish(1, survivors)
        assert "ValueError: its own" in err and f"lightccrun: rank {victim} (pid" in err, err


# ---- no losses

@with_nft
def test_cuts_and_broken_connections_are_survived(hosts):
    with Watched(hosts, "h0:2,h1:2") as job:
        job.wait_ready()
        reset_all = ["ss", "-K", "-Htn"]
        hosts.cut("h1")
        time.sleep(CUT_S)
        hosts.restore("h1")
        job.go_on()
        hosts.cut("h1")
        time.sleep(CUT_S / 2)
        hosts.run("h1", reset_all)  # nobody hears of it
        time.sleep(CUT_S / 2)
        hosts.restore("h1")
        job.go_on()
        for host in ("h0", "h1"):
            before = connections(hosts, host)
            hosts.run(host, reset_all)
            job.go_on()
            assert len(before) > 3 and not before & connections(hosts, host)
        with firewall(hosts, "h1", "meta l4proto tcp reject with tcp reset"):
            time.sleep(CUT_S)
        job.go_on()
        assert job.stop() == ""


IN_TWO_DIMENSIONS = """
import sys, time
import numpy as np
import lightcc.numpy as hvd

hvd.init()
print("ready", flush=True)
base = (np.arange(8_000_000) % 7).astype(np.float32)
for step in range(3):
    total = hvd.allreduce(base + (hvd.rank() + step), name=f"a{step}", op=hvd.Sum)
    assert np.array_equal(total, hvd.size() * (base + step) + hvd.size() * (hvd.size() - 1) // 2), f"step {step}"
hvd.shutdown()
print("done", flush=True)
print("held []", flush=True)
"""


def test_a_cut_in_the_midst_of_2d(hosts, tmp_path):
    """Cables that make an all-reduce take seconds; the timeline shows that the cut was inside its exchange and its
    all-gather. The connections break as well."""
    file = tmp_path / "t.json"
    with slow_cables(hosts, ("h0", "h1"), "100mbit"), Watched(
            hosts, "h0:2,h1:2", program=IN_TWO_DIMENSIONS, HOROVOD_TIMELINE=str(file)) as job:
        wait_until_carried(hosts, "h1", 16 << 20)  # of 61 MiB a step
        hosts.cut("h1")
        cut = time.time()
        time.sleep(CUT_S / 2)
        before = connections(hosts, "h0")
        hosts.run("h0", ["ss", "-K", "-Htn"])
        assert len(before) > 3 and not before & connections(hosts, "h0")
        time.sleep(max(0.0, cut + CUT_S - time.time()))  # a host that is silent for longer is lost
        restored = time.time()
        hosts.restore("h1")
        assert job.stop() == ""
    events = json.loads(file.read_text())
    start = events[0]["args"]["start_time_since_epoch_in_micros"]
    for phase in ("CROSS_ALLREDUCE", "LOCAL_ALLGATHER"):
        times = [(start + e["ts"]) / 1e6 for e in events if e["name"] == phase and e["ph"] in "BE"]
        spans = list(zip(times[::2], times[1::2]))
        assert len(spans) == 3
        assert any(begin < cut and restored < end for begin, end in spans), (phase, spans, cut, restored)


def test_a_host_lost_in_the_midst_of_2d(hosts):
    """Nearly all the time passes inside of exchanges."""
    with slow_cables(hosts, ("h0", "h1"), "50mbit"), Watched(hosts, "h0:2,h1:2") as job:
        job.wait_ready(steps=0)
        wait_until_carried(hosts, "h1", 4 << 20)  # of 12 MiB a step
        cut_for_good(hosts, job, "h1")
        assert job.finish() == ""


def wait_until_carried(hosts, host, count):
    before = hosts.carried(host, "eth0")
    wait_until(lambda: hosts.carried(host, "eth0") - before > count, f"{count} bytes of {host}")


@contextlib.contextmanager
def slow_cables(hosts, names, rate):
    for name in names:
        hosts.run(name, ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb",
                         "latency", "50ms"])
    try:
        yield
    finally:
        for name in names:
            hosts.run(name, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def connections(hosts, host):
    return set(re.findall(r"\S+:\d+ +\S+:\d+", hosts.run(host, ["ss", "-Htn", "state", "established"])))


class firewall:
    """Rules of nft for what a host receives and sends, while in the context."""

    def __init__(self, hosts, host, *rules):
        self.hosts, self.host, self.rules = hosts, host, rules

    def __enter__(self):
        chains = "".join(f"chain {hook} {{ type filter hook {hook} priority 0; {'; '.join(self.rules)}; }}\n"
                         for hook in ("input", "output"))
        self.hosts.run(self.host, ["nft", "-f", "-"], input=f"table inet fault {{\n{chains}}}\n")

    def __exit__(self, *_):
        self.hosts.run(self.host, ["nft", "delete", "table", "inet", "fault"])


def test_a_stopped_rank_is_a_stall_and_a_stopped_host_is_lost(hosts):
    with Watched(hosts, "h0:2,h1:2", HOROVOD_STALL_CHECK_TIME_SECONDS="2") as stalled, \
            Watched(hosts, "h0:1,h1:2") as lost:
        for job in (stalled, lost):
            job.wait_ready()
        stopped = [(stalled, 3), *((lost, rank) for rank in lost.on("h1"))]
        for job, rank in stopped:
            job.kill(rank, signal.SIGSTOP)
        since = time.monotonic()
        expect_errors(lost, [0], since, map(lost.name, lost.on("h1")))
        time.sleep(max(0.0, since + 6 - time.monotonic()))
        for job, rank in stopped:
            job.kill(rank, signal.SIGCONT)
        awake = time.monotonic()
        expect_errors(lost, lost.on("h1"), awake, [])
        assert lost.finish() == ""
        stalled.go_on()
        err = stalled.stop()
        assert "stall" in err and stalled.name(3) in err and "[3]" not in err, err


# ---- unauthenticated connections

SCAN = """
import os, socket, sys, time
host, ports = sys.argv[1], list(map(int, sys.argv[2:]))
MAGIC = b"lightcc\\n"

def connect(port):
    connection = socket.create_connection((host, port), 60)
    connection.settimeout(60)
    return connection

def closed(connection):
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    connection.close()

for port in ports:
    connect(port).close()
    http = b"GET / HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n"
    for text in (http, os.urandom(100_000), MAGIC + os.urandom(4000), bytes(4000)):
        connection = connect(port)
        try:
            connection.sendall(text)
        except ConnectionError:
            pass
        closed(connection)  # told nothing of use, and not kept
    half = connect(port)
    half.sendall(MAGIC + bytes(7))
    half.close()
silent = [connect(port) for port in ports for _ in range(300 // len(ports))]
for i, connection in enumerate(silent):
    if i % 3 == 0:
        connection.sendall(MAGIC[:i % 8])
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(2000):
    datagrams.sendto(b"lccb" * (i % 2) + os.urandom(i % 1400), (host, ports[i % len(ports)]))
print("scanned", flush=True)
time.sleep(60)
"""


def listening(hosts, host, protocol="t"):
    return sorted({int(port) for port in re.findall(r":(\d+) +\S+:\*", hosts.run(
        host, ["ss", f"-H{protocol}lna" if protocol == "t" else "-Huna"]))})


def test_unauthenticated_connections(hosts):
    """From a host of the job and from another one, which then vanishes without a word."""
    with Watched(hosts, "h0:2,h1:2") as job:
        job.wait_ready()
        ports = {host: listening(hosts, host) for host in ("h0", "h1")}
        assert [len(found) for found in ports.values()] == [2, 2]  # the bootstrap exchange's has closed
        assert all(listening(hosts, host, "u") == ports[host] for host in ports)
        scanners = [hosts.popen(at, [sys.executable, "-S", "-c", SCAN, host, *map(str, ports[host])],
                                stdout=subprocess.PIPE) for at, host in (("h1", "h0"), ("h2", "h1"))]
        try:
            for scanner in scanners:
                assert scanner.stdout.readline() == "scanned\n"
            job.go_on()
            hosts.cut("h2")
            job.go_on()
            hosts.run("h1", ["ss", "-K", "-Htn"])  # ranks come again while the others are connected
            job.go_on(20)
            assert job.stop() == ""
        finally:
            hosts.restore("h2")
            for scanner in scanners:
                scanner.kill()
                scanner.communicate()


# ---- time

IDLE_S, IDLE_CPU_S = 10, 0.1
IDLE = """
import resource, time
import numpy as np
import lightcc.numpy as hvd

def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

hvd.init()
hvd.allreduce(np.ones(3), name="first")
time.sleep(1)
print("ready", flush=True)
before = cpu()
time.sleep(%d)
print("done", cpu() - before, flush=True)
hvd.allreduce(np.ones(3), name="last")
hvd.shutdown()
print("held []", flush=True)
""" % IDLE_S


@with_nft
def test_idle_costs_nothing_and_forgotten_connections_are_replaced(hosts):
    """Two tests, as both have to wait. A firewall between two hosts forgets a connection: none of its packets passes
    any more, in either direction. The job waits until TCP gives up, and goes on with another."""
    with Watched(hosts, "h0:2,h1:2", program=IDLE) as idle, Watched(hosts, "h2:1,h3:1") as job:
        job.wait_ready()
        idle.wait_for("ready")
        ports = re.findall(r"10\.77\.0\.4:(\d+) +10\.77\.0\.3:\d+", hosts.run("h3", ["ss", "-Htn"]))
        assert ports
        with firewall(hosts, "h3", f"tcp sport {{{','.join(ports)}}} drop", f"tcp dport {{{','.join(ports)}}} drop"):
            used = {rank: float(line.split()[1]) for rank, (line,) in idle.wait_for("done").items()}
            assert idle.finish() == ""
            print("idle:", used)
            assert max(used.values()) <= IDLE_CPU_S, used
            job.go_on(seconds=FORGOTTEN_S)
            assert job.stop() == ""

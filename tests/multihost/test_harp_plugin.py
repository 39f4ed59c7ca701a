"""HARP's network plugin for NCCL between two hosts, through NCCL's interface alone: what it survives, what ends a
communicator and with which words. Both sides are harp-plugtest, which checks every byte."""
import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import harp_peers
import pytest
from flood import sniff
from harp_peers import BUILD, MARGIN_S, forge, off_path

PLUGIN, PLUGTEST, STAT = BUILD / "libnccl-net-harp.so", BUILD / "harp-plugtest", BUILD / "harp-stat"
pytestmark = [harp_peers.needs_programs(PLUGIN, PLUGTEST, STAT), pytest.mark.long]

INVALID_ARGUMENT, REMOTE_ERROR = 4, 6  # of ncclResult_t
SHORT_MS, DEFAULT_MS = 1000, 10000
IDLE_COMMUNICATORS, IDLE_S, IDLE_CORES = 64, 2, 0.01
VERSIONS = ["12", "11", "10", "9", "8", "7", "6"]
CONFORMANCE_S = 120 * len(VERSIONS)
COUNTED_S, SOME_REPLAYED = 60, 10


class Pair(harp_peers.Pair):
    """h0 sends, h1 receives."""

    def __init__(self, hosts, *keys, **variables):
        super().__init__(hosts, [str(PLUGTEST), str(PLUGIN), "peer"], keys, {"HARP_IFNAME": "eth0", **variables})

    def expect_error(self, host, since, within_s):
        super().expect_error(host, since, within_s, [REMOTE_ERROR])

    def counters(self, host):
        """Of its connection, as harp-stat reads them."""
        (one,) = json.loads(subprocess.check_output([str(STAT), "--json", str(self.processes[host].pid)], text=True))
        return one


@pytest.fixture
def lose(hosts):
    """Drops this share of what comes to both hosts."""
    def set_to(share):
        for host in ("h0", "h1"):
            rule = f"meta l4proto udp numgen random mod 100000 < {round(share * 100000)} drop" if share else ""
            hosts.run(host, ["nft", "-f", "-"], input="add table ip loss\ndelete table ip loss\ntable ip loss {\n"
                      f"chain in {{\ntype filter hook input priority 0\n{rule}\n}}\n}}\n")
    yield set_to
    set_to(0)


@pytest.mark.parametrize("variables", [
    pytest.param({"HARP_PORT": "shm"}, id="shm"),
    pytest.param({"HARP_IFNAME": "lo"}, marks=pytest.mark.slow, id="udp"),
    pytest.param({"HARP_IFNAME": "lo", "HARP_MAX_RECVS": "8", "HARP_INLINE": "2"}, marks=pytest.mark.slow,
                 id="grouped receives, with a thread")])
def test_conformance(variables):
    """All cases of harp-plugtest, with versions 6 to 12."""
    out = subprocess.run([str(PLUGTEST), str(PLUGIN)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         env={**os.environ, "HARP_CONNECT_TIMEOUT_MS": "500", **variables}, timeout=CONFORMANCE_S,
                         check=False)
    said = out.stdout.split("\nversion ")
    assert out.returncode == 0 and [part.split()[0] for part in said[1:]] == VERSIONS, out.stdout
    assert all(part.count("\nok ") >= 20 for part in said[1:]), out.stdout


def test_lost_packets_are_sent_again(hosts, lose):
    with Pair(hosts) as pair:
        for share in (0.001, 0.01, 0.05):
            lose(share)
            pair.go_on(100)
        pair.stop()


def test_a_narrow_bottleneck(hosts):
    hosts.run("h0", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "32kb", "latency",
                     "5ms"])
    try:
        with Pair(hosts) as pair:
            pair.go_on(100)
            pair.stop()
    finally:
        hosts.run("h0", ["tc", "qdisc", "del", "dev", "eth0", "root"])


def test_a_peer_that_dies_or_stops_or_is_cut_off_is_named(hosts):
    """A remote error within the time-out: of the one that is left, and of both when the cable is pulled."""
    short = {"HARP_PEER_TIMEOUT_MS": str(SHORT_MS)}
    with Pair(hosts, **short) as receiver, Pair(hosts, **short) as sender, Pair(hosts, "idle=1", **short) as idle:
        receiver.go_on()
        since = time.monotonic()
        receiver.processes["h1"].kill()
        sender.processes["h0"].kill()
        idle.processes["h0"].send_signal(signal.SIGSTOP)
        receiver.expect_error("h0", since, SHORT_MS / 1000 + MARGIN_S)
        sender.expect_error("h1", since, SHORT_MS / 1000 + MARGIN_S)
        idle.expect_error("h1", since, SHORT_MS / 1000 + MARGIN_S)
    with Pair(hosts, **short) as pair:
        pair.go_on()
        hosts.cut("h1")
        since = time.monotonic()
        try:
            for host in ("h0", "h1"):
                pair.expect_error(host, since, SHORT_MS / 1000 + MARGIN_S)
        finally:
            hosts.restore("h1")


def test_three_seconds_without_a_peer_are_survived(hosts):
    """By default, whether it is stopped or its link is down."""
    with Pair(hosts) as stopped, Pair(hosts) as cut:
        for pair in (stopped, cut):
            pair.go_on()
        stopped.processes["h1"].send_signal(signal.SIGSTOP)
        hosts.run("h1", ["ip", "link", "set", "eth0", "down"])
        try:
            time.sleep(3)
        finally:
            hosts.run("h1", ["ip", "link", "set", "eth0", "up"])
        stopped.processes["h1"].send_signal(signal.SIGCONT)
        for pair in (stopped, cut):
            pair.go_on()
            pair.stop()


def test_what_cannot_be_connected_to_is_named(hosts):
    """A handle of something else, and one whose listener is gone."""
    def connect(handle, **variables):
        argv = [str(PLUGTEST), str(PLUGIN), "peer", "connect", f"handle={handle}"]
        process = hosts.popen("h0", argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**os.environ, "HARP_IFNAME": "eth0", **variables})
        try:
            return process.communicate(timeout=60)[0]
        finally:
            process.kill()

    assert f"error {INVALID_ARGUMENT} " in connect("5a" * 128)
    with Pair(hosts) as pair:
        handle = pair.wait("h1", "handle").split()[1]
        pair.stop()
    with contextlib.suppress(subprocess.TimeoutExpired):
        said = connect(handle, HARP_CONNECT_TIMEOUT_MS="500")
        assert f"error {REMOTE_ERROR} " in said and "nobody answered" in said, said
        return
    raise AssertionError("connecting to nobody does not end")


def test_forged_packets_are_refused_and_counted(hosts):
    """From a third host, with the sender's address, and real ones once more: nothing ends and the data stay right."""
    with Pair(hosts, "most=3000", HARP_GSO="0") as pair:
        pair.go_on()
        address = {host: hosts.addresses(host)[0] for host in ("h0", "h1")}
        real = sniff(hosts, "h1", address["h0"], 200)
        forge(hosts, address["h0"], address["h1"], off_path(real) + real)
        pair.go_on()
        deadline = time.monotonic() + COUNTED_S  # sockets may overflow, and counters are published now and then
        while pair.counters("h1")["duplicates"] < SOME_REPLAYED:
            assert time.monotonic() < deadline, pair.counters("h1")
            time.sleep(0.05)
        pair.stop()


def test_idle_communicators_cost_nothing(hosts):
    with Pair(hosts, "idle=1", f"connections={IDLE_COMMUNICATORS}", HARP_INLINE="2") as pair:
        looks = []
        while not looks or (looks[-1] >= IDLE_CORES and len(looks) < 6):  # another process's interrupts count as ours
            before = {host: cpu_seconds(process.pid) for host, process in pair.processes.items()}
            time.sleep(IDLE_S)
            looks.append(max(cpu_seconds(process.pid) - before[host]
                             for host, process in pair.processes.items()) / IDLE_S)
        assert looks[-1] < IDLE_CORES, looks


def cpu_seconds(pid):
    """Of all its threads, to the nanosecond."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9

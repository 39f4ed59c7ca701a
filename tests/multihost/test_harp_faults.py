"""What HARP's connections between two hosts survive, what ends them and with which words, and what forged packets do.
Both sides are tests/harp/peer.cc, which checks every byte; they are looked for in build/cmake, or in HARP_BUILD."""
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import harp_peers
import pytest
from flood import sniff
from harp_peers import MARGIN_S, counted, forge, off_path, on_path

PEER, BENCH = harp_peers.BUILD / "harp_peer", harp_peers.BUILD / "harp-bench"
pytestmark = harp_peers.needs_programs(PEER, BENCH)

PEER_FAILED, PEER_SILENT = 5, 6
SHORT_MS, DEFAULT_MS = 1000, 4000
IDLE_CONNECTIONS, IDLE_S, IDLE_CORES = 64, 2, 0.01
REFUSED = ("malformed", "unauthenticated", "out_of_window", "out_of_buffer", "duplicates")


class Pair(harp_peers.Pair):
    """Of tests/harp/peer.cc."""

    def __init__(self, hosts, *keys, **variables):
        super().__init__(hosts, [str(PEER)], [*keys, "interface=eth0"], variables)

    def stop(self):
        """In order; what each side has counted."""
        super().stop()
        return {host: json.loads(self.wait(host, "stats").partition(" ")[2]) for host in self.processes}

    def expect_error(self, host, since, within_s, codes=(PEER_FAILED, PEER_SILENT)):
        super().expect_error(host, since, within_s, codes)


@pytest.fixture(autouse=True)
def nothing_of_harp_is_left(hosts):
    """The pages of processes that were killed are removed by the next one that begins. Other tests run beside this one,
    and have pages of their own."""
    Pair.pids.clear()
    yield
    with Pair(hosts) as pair:
        pair.stop()
    folder = Path(f"/tmp/harp-{os.geteuid()}")
    pages = [page.name for page in folder.iterdir()] if folder.exists() else []
    assert [page for page in pages if int(page.partition("-")[0]) in Pair.pids] == []
    assert [name for name in os.listdir("/dev/shm") if "harp" in name] == []


# ---- peers that die, stop and are cut off

def test_a_killed_peer_is_named(hosts):
    """Under load, and where receives are posted and nothing is on its way; with both time-outs."""
    with Pair(hosts) as busy, Pair(hosts, "idle=1") as idle, Pair(hosts, f"timeout={SHORT_MS}") as short, \
            Pair(hosts, f"timeout={SHORT_MS}", "idle=1", "engine=2") as short_idle:
        for pair in (busy, short):
            pair.go_on()
        pairs = {busy: DEFAULT_MS, idle: DEFAULT_MS, short: SHORT_MS, short_idle: SHORT_MS}
        for i, pair in enumerate(pairs):
            pair.processes["h0" if i % 2 else "h1"].kill()
        since = time.monotonic()
        for i, (pair, timeout_ms) in sorted(enumerate(pairs.items()), key=lambda item: item[1][1]):
            pair.expect_error("h1" if i % 2 else "h0", since, timeout_ms / 1000 + MARGIN_S)


def test_a_peer_that_is_stopped_for_three_seconds_is_survived(hosts):
    """Either side, with traffic and without. Where the time-out is shorter, it is not."""
    with Pair(hosts) as first, Pair(hosts) as second, Pair(hosts, "idle=1") as idle, \
            Pair(hosts, f"timeout={SHORT_MS}") as short:
        stopped = {first: "h0", second: "h1", idle: "h1", short: "h1"}
        for pair in (first, second, short):
            pair.go_on()
        for pair, host in stopped.items():
            pair.processes[host].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        time.sleep(2.5)
        for pair in (first, second, idle):
            pair.processes[stopped[pair]].send_signal(signal.SIGCONT)
        short.expect_error("h0", since, SHORT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        short.processes["h1"].send_signal(signal.SIGCONT)
        short.expect_error("h1", time.monotonic(), SHORT_MS / 1000 + MARGIN_S)
        for pair in (idle, first, second):
            for host in pair.processes:
                pair.tell(host, "go")
            pair.go_on()
            pair.stop()


def test_a_peer_that_is_stopped_for_ever_is_named(hosts):
    with Pair(hosts) as busy, Pair(hosts, "idle=1") as idle:
        busy.go_on()
        for pair in (busy, idle):
            pair.processes["h1"].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        for pair in (busy, idle):
            pair.expect_error("h0", since, DEFAULT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        assert time.monotonic() - since > 3  # it was survived for so long
        for pair in (busy, idle):
            pair.processes["h1"].send_signal(signal.SIGCONT)
        for pair in (busy, idle):
            pair.expect_error("h1", time.monotonic(), DEFAULT_MS / 1000 + MARGIN_S)


def test_a_cut_of_two_seconds_is_survived_and_one_for_good_is_named(hosts):
    """A cable that is pulled behind the switch, and then the host's own interface that goes down."""
    with Pair(hosts) as pair, Pair(hosts, f"timeout={SHORT_MS}") as short:
        pair.go_on()
        hosts.cut("h1")
        since = time.monotonic()
        time.sleep(2)
        hosts.restore("h1")
        for host in ("h0", "h1"):
            short.expect_error(host, since, SHORT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        pair.go_on()
        hosts.run("h0", ["ip", "link", "set", "eth0", "down"])
        try:
            time.sleep(1)
        finally:
            hosts.run("h0", ["ip", "link", "set", "eth0", "up"])
        pair.go_on()
        hosts.cut("h1")
        since = time.monotonic()
        try:
            for host in ("h0", "h1"):
                pair.expect_error(host, since, DEFAULT_MS / 1000 + MARGIN_S, [PEER_SILENT])
        finally:
            hosts.restore("h1")


# ---- forged packets

@pytest.mark.parametrize("keys", [["secret=of both"], []], ids=["authenticated", "not authenticated"])
def test_forged_packets_are_refused_and_counted(hosts, keys):
    """From a third host, with the sender's address: by somebody who does not see the packets, and, where they are
    authenticated, by somebody who does. The data stay right; nothing ends."""
    with Pair(hosts, "most=3000", *keys, HARP_GSO="0") as pair:
        pair.go_on()
        for source, destination in (("h0", "h1"), ("h1", "h0")):
            address = {host: hosts.addresses(host)[0] for host in ("h0", "h1", "h2")}
            real = sniff(hosts, destination, address[source], 200)
            packets = off_path(real) + (on_path(real) if keys else [])
            forge(hosts, address[source], address[destination], packets)
            forge(hosts, address["h2"], address[destination], packets)
            pair.go_on()
        for host, stats in pair.stop().items():
            refused = {name: counted(stats, name) for name in REFUSED}
            print(host, refused)
            # Sockets overflow, and what is no packet at all the port has dropped.
            assert refused["out_of_window"] >= 200
            if keys:
                assert refused["unauthenticated"] > 100 and sum(refused.values()) > len(packets)


# ---- idle

def idle_cores(hosts):
    """The larger share of a core that a side of idle connections takes."""
    address = hosts.addresses("h1")[0]
    server = hosts.popen("h1", [str(BENCH), "--listen", f"{address}:4720", "--sessions", "1", "--interface", "eth0"])
    try:
        line = hosts.run("h0", [
            str(BENCH), "--connect", f"{address}:4720", "--interface", "eth0", "--mode", "idle", "--connections",
            str(IDLE_CONNECTIONS), "--message", "64", "--depth", "1", "--engine-mode", "threads", "--seconds",
            str(IDLE_S)])
        assert server.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
    cores = {side: json.loads(line)[side]["cores"] for side in ("client", "server")}
    print(cores)
    return max(cores.values())


def test_idle_connections_cost_nothing(hosts):
    looks = []
    while not looks or (looks[-1] >= IDLE_CORES and len(looks) < 6):  # another process's interrupts count as ours
        looks.append(idle_cores(hosts))
    assert looks[-1] < IDLE_CORES, looks

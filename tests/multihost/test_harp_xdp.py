"""Jobs whose hosts talk past the kernel (LIGHTCC_NET=xdp), and harpd, the daemon that shares an interface out. An
emulated host's interface has one queue, so there is one rank a host."""
import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import harp_peers
import pytest
import test_harp_faults
import test_harp_plugin
from test_faults import KILLED_S, expect_errors
from test_harp_links import CHECKS, expect_cuts_as_with_tcp

import ranks
from emulated import Hosts
from watched import PROGRAM, Watched

HARPD = harp_peers.BUILD / "harpd"
pytestmark = harp_peers.needs_programs(HARPD, test_harp_faults.PEER, test_harp_plugin.PLUGTEST, test_harp_plugin.PLUGIN)

XDP = {"LIGHTCC_NET": "xdp"}
COUNTED = """
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib

def datagrams():  # that the kernel's UDP has received
    with open("/proc/net/snmp") as counters:
        names, values = [line.split() for line in counters if line.startswith("Udp:")]
    return int(values[names.index("InDatagrams")])

hvd.init()
hvd.allreduce(np.ones(1000, np.float32), name="first")
before = datagrams()
hvd.allreduce(np.ones(1_000_000, np.float32), name="x", op=hvd.Sum)
print("counts", lib.counters()["harp_bytes"], datagrams() - before)
hvd.shutdown()
"""


def test_messages_and_nccls_plugin(hosts):
    """All bytes are checked on both sides, of messages of all sizes."""
    with test_harp_faults.Pair(hosts, "port=xdp", "connections=3") as pair:
        pair.go_on(300)
        for stats in pair.stop().values():
            packets = stats["packets"]
            assert packets["received"] > 10 * packets["received_by_kernel"], packets
            assert packets["sent"] > 10 * packets["sent_by_kernel"], packets
    with test_harp_plugin.Pair(hosts, HARP_PORT="xdp") as pair:
        pair.go_on(300)
        pair.stop()


def test_the_kernel_sees_none_of_it(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    monkeypatch.setenv("LIGHTCC_NET", "xdp")
    counts = [line.split()[-2:] for line in ranks.run_script(COUNTED, 2).splitlines() if "counts" in line]
    assert len(counts) == 2
    for sent, datagrams in counts:
        assert 4_000_000 <= int(sent) < 4_400_000
        assert int(datagrams) < 100, "4 MB are 2,800 packets; heartbeats are few"


@pytest.mark.slow
def test_every_collective(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    monkeypatch.setenv("LIGHTCC_TEST_FRAMEWORKS", "numpy")
    ranks.run_checks(str(CHECKS / "test_collectives.py"), 2, **XDP)


def test_a_killed_rank_is_named_and_cuts_are_as_with_tcp(hosts):
    with Watched(hosts, "h0:1,h1:1", **XDP) as job:
        job.wait_ready()
        job.kill(1)
        expect_errors(job, {0}, time.monotonic(), [f"{job.name(1)} died"], KILLED_S)
        job.finish(137, {0})
    expect_cuts_as_with_tcp(hosts, "h0:1,h1:1", **XDP)


def test_a_second_process_on_an_interface_is_told_of_harpd(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "2,1")
    monkeypatch.setenv("LIGHTCC_NET", "xdp")
    with pytest.raises(AssertionError, match="an XDP program to eth0, which has one already: another process's .harpd"):
        ranks.run_script(COUNTED, 3)


UNIT = Path(__file__).resolve().parents[2] / "harp_plugin" / "daemon" / "harpd.service"
CAPABILITIES = re.search(r"^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)[1].lower().split()


@contextlib.contextmanager
def harpd(hosts, folder):
    """On h0 and h1, with the capabilities that its unit for systemd gives it."""
    bounded = ["setpriv", "--bounding-set", ",+".join(["-all", *(name.replace("cap_", "") for name in CAPABILITIES)])]
    daemons = [hosts.popen(host, [*bounded, str(HARPD), "--socket", f"{folder}/{host}"], stdout=subprocess.PIPE)
               for host in ("h0", "h1")]
    try:
        for daemon in daemons:
            assert daemon.stdout.readline().startswith("harpd: listens")
        yield daemons
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.communicate()


OF_ITS_HOST = "import os; os.environ['HARP_HARPD'] = os.environ['SOCKETS'] + '/h' + os.environ['HOROVOD_CROSS_RANK']\n"


def test_ranks_share_the_queues_of_an_interface(tmp_path):
    """A packet that comes by the other rank's queue goes through the kernel."""
    variables = {**XDP, "HARP_XDP_QUEUES": "1", "SOCKETS": str(tmp_path), "program": OF_ITS_HOST + PROGRAM}
    with Hosts(2, queues=2) as hosts, harpd(hosts, tmp_path), Watched(hosts, "h0:2,h1:2", **variables) as job:
        job.wait_ready()
        for host in ("h0", "h1"):
            one_more = subprocess.run(
                hosts.command(host, [str(test_harp_faults.PEER), "listen", "port=xdp", "interface=eth0"]),
                env={**os.environ, "HARP_HARPD": f"{tmp_path}/{host}"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
            assert one_more.returncode != 0 and "all 2 queues of eth0 are in use" in one_more.stdout, one_more
        job.go_on(5)
        assert job.stop() == ""


def test_the_host_whose_harpd_has_ended_is_the_one_that_is_named(hosts, tmp_path):
    variables = {**XDP, "SOCKETS": str(tmp_path), "program": OF_ITS_HOST + PROGRAM}
    with harpd(hosts, tmp_path) as daemons, Watched(hosts, "h0:1,h1:1", **variables) as job:
        job.wait_ready()
        since = time.monotonic()
        daemons[1].kill()
        expected = r"rank 1 \(pid \d+\) on host h1: HARP ended on this host: .*harpd, which gave"
        for error in expect_errors(job, {0, 1}, since, []):
            assert re.search(expected, error), error
        job.finish()


@pytest.mark.parametrize("fallback", ["0", "1"])
def test_harpd_is_killed_under_a_job_and_comes_back(hosts, tmp_path, fallback):
    """The job ends with an error that says why, or goes on by way of the kernel, as it was told to."""
    variables = {**XDP, "HARP_XDP_FALLBACK": fallback, "SOCKETS": str(tmp_path), "program": OF_ITS_HOST + PROGRAM}
    with Watched(hosts, "h0:1,h1:1", **variables) as job:
        with harpd(hosts, tmp_path):
            job.wait_ready()
            since = time.monotonic()
        if fallback == "0":
            errors = expect_errors(job, {0, 1}, since, [])
            assert any("harpd, which gave this process its AF_XDP sockets, has ended" in error for error in errors)
            job.finish()
        else:
            job.go_on(5)
            assert job.stop() == ""
    with harpd(hosts, tmp_path), Watched(hosts, "h0:1,h1:1", **variables) as job:
        job.wait_ready()
        assert job.stop() == ""

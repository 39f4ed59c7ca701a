"""Jobs whose hosts talk over HARP (LIGHTCC_NET=harp), or over a network plugin of NCCL's (LIGHTCC_NET_PLUGIN; HARP's):
every collective, and what happens when hosts and ranks fail. These carry data and messages; heartbeats are as with TCP
(test_faults.py).
"""
import time
from pathlib import Path

import pytest
from test_faults import CUT_S, KILLED_S, cut_for_good, expect_errors

import ranks
from watched import Watched

pytestmark = pytest.mark.long

OVER_HARP, OVER_PLUGIN = {"LIGHTCC_NET": "harp"}, {"LIGHTCC_NET_PLUGIN": "harp"}
CHECKS = Path(__file__).parents[1] / "python"
BODIES = ("test_collectives.py", "test_process_sets.py", "test_join.py")
COUNTED = """
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib

hvd.init()
count = 1_000_000
hvd.allreduce(np.ones(count, np.float32), name="x", op=hvd.Sum)
sent = lib.counters()
hvd.barrier()
print("sent", sent["harp_bytes"], sent["net_plugin_bytes"])
hvd.shutdown()
"""


def sent_bytes(**variables):
    """Over HARP, and over the plugin, of each rank."""
    said = ranks.run_script(COUNTED, 2, **variables).splitlines()
    return [tuple(map(int, line.partition("sent ")[2].split())) for line in said if "sent" in line]


def test_what_crosses_the_network_is_counted(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    assert all(4_000_000 <= harp < 4_400_000 and plugin == 0 for harp, plugin in sent_bytes(**OVER_HARP))
    assert all(4_000_000 <= plugin < 4_400_000 and harp == 0 for harp, plugin in sent_bytes(**OVER_PLUGIN))
    assert sent_bytes() == [(0, 0), (0, 0)]


def test_who_chooses_harp_is_told_what_it_costs(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    said = ranks.run_script(COUNTED, 2, **OVER_HARP)
    assert said.count("LIGHTCC_NET=harp: large tensors may take twice as long as over TCP") == 1, said


def test_a_plugin_that_is_not_there_is_named_on_every_rank(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    said = ranks.run_script(NO_PLUGIN, 2, LIGHTCC_NET_PLUGIN="nowhere").splitlines()
    assert len([line for line in said if "refused" in line and "LIGHTCC_NET_PLUGIN=nowhere" in line]) == 2, said


NO_PLUGIN = """
import lightcc.numpy as hvd
try:
    hvd.init()
except Exception as error:
    print("refused", " ".join(str(error).split()))
"""


PORTS = """
import numpy as np
import lightcc.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(1000), name="x")
ports = []
for table in ("udp", "udp6"):
    with open(f"/proc/net/{table}") as sockets:
        ports += [int(line.split()[1].partition(":")[2], 16) for line in sockets if ":" in line.split()[1]]
print("ports", *ports)
hvd.barrier()
hvd.shutdown()
"""


def test_firewalls_see_the_ports_of_the_range_only(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    monkeypatch.setenv("LIGHTCC_NET", "harp")
    monkeypatch.setenv("LIGHTCC_PORT_RANGE", "21000-21009")
    said = [line.partition("ports ")[2].split() for line in ranks.run_script(PORTS, 2).splitlines() if "ports" in line]
    assert [len(heartbeats_and_harp) for heartbeats_and_harp in said] == [2, 2], said
    assert all(21000 <= int(port) <= 21009 for of_a_host in said for port in of_a_host), said


@pytest.mark.parametrize("bodies, variables", [
    pytest.param(BODIES, OVER_HARP, id="harp"),
    pytest.param(BODIES[:2], OVER_PLUGIN, id="plugin", marks=pytest.mark.slow)])
def test_every_collective(monkeypatch, bodies, variables):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "2,1")
    monkeypatch.setenv("LIGHTCC_TEST_FRAMEWORKS", "numpy")  # what lies above the core is not the network's
    files = [str(CHECKS / body) for body in bodies]
    for file in files:
        ranks.share(file, 3, **variables)
    for file in files:  # the first runs all of them on the same ranks
        ranks.run_checks(file, 3, **variables)


def test_rank_0s_transport_is_everybodys(hosts):
    with Watched(hosts, "h0:1,h1:1", program=NET_OF_RANK_0) as job:
        assert {rank: int(line.split()[1]) > 0 for rank, (line,) in job.wait_for("harp_bytes").items()} == {
            0: True, 1: True}
        err = job.finish()
    assert "rank 1 " in err and "LIGHTCC_NET=tcp (rank 0: harp)" in err, err


NET_OF_RANK_0 = """
import os
os.environ["LIGHTCC_NET"] = "harp" if os.environ["HOROVOD_RANK"] == "0" else "tcp"
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib
hvd.init()
hvd.allreduce(np.ones(1000))
print("harp_bytes", lib.counters()["harp_bytes"], flush=True)
hvd.shutdown()
print("held []", flush=True)
"""


@pytest.mark.parametrize("places, victim, variables",
                         [("h0:1,h1:1", 1, OVER_HARP), ("h0:1,h1:2", 2, OVER_HARP), ("h0:1,h1:1,h2:1", 0, OVER_HARP),
                          ("h0:1,h1:2", 2, OVER_PLUGIN)])
def test_a_killed_rank_is_named_by_all_others(hosts, places, victim, variables):
    with Watched(hosts, places, **variables) as job:
        job.wait_ready()
        job.kill(victim)
        since = time.monotonic()
        survivors = set(job.ranks) - {victim}
        expect_errors(job, survivors, since, [f"{job.name(victim)} died"], KILLED_S)
        job.finish(137, survivors)


def expect_cuts_as_with_tcp(hosts, places, **variables):
    """A short one is survived, a host that is cut for good is named, and then all can begin again."""
    with Watched(hosts, places, "again", **variables) as job:
        job.wait_ready()
        hosts.cut("h1")
        time.sleep(CUT_S)
        hosts.restore("h1")
        job.go_on()
        cut_for_good(hosts, job, "h1")
        job.let_stop()
        assert job.wait_for("again") == {rank: [f"again {len(job.ranks)}"] for rank in job.ranks}
        assert job.finish() == ""


@pytest.mark.parametrize("variables", [OVER_HARP, OVER_PLUGIN], ids=["harp", "plugin"])
def test_cuts_are_as_with_tcp(hosts, variables):
    expect_cuts_as_with_tcp(hosts, "h0:2,h1:2", **variables)

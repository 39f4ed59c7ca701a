"""Jobs whose hosts talk over HARP (LIGHTCC_NET=harp): every collective, and what happens when hosts and ranks fail.
HARP carries data and messages; heartbeats are as with TCP (test_faults.py)."""
import time
from pathlib import Path

import pytest
from test_faults import CUT_S, KILLED_S, cut_for_good, expect_errors

import ranks
from watched import Watched

OVER_HARP = {"LIGHTCC_NET": "harp"}
CHECKS = Path(__file__).parents[1] / "python"
BODIES = ("test_collectives.py", "test_process_sets.py", "test_join.py")
COUNTED = """
import numpy as np
import lightcc.numpy as hvd
from lightcc import _core

hvd.init()
count = 1_000_000
hvd.allreduce(np.ones(count, np.float32), name="x", op=hvd.Sum)
sent = _core.counters()["harp_bytes"]
hvd.barrier()
print("sent", sent)
hvd.shutdown()
"""


def sent_bytes(monkeypatch, net):
    monkeypatch.setenv("LIGHTCC_NET", net)
    return [int(line.split()[-1]) for line in ranks.run_script(COUNTED, 2).splitlines() if "sent" in line]


def test_what_crosses_the_network_is_counted(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "1,1")
    assert all(4_000_000 <= sent < 4_400_000 for sent in sent_bytes(monkeypatch, "harp"))
    assert sent_bytes(monkeypatch, "tcp") == [0, 0]


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


@pytest.mark.parametrize("body", BODIES)
def test_every_collective(monkeypatch, body):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "2,1")
    monkeypatch.setenv("LIGHTCC_TEST_FRAMEWORKS", "numpy")  # what lies above the core is not HARP's
    ranks.run_checks(str(CHECKS / body), 3, **OVER_HARP)


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
from lightcc import _core
hvd.init()
hvd.allreduce(np.ones(1000))
print("harp_bytes", _core.counters()["harp_bytes"], flush=True)
hvd.shutdown()
print("held []", flush=True)
"""


@pytest.mark.parametrize("places, victim", [("h0:1,h1:1", 1), ("h0:1,h1:2", 2), ("h0:1,h1:1,h2:1", 0)])
def test_a_killed_rank_is_named_by_all_others(hosts, places, victim):
    with Watched(hosts, places, **OVER_HARP) as job:
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


def test_cuts_are_as_with_tcp(hosts):
    expect_cuts_as_with_tcp(hosts, "h0:2,h1:2", **OVER_HARP)

"""How ranks of several hosts find each other: shapes of jobs, networks of all kinds, clones, other jobs' secrets, two
jobs at one address."""
import contextlib
import json
import re

import pytest

from emulated import Hosts
from jobs import DEADLINE_S
from lightcc.core import lib
from watched import ByHand, Watched

TOPOLOGY = """
import hashlib, json, sys, time
import numpy as np
import lightcc.numpy as hvd
hvd.init()
print("ready", flush=True)
digests = []

def check(result):
    digests.append(hashlib.sha256(result.tobytes()).digest())

random = np.random.default_rng(hvd.rank())
for dtype in (np.float32, np.float16, np.float64):
    for n in (1, 7, 1000, 300_001):
        x = random.standard_normal(n).astype(dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Adasum):
            check(hvd.allreduce(x, op=op))
    xs = [random.standard_normal(n).astype(dtype) for n in (5, 3000, 70_000)]
    for result in hvd.grouped_allreduce(xs, op=hvd.Sum):  # fused
        check(result)
    check(hvd.allgather(random.standard_normal((hvd.rank() + 1, 3)).astype(dtype)))
    check(hvd.broadcast(random.standard_normal(1000).astype(dtype), root_rank=hvd.size() - 1))
    check(hvd.allgather(random.standard_normal((100_000 * hvd.rank(), 2)).astype(dtype)))  # in pieces
    check(hvd.broadcast(random.standard_normal(300_001).astype(dtype), root_rank=hvd.size() - 1))
for n in (5, 700_001):
    x = np.arange(n) % 1009
    total = hvd.allgather(hvd.reducescatter(x * (hvd.rank() + 1), op=hvd.Sum))
    assert np.array_equal(total, x * (hvd.size() * (hvd.size() + 1) // 2))
if "torch" in sys.argv:
    import torch
    import lightcc.torch
    torch.manual_seed(hvd.rank())
    for n in (1, 7, 1000, 300_001):
        for op in (hvd.Sum, hvd.Average):
            result = lightcc.torch.allreduce(torch.randn(n).to(torch.bfloat16), op=op)
            check(result.view(torch.int16).numpy())
gathered = hvd.allgather(np.frombuffer(b"".join(digests), np.uint8).reshape(1, -1))
same = bool((gathered == gathered[0]).all())
print("topology", json.dumps([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
                              hvd.cross_size(), hvd.is_homogeneous(), len(digests), same]), flush=True)
hvd.shutdown()
print("held []", flush=True)
"""


def expected(slots):
    """rank, size, local rank and size, cross rank and size, homogeneous: for hosts with so many ranks."""
    rows = []
    for host, local_size in enumerate(slots):
        for local in range(local_size):
            with_local = [i for i, slot in enumerate(slots) if slot > local]
            rows.append([len(rows), sum(slots), local, local_size, with_local.index(host), len(with_local),
                         len(set(slots)) == 1])
    return rows


def topology(job):
    rows = [json.loads(line.split(" ", 1)[1]) for (line,) in job.wait_for("topology").values()]
    assert all(same for *_, same in rows) and len({row[7] for row in rows}) == 1 and rows[0][7] > 50, rows
    return [row[:7] for row in rows]


@pytest.mark.parametrize("slots, words", [
    ((3, 1), ()), ((1, 1), ("torch",)), *(pytest.param(*shape, marks=pytest.mark.slow)
                                          for shape in [((2, 2, 1), ("torch",)), ((2, 2, 2, 2), ())])])
def test_every_shape_has_its_numbers_and_the_same_bits_on_all_ranks(hosts, slots, words):
    places = ",".join(f"h{i}:{slot}" for i, slot in enumerate(slots))
    with Watched(hosts, places, *words, program=TOPOLOGY) as job:
        assert topology(job) == expected(slots)
        assert job.finish() == ""


def test_ipv6_and_a_chosen_interface():
    with Hosts(2, families=(6,), docker0=True) as v6, \
            Watched(v6, "h0:1,h1:2", program=TOPOLOGY, options=["--network-interfaces", "eth0"]) as job:
        assert topology(job) == expected((1, 2))
        assert job.finish() == ""


@pytest.mark.parametrize("interface, error", [
    ("docker0", r"HorovodInternalError: init: rank 0 \(pid \d+\) on host h0 .* 172\.17\.0\.1:.*LIGHTCC_IFACE"),
    ("docker1", r"'=docker1' allows no network interface of this host; there are eth0 10\.77\.0\.\d, doc"),
])
def test_an_interface_that_leads_nowhere(hosts, interface, error):
    """docker0 has one address on all hosts."""
    with Watched(hosts, "h0:1,h1:1", program=TOPOLOGY, options=["--network-interfaces", interface]) as job:
        assert job.process.wait(DEADLINE_S) == 1 and re.search(error, job.err()), job.tail()


def test_clones_of_a_machine_are_hosts_of_their_own(hosts):
    """One boot id, one LIGHTCC_HOST_ID: whether two ranks share a host is tried, not believed."""
    with Watched(hosts, "h0:2,h1:1", program=TOPOLOGY, LIGHTCC_HOST_ID="clone") as job:
        assert topology(job) == expected((2, 1))
        assert job.finish() == ""


def test_one_machine_can_be_taken_for_two():
    variables = [{"LIGHTCC_HOST_ID": f"half{rank // 2}"} for rank in range(4)]
    with ByHand([None] * 4, TOPOLOGY, "127.0.0.1:47110", variables) as ranks:
        rows = [json.loads(re.search("topology (.*)\n", ranks.finish(rank))[1]) for rank in range(4)]
        assert [row[:7] for row in rows] == expected((2, 2)) and all(row[8] for row in rows)


# ---- who may come

MEET = """
import os, sys
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    print("refused", error, flush=True)
except ValueError as error:
    print("refused ValueError", error, flush=True)
else:
    knobs = [line for line in lib.describe("knobs").splitlines() if "CACHE_CAPACITY" in line]
    print("sum", hvd.allreduce(np.array([hvd.rank()], np.int64), op=hvd.Sum)[0], knobs, flush=True)
    hvd.shutdown()
"""
START_S = "40"  # twelve interpreters start at once in the longest test, on a machine that may have much else to do


def meet(hosts, odd, port):
    """Three ranks, the last of which is different; a context."""
    common = {"HOROVOD_START_TIMEOUT": START_S}
    return ByHand(["h0", "h0", "h1"], MEET, f"h0:{port}", [common, common, {**common, **odd}], hosts)


ANOTHER_VERSION = """
import socket, struct, sys, time
deadline = time.monotonic() + 60
while True:  # as a rank of any version begins
    try:
        connection = socket.create_connection(sys.argv[1].split(":"), 1)
        break
    except OSError:
        assert time.monotonic() < deadline
connection.settimeout(60)
connection.sendall(b"lightcc\\n" + struct.pack("<Ii64s", 1, 2, b"9.9.9"))
print("refused", connection.recv(4096), flush=True)
"""


def test_a_rank_that_does_not_belong_is_refused_by_name_and_missed_by_the_others(hosts):
    cases = {
        "job": ({"LIGHTCC_JOB_ID": "another"}, "rank 2 belongs to another job than rank 0"),
        "secret": ({"LIGHTCC_SECRET": "wrong"}, "does not know this job's secret"),
        "version": ({"program": ANOTHER_VERSION}, f"rank 2 runs lightcc 9.9.9, rank 0 {lib.version()}"),
        "size": ({"HOROVOD_SIZE": "4"}, "rank 2 was started in a world of 4, rank 0 in one of 3"),
    }
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(meet(hosts, odd, 47200 + 20 * i))
                for i, (name, (odd, _)) in enumerate(cases.items())}
        for name, job in jobs.items():
            said = [job.finish(rank) for rank in range(3)]
            print(name, said)
            why = cases[name][1]
            assert "refused" in said[2] and why in said[2], said
            assert "refused" in said[0] and ("rank 2 did not come" in said[0] or why in said[0]), said
            assert "refused" in said[1] and any(text in said[1] for text in (
                "rank 2 did not come", why, "rank 0 did not come")), said  # a late one finds rank 0 gone


def test_rank_0_tells_whose_settings_differ_and_its_own_hold(hosts):
    with meet(hosts, {"HOROVOD_CACHE_CAPACITY": "7"}, 47300) as ranks:
        said = [ranks.finish(rank) for rank in range(3)]
        assert f"rank 2 (pid {ranks.processes[2].pid}) on host h1 was started with other settings" in said[0], said
        assert "HOROVOD_CACHE_CAPACITY" in said[0] and "7" in said[0], said
        values = {re.search(r"sum (.*)", text)[1] for text in said}
        assert len(values) == 1 and "1024" in values.pop(), said
        assert "settings" not in said[1] + said[2], said


def test_two_jobs_at_one_address_and_port(hosts):
    with meet(hosts, {}, 47400) as one, meet(hosts, {}, 47400) as two:
        for job in (one, two):
            for rank in range(3):
                assert job.finish(rank).startswith("sum 3 "), job.finish(rank)

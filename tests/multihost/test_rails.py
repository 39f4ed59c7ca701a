"""Hosts with two NICs on two networks: which of them carry a job's bytes."""
import pytest

from emulated import Hosts
from watched import ByHand

MIB = 1 << 20
PROGRAM = """
import numpy as np
import lightcc.numpy as hvd

hvd.init()
base = (np.arange(4_000_000) % 7).astype(np.float32)
for _ in range(3):
    total = hvd.allreduce(base + hvd.rank(), op=hvd.Sum)
    assert np.array_equal(total, hvd.size() * base + hvd.size() * (hvd.size() - 1) // 2)
hvd.barrier()
hvd.shutdown()
print("right")
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2, rails=True) as hosts:
        yield hosts


@pytest.mark.parametrize("lists, both", [
    (("=eth0,eth1", "=eth0,eth1"), True),
    (("eth", "=eth0,eth1"), True),          # by prefix, in the same order
    (("=eth0,eth1", "=eth0"), False),       # a host with one
    (("^eth1,lo", "^lo"), False),           # none is named
    ((None, None), False),
])
def test_links_take_all_nics_that_both_ends_name(hosts, lists, both):
    """An all-reduce of 16 MB moves about as much through a host, each way, in three rounds 96 MB."""
    interfaces = [{"LIGHTCC_CALIBRATION": "0", **({"LIGHTCC_IFACE": lists[rank // 2]} if lists[rank // 2] else {})}
                  for rank in range(4)]
    before = {nic: hosts.carried("h1", nic) for nic in ("eth0", "eth1")}
    with ByHand(["h0", "h0", "h1", "h1"], PROGRAM, "h0:4800", interfaces, hosts) as job:
        said = [job.finish(rank) for rank in range(4)]
    assert said == ["right\n"] * 4, "\n".join(said)
    eth0, eth1 = (hosts.carried("h1", nic) - before[nic] for nic in ("eth0", "eth1"))
    print(f"{lists}: eth0 {eth0 / MIB:.0f} MiB, eth1 {eth1 / MIB:.0f} MiB")
    assert eth0 + eth1 > 90 * MIB
    if both:
        assert 0.4 < eth1 / (eth0 + eth1) < 0.6
    else:
        assert eth1 < MIB / 4

"""The core's cost model (csrc/collective/cost), asked from Python."""

import ctypes
import json
from typing import NamedTuple, Optional

from lightcc.core import lib
from lightcc.explain.cluster import Cluster

_GBIT = 1e9 / 8


class Candidate(NamedTuple):
    """A way to run an all-reduce, and what it is predicted to take, in seconds."""
    algorithm: str    # as LIGHTCC_SELECT has it
    exchange: str     # 2d and compressed: between the owners of a lane; else empty
    lanes: int        # that 2D cuts a vector into, between hosts
    chunks: int       # that pass through 2D's queues
    seconds: float    # latency_s + transfer_s + local_s
    latency_s: float  # start-ups
    transfer_s: float  # bytes on the way
    local_s: float    # inside hosts, as far as nothing else hides it
    bound_by: str     # the resource that has the most to carry

    @property
    def name(self) -> str:
        return f"{self.algorithm} ({self.exchange})" if self.exchange else self.algorithm


def candidates(cluster: Cluster, nbytes: int, compressed_share: float = 0.0,
               simulated: bool = False) -> list[Candidate]:
    """All ways to all-reduce `nbytes` bytes on every rank of `cluster`, the quickest first.

    compressed_share: a codec's bytes for each byte of the gradients, as 0.02 for Top-K of 1 %; 0: without a codec.
    simulated: what crosses the network goes message by message (LogGP with max-min sharing), up to 4096 ranks.
    Raises ValueError for a cluster or a number that cannot be. Works without init().

    >>> from lightcc.explain import Cluster, candidates
    >>> candidates(Cluster(hosts=[8] * 4), 64 << 20)[0].algorithm
    '2d'
    """
    hosts = (ctypes.c_int32 * len(cluster.hosts))(*cluster.hosts)
    asked = lib.Cluster(
        host_count=len(hosts), hosts=hosts, local_latency_s=cluster.local_latency_us * 1e-6,
        memory_bytes_per_s=cluster.memory_gbyte_per_s * 1e9, latency_s=cluster.latency_us * 1e-6,
        message_s=cluster.message_us * 1e-6, nic_bytes_per_s=cluster.nic_gbit_per_s * _GBIT,
        flow_bytes_per_s=cluster.flow_gbit_per_s * _GBIT, oversubscription=cluster.oversubscription, nics=cluster.nics,
        half_duplex=not cluster.full_duplex, pod_hosts=cluster.pod_hosts, simulated=simulated,
        compressed_share=compressed_share)
    return [Candidate(**one) for one in json.loads(lib.explain(asked, nbytes))]


def measured_cluster() -> Optional[Cluster]:
    """The hosts of this job with what init() has measured of them; None on one host, or where nothing was measured.

    Latency and rates between hosts, of one connection and of a NIC, and of memory; docs/design.md says how. All other
    fields are defaults. All ranks get the same. None before init(), too.

    >>> import lightcc.numpy as hvd
    >>> from lightcc.explain import measured_cluster
    >>> hvd.init()
    >>> measured_cluster()
    """
    text = lib.describe("network")
    return Cluster(**json.loads(text)) if text else None

"""Ranks on one GPU that take each other for ranks of several hosts. NCCL refuses two ranks of one host on a GPU; these
it connects by its network, which here is the loopback interface. To NCCL each rank is a host of its own; to lightcc, so
many together are one as variables() is told."""
import os
import secrets
import socket
from typing import Dict

_MEETING = "LIGHTCC_TEST_MEETING"  # where they meet; lightccrun sets LIGHTCC_STORE_ADDR itself, or leaves it out
_PER_HOST = "LIGHTCC_TEST_PER_HOST"


def variables(per_host: int = 1) -> Dict[str, str]:
    """Of the ranks of one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {_MEETING: f"127.0.0.1:{port}", "LIGHTCC_IFACE": "lo", "LIGHTCC_SECRET": secrets.token_hex()}
    # One thread block a collective: the kernels of both ranks share the GPU by turns.
    nccl = {"LIGHTCC_NCCL": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_DEBUG": "WARN"}
    return {**meeting, **nccl, _PER_HOST: str(per_host)}


def become_own_host_to_nccl() -> None:
    """Of a rank of an elastic job, which the driver gives its place."""
    os.environ["NCCL_HOSTID"] = f"lightcc-test-{os.getpid()}"


def become_own_host() -> None:
    """Of a rank with these variables, before it calls init; any other rank stays where it is."""
    if _MEETING in os.environ:
        rank, per_host = int(os.environ["HOROVOD_RANK"]), int(os.environ[_PER_HOST])
        os.environ.update(NCCL_HOSTID=f"lightcc-test-{rank}", LIGHTCC_HOST_ID=f"lightcc-test-{rank // per_host}",
                          HOROVOD_LOCAL_RANK=str(rank % per_host), HOROVOD_LOCAL_SIZE=str(per_host),
                          LIGHTCC_STORE_ADDR=os.environ[_MEETING])

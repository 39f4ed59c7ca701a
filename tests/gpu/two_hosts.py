"""Two ranks on one GPU that take each other for ranks of two hosts. NCCL refuses two ranks of one host on a GPU; these
it connects by its network, which here is the loopback interface."""
import os
import secrets
import socket
from typing import Dict

_MEETING = "LIGHTCC_TEST_MEETING"  # where they meet; lightccrun sets LIGHTCC_STORE_ADDR itself, or leaves it out


def variables() -> Dict[str, str]:
    """Of the ranks of one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {_MEETING: f"127.0.0.1:{port}", "LIGHTCC_IFACE": "lo", "LIGHTCC_SECRET": secrets.token_hex()}
    # One thread block a collective: the kernels of both ranks share the GPU by turns.
    nccl = {"LIGHTCC_NCCL": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_DEBUG": "WARN"}
    return {**meeting, **nccl}


def become_own_host() -> None:
    """Of a rank with these variables, before it calls init; any other rank stays where it is."""
    if _MEETING in os.environ:
        host = f"lightcc-test-{os.environ['HOROVOD_RANK']}"
        os.environ.update(NCCL_HOSTID=host, LIGHTCC_HOST_ID=host, HOROVOD_LOCAL_RANK="0", HOROVOD_LOCAL_SIZE="1",
                          LIGHTCC_STORE_ADDR=os.environ[_MEETING])

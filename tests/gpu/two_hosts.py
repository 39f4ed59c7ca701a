"""Two ranks on one GPU that take each other for ranks of two hosts. NCCL refuses two ranks of one host on a GPU; these
it connects by its network, which here is the loopback interface."""
import os

_EACH_ITS_HOST = "LIGHTCC_TEST_EACH_ITS_HOST"
# One thread block a collective: the kernels of both ranks share the GPU by turns.
VARIABLES = {_EACH_ITS_HOST: "1", "LIGHTCC_NCCL": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
             "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_DEBUG": "WARN"}


def become_own_host() -> None:
    """Of a rank with these variables, before it calls init; any other rank stays where it is."""
    if os.environ.get(_EACH_ITS_HOST):
        host = f"lightcc-test-{os.environ['HOROVOD_RANK']}"
        os.environ.update(NCCL_HOSTID=host, LIGHTCC_HOST_ID=host)

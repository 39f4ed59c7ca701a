"""Tests of several hosts, which are emulated (emulated.py). Ranks are started as in tests/python."""
import os
import sys

import pytest

sys.path[:0] = [os.path.dirname(__file__), os.path.join(os.path.dirname(os.path.dirname(__file__)), "python")]

import emulated  # noqa: E402
from jobs import wait_until  # noqa: E402


@pytest.fixture(scope="module")
def all_hosts():
    with emulated.Hosts(4, docker0=True) as hosts:
        yield hosts


@pytest.fixture
def hosts(all_hosts):
    """h0 to h3, on which a test leaves nothing behind. What runs on a lost host ends soon, and nobody waits for it."""
    yield all_hosts
    wait_until(lambda: not all_hosts.pids(), "all hosts to be empty", all_hosts.pids)
    for host in all_hosts.names:
        for state in ("listening", "established"):
            assert all_hosts.run(host, ["ss", "-Htuan", "state", state]) == ""
        assert "lightcc" not in all_hosts.run(host, ["cat", "/proc/net/unix"])
    assert not [name for name in os.listdir("/dev/shm") if "lightcc" in name]


def pytest_collection_modifyitems(items):
    here = [item for item in items if os.path.dirname(__file__) in str(item.fspath)]
    if here and emulated.why_not():
        for item in here:
            item.add_marker(pytest.mark.skip(reason=emulated.why_not()))

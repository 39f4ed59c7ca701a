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


def sockets(hosts, host):
    """Those that lightcc may have left."""
    of_unix = hosts.run(host, ["cat", "/proc/net/unix"]).splitlines()
    return [line for state in ("listening", "established")
            for line in hosts.run(host, ["ss", "-Htuan", "state", state]).splitlines()] + [
            line for line in of_unix if "lightcc" in line]


@pytest.fixture
def hosts(all_hosts):
    """h0 to h3, on which a test leaves nothing behind. What runs on a lost host ends soon, and nobody waits for it."""
    yield all_hosts
    wait_until(lambda: not all_hosts.pids(), "all hosts to be empty", all_hosts.pids)
    for host in all_hosts.names:  # a process that ends leaves its host before its files are closed
        wait_until(lambda host=host: not sockets(all_hosts, host), f"no socket to be left on {host}",
                   lambda host=host: sockets(all_hosts, host))
    assert not [name for name in os.listdir("/dev/shm") if "lightcc" in name]


def pytest_collection_modifyitems(items):
    here = [item for item in items if os.path.dirname(__file__) in str(item.fspath)]
    if here and emulated.why_not():
        for item in here:
            item.add_marker(pytest.mark.skip(reason=emulated.why_not()))

"""The emulated hosts themselves: tests of several hosts stand on what is shown here."""
import os
import subprocess
import sys
import time

import pytest

import emulated
from emulated import Hosts, spread
from jobs import wait_until

SERVE = """
import socket, sys
at = ("", socket.AF_INET) if sys.argv[1] == "4" else ("::", socket.AF_INET6)
server = socket.create_server((at[0], 4711), family=at[1])
print("up", flush=True)
while True:
    connection, _ = server.accept()
    total = 0
    while chunk := connection.recv(1 << 20):
        total += len(chunk)
    connection.sendall(str(total).encode())
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4711), 2)
connection.settimeout(30)
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(99).decode(), time.monotonic() - began)
"""


def serve(hosts, host, family=4):
    server = hosts.popen(host, [sys.executable, "-S", "-c", SERVE, str(family)], stdout=subprocess.PIPE)
    assert server.stdout.readline() == "up\n"
    return server


def send(hosts, host, to, size=1):
    received, seconds = hosts.run(host, [sys.executable, "-S", "-c", SEND, to, str(size)]).split()
    assert int(received) == size
    return float(seconds)


def test_hosts_have_names_and_reach_each_other_by_them():
    with Hosts(3, docker0=True) as hosts:
        assert [hosts.run(name, ["hostname"]) for name in hosts.names] == ["h0\n", "h1\n", "h2\n"]
        assert os.uname().nodename != "h0"
        assert all("172.17.0.1/16" in hosts.run(name, ["ip", "addr", "show", "docker0"]) for name in hosts.names)
        serve(hosts, "h2")
        for name in hosts.names:
            send(hosts, name, "h2")
        with pytest.raises(subprocess.CalledProcessError):
            hosts.run("h0", ["false"])


@pytest.mark.parametrize("families", [(6,), (4, 6)])
def test_ipv6(families):
    with Hosts(2, families=families) as hosts:
        serve(hosts, "h1", 6)
        send(hosts, "h0", "fd77::2")
        send(hosts, "h0", "h1")


def test_a_host_that_is_cut_off_is_silent_until_it_is_restored():
    with Hosts(2) as hosts:
        serve(hosts, "h1")
        send(hosts, "h0", "h1")
        hosts.cut("h1")
        with pytest.raises(subprocess.CalledProcessError):
            hosts.run("h0", [sys.executable, "-S", "-c", SEND, "h1", "1"], stderr=subprocess.DEVNULL)
        assert "UP" in hosts.run("h0", ["ip", "link", "show", "eth0"])
        hosts.restore("h1")
        wait_until(lambda: subprocess.run(hosts.command("h0", [sys.executable, "-S", "-c", SEND, "h1", "1"]),
                                          stderr=subprocess.DEVNULL).returncode == 0, "the cable to carry again")


def test_rate():
    with Hosts(2, rate="200mbit") as hosts:
        serve(hosts, "h1")
        assert 0.5 < send(hosts, "h0", "h1", 25_000_000)  # a second, more on a busy machine


def test_nothing_stays_behind():
    with Hosts(2) as hosts:
        sleeper = hosts.popen("h1", ["sleep", "600"])
        wait_until(lambda: hosts.pids() == hosts.pids("h1") == [sleeper.pid], "the sleeper", hosts.pids)
        namespace = hosts.namespace("h1")
        assert os.path.exists(f"/run/netns/{namespace}") and os.path.exists(f"/etc/netns/{namespace}")
    assert sleeper.wait(10) == -9
    assert not os.path.exists(f"/run/netns/{namespace}") and not os.path.exists(f"/etc/netns/{namespace}")


def test_what_a_crash_leaves_is_removed_by_the_next_run():
    code = ("import emulated, os, subprocess, sys, time\nhosts = emulated.Hosts(1).__enter__()\n"
            "hosts.popen('h0', ['sleep', '600'])\nprint(hosts.namespace('h0'), flush=True)\ntime.sleep(600)")
    crashed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               cwd=os.path.dirname(emulated.__file__))
    namespace = crashed.stdout.readline().strip()
    with Hosts(1):
        assert os.path.exists(f"/run/netns/{namespace}")  # it still runs
    crashed.kill()
    crashed.wait()
    crashed.stdout.close()
    time.sleep(0.1)
    with Hosts(1):
        assert not os.path.exists(f"/run/netns/{namespace}") and not os.path.exists(f"/etc/netns/{namespace}")


@pytest.mark.parametrize("slots, num_proc, counts", [
    ((2, 2), 4, [2, 2]), ((2, 2), 3, [2, 1]), ((2, 2), 2, [1, 1]), ((2, 2), 1, []), ((2, 2), 5, []),
    ((3, 1), 4, [3, 1]), ((3, 1), 3, [2, 1]), ((3, 1), 2, [1, 1]), ((1, 1, 1), 2, [1, 1]),
])
def test_fewer_ranks_are_still_on_several_hosts(slots, num_proc, counts):
    assert list(spread(slots, num_proc).values()) == counts

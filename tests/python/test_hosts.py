"""Where ranks are placed, which names mean this host, and where the ranks of several hosts meet. Nothing is started."""
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from lightcc.launch import hosts, network, remote
from lightcc.launch.network import Interface

INTERFACES = [Interface("eth0", "10.0.0.1"), Interface("eth0", "fd00::1"), Interface("eth10", "10.1.0.1"),
              Interface("docker0", "172.17.0.1")]


def placed(num_proc, text, here=("localhost",)):
    return [(p.host, p.local_rank, p.local_size, p.cross_rank, p.cross_size)
            for p in hosts.places(num_proc, text, is_here=lambda name: name in here)]


def test_a_list_of_hosts():
    assert hosts.parse("a:2,b, c.d-e:0") == [("a", 2), ("b", 1), ("c.d-e", 0)]
    assert hosts.parse("[fd00::1]:2,10.0.0.1:3") == [("fd00::1", 2), ("10.0.0.1", 3)]
    for bad in ("localhost:x", "a b", ":3", "-oProxyCommand:1", "fd00::1:2", ""):
        with pytest.raises(ValueError, match="expected host:slots"):
            hosts.parse(bad)


def test_a_file_of_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nlocalhost slots=2 # this one\n\nfd00::1 slots = 3\nb\n")
    assert hosts.parse_file(str(path)) == [("localhost", 2), ("fd00::1", 3), ("b", 1)]
    with pytest.raises(ValueError, match="7 processes do not fit: .*hosts has 6 slots"):
        hosts.places(7, hostfile=str(path))
    path.write_text("a slots=2 max_slots=4\nb max-slots = 8\nc max_slots=4 slots=3\n")  # Open MPI's
    assert hosts.parse_file(str(path)) == [("a", 2), ("b", 1), ("c", 3)]
    with pytest.raises(FileNotFoundError, match=f"--hostfile {tmp_path}/nosuch: No such file"):
        hosts.places(1, hostfile=f"{tmp_path}/nosuch")
    path.write_text("localhost slots\n")
    with pytest.raises(ValueError, match="line 1"):
        hosts.places(2, hostfile=str(path))


def test_hosts_are_filled_in_order_and_cross_ranks_skip_those_that_have_no_such_local_rank():
    assert placed(6, "a:1,b:3,c:9") == [
        ("a", 0, 1, 0, 3), ("b", 0, 3, 1, 3), ("b", 1, 3, 0, 2), ("b", 2, 3, 0, 1), ("c", 0, 2, 2, 3),
        ("c", 1, 2, 1, 2)]
    assert placed(2, "a:2,b:2") == [("a", 0, 2, 0, 1), ("a", 1, 2, 0, 1)]
    assert placed(2, "a:0,b:1,c:1") == [("b", 0, 1, 0, 2), ("c", 0, 1, 1, 2)]


def test_a_host_that_is_listed_twice_has_the_slots_of_both():
    assert placed(4, "a:1,b:1,a:2") == [("a", 0, 3, 0, 2), ("a", 1, 3, 0, 1), ("a", 2, 3, 0, 1), ("b", 0, 1, 1, 2)]
    assert [p[0] for p in placed(3, "me:1,b:1,localhost:1", here=("localhost", "me"))] == ["me", "me", "b"]


def test_places_become_variables():
    place = hosts.places(3, "a:2,b:1", is_here=lambda name: False)[2]
    assert place.environment() == {
        "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "b",
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    elastic = place.environment(is_elastic=True)  # the others change with the world
    assert elastic["LOCAL_RANK"] == "0" and not elastic.keys() & {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def test_names_of_this_host(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: INTERFACES)
    monkeypatch.setattr(socket, "gethostname", lambda: "me.example.org")
    asked = {"alias": "10.1.0.1", "debian": "127.0.1.1", "other": "10.0.0.2"}

    def resolve(name, port):
        if name in asked or name[0] in "1f:":
            return [(0, 0, 0, "", (asked.get(name, name), 0))]
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("localhost", "me.example.org", "me", "127.0.0.1", "::1", "10.0.0.1", "fd00::1", "alias", "debian"):
        assert network.is_here(name), name
    for name in ("other", "unknown", "10.0.0.2", "fd00::2", "me.example.com"):
        assert not network.is_here(name), name
    assert not network.is_here("alias", resolve=False) and network.is_here("10.0.0.1", resolve=False)


@pytest.mark.parametrize("names, left", [
    ("", [0, 1, 2, 3]), ("eth", [0, 1, 2]), ("eth1", [2]), ("=eth1,docker0", [3]), ("^eth10,docker", [0, 1]),
])
def test_interfaces_are_chosen_as_nccl_does(names, left):
    assert network.chosen(INTERFACES, names) == [INTERFACES[i] for i in left]


def test_the_interfaces_of_this_machine():
    for name, address in network.interfaces():
        assert name != "lo" and not address.startswith(("127.", "fe80", "169.254"))


def test_where_ranks_meet(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: INTERFACES)
    assert network.store_address("h1", False, "", "4000") == "h1:4000"
    assert network.store_address("fd00::7", False, "", "4000") == "[fd00::7]:4000"
    assert network.store_address("localhost", True, "=eth0", "4000-4000") == "10.0.0.1:4000,[fd00::1]:4000"
    ports = {int(network.store_address("h1", False, "", text)[3:]) for text in ("", "0") for _ in range(99)}
    assert len(ports) > 100 and min(ports) >= 20000 and max(ports) <= 60000 - 15  # 15 more are tried
    ports = {network.store_address("h1", False, "", "5000-5017") for _ in range(99)}
    assert ports == {"h1:5000", "h1:5001", "h1:5002"}
    with pytest.raises(ValueError, match=r"no network interface of this host is '=eth7'; it has: eth0 \(10.0.0.1\), "):
        network.store_address("localhost", True, "=eth7", "")
    for bad in ("x", "5-3", "1-99999", "-"):
        with pytest.raises(ValueError, match="LIGHTCC_PORT_RANGE"):
            network.store_address("h1", False, "", bad)
    monkeypatch.setattr(network, "interfaces", lambda: [])
    with pytest.raises(ValueError, match="other hosts cannot reach this one"):
        network.store_address("localhost", True, "", "")


def test_what_is_forwarded():
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "MY": "a\nb\udc80"}
    left = dict.fromkeys("HOSTNAME HOME PWD TMPDIR DISPLAY SSH_AUTH_SOCK XDG_RUNTIME_DIR TERM LS_COLORS _".split(), "x")
    assert remote.forwarded({**kept, **left}) == kept
    page = (Path(__file__).parents[2] / "docs" / "lightccrun.md").read_text()
    assert [name for name in remote.NOT_FORWARDED if f"`{name}`" not in page] == []


def test_command_lines():
    line = remote.agent_line()
    assert shlex.split(line)[-3:] == [sys.executable, "-m", "lightcc.launch.agent"]
    assert not re.search(r"[;&|$`<>]", line)
    command = remote.ssh_command("h1", 30, 2222, "/my key")
    assert command[0] == "ssh" and command[-2:] == ["h1", line]
    assert " -o BatchMode=yes -o StrictHostKeyChecking=accept-new " in " ".join(command)
    assert command[-6:-2] == ["-p", "2222", "-i", "/my key"]
    assert remote.template_command("docker exec -i {host} sh -c {command}", "c1") == [
        "docker", "exec", "-i", "c1", "sh", "-c", line]
    assert remote.template_command("sh -c 'echo {host} {{}}; exec sh -c \"$1\"' sh {command}", "c1") == [
        "sh", "-c", "echo c1 {{}}; exec sh -c \"$1\"", "sh", line]

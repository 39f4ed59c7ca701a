"""lightccrun on emulated hosts: over ip netns exec, and over a real ssh between them."""
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

import needs
import ranks
from emulated import Hosts
from jobs import DEADLINE_S, Job, program, wait_until
from lightcc.launch import nccl_plugin

RUNNER = [sys.executable, "-m", "lightcc.runner"]
SLEEPERS = ["sh", "-c", "sleep 600 & echo up; wait"]
SSH_PORT = 2222
LOST_S = 60  # ssh asks every 2 seconds and gives up after three questions; then ranks are given a moment to end


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3, docker0=True) as hosts:
        yield hosts


def start(hosts, *arguments, **options):
    """The launcher is on no host."""
    return Job(*RUNNER, "--launch-command", hosts.launch_command, *map(str, arguments), **options)


def test_each_host_gives_its_ranks_its_own_plugin(hosts):
    """NCCL_NET_PLUGIN's path is made where the ranks are started, not where the launcher is."""
    code, out, err = start(hosts, "-np", 2, "-H", "h1:1,h0:1", "--harp", "sh", "-c",
                           "echo $NCCL_NET_PLUGIN $NCCL_NET").finish()
    assert (code, err) == (0, "") and out.count(f"{nccl_plugin.PATH} HARP\n") == 2, out


def test_ranks_are_on_their_hosts(hosts, tmp_path):
    show = program("import socket; print(rank, socket.gethostname(), *[os.environ['HOROVOD_' + k] for k in "
                   "'HOSTNAME LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE'.split()],"
                   "socket.gethostbyname(os.environ['LIGHTCC_STORE_ADDR'].split(':')[0]))")
    code, out, err = start(hosts, "-np", 4, "-H", "h1:1,h0:2,h2:5", "--output-filename", tmp_path, *show).finish()
    assert (code, err) == (0, "")
    lines = ["0 h1 h1 0 1 0 3 10.77.0.2", "1 h0 h0 0 2 1 3 10.77.0.2", "2 h0 h0 1 2 0 1 10.77.0.2",
             "3 h2 h2 0 1 2 3 10.77.0.2"]
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:{line}" for rank, line in enumerate(lines)]
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(4)] == [f"{line}\n" for line in lines]


def test_torch_meets_where_rank_0_is(hosts):
    """At a port that the agent there holds."""
    code, out, err = start(hosts, "-np", 2, "-H", "h1:1,h0:1", sys.executable, "-c", """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(os.environ["MASTER_ADDR"], x.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
""", LIGHTCC_PORT_RANGE="21000-21100").finish()
    assert (code, sorted(out.splitlines())) == (0, [f"[{rank}]<stdout>:h1 2.0" for rank in range(2)]), err


def test_a_rank_that_ends_before_init_is_told_to_other_hosts(hosts):
    code, out, err = start(hosts, "-np", 3, "-H", "h0:1,h1:1,h2:1", "--start-timeout", 600, sys.executable, "-c", """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    sys.exit(0)
import lightcc.numpy as hvd
hvd.init()
""").finish()
    assert code == 1 and re.search(r"init: rank 1 \(pid \d+\) on host h1 exited with code 0 before it called init", err)


def test_ranks_of_other_tests_can_be_put_on_hosts(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_HOSTS", "2,1")
    arguments = ["-c", "import os, socket; print(os.environ['HOROVOD_RANK'], socket.gethostname())"]
    for np, expected in ((3, ["h0", "h0", "h1"]), (2, ["h0", "h1"]), (1, [os.uname().nodename])):
        code, out = ranks.launch(np, arguments, DEADLINE_S)
        assert code == 0 and sorted(out.splitlines()) == [
            f"[{rank}]<stdout>:{rank} {host}" for rank, host in enumerate(expected)]


def test_a_killed_launcher_leaves_nobody_on_any_host(hosts):
    job = start(hosts, "-np", 3, "-H", "h0:1,h1:1,h2:1", *SLEEPERS)
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(3)))
    assert all(hosts.pids(name) for name in hosts.names)
    job.process.kill()
    job.finish()
    wait_until(lambda: not hosts.pids(), "all hosts to be empty", hosts.pids)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """Hosts with an sshd on each, and an ssh in PATH that knows nothing of this machine's own keys and hosts."""
    if missing := needs.why_not("ssh", "ssh-keygen", "sshd"):
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"Port {SSH_PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -o UserKnownHostsFile={folder}/known -o IdentityAgent=none"
        ' "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd locks its children in
    with Hosts(3, docker0=True) as hosts, open(folder / "log", "w") as log:
        for name in hosts.names:
            hosts.popen(name, ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
            wait_until(lambda: f":{SSH_PORT:04X} " in hosts.run(name, ["cat", "/proc/net/tcp"]), "sshd to listen")
        yield Ssh(hosts, folder)


class Ssh:
    """The launcher is on h0."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.servers = set(hosts.pids())

    def start(self, *arguments, **variables):
        return Job(*self.hosts.command("h0", [*RUNNER, "--ssh-port", str(SSH_PORT), "--ssh-identity-file",
                                              str(self.folder / "key"), *map(str, arguments)]),
                   PATH=f"{self.folder}/bin:{os.environ['PATH']}", cwd=self.folder, **variables)

    def expect_nobody(self):
        wait_until(lambda: set(self.hosts.pids()) == self.servers, "only sshd to be on the hosts",
                   lambda: set(self.hosts.pids()) - self.servers)


def test_over_ssh(ssh):
    show = program("import socket; print(rank, socket.gethostname(), os.getcwd(), os.environ['HOROVOD_CROSS_RANK'],"
                   "os.environ['MY'], os.environ['LIGHTCC_STORE_ADDR'].split(':')[0]); sys.exit(len(sys.argv) - 1)")
    code, out, err = ssh.start("-np", 4, "-H", "h0:1,h1:2,h2:1", "--verbose", *show, MY="a 'b' $c").finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        f"[{rank}]<stdout>:{rank} {host} {ssh.folder} {cross} a 'b' $c 10.77.0.1"
        for rank, (host, cross) in enumerate([("h0", 0), ("h1", 1), ("h1", 0), ("h2", 2)])]
    assert "lightccrun: host h1: ssh -T -o BatchMode=yes " in err and re.search(r"rank 3 is pid \d+ on host h2\n", err)
    ssh.expect_nobody()
    code, _, err = ssh.start("-np", 2, "-H", "h1:1,h2:1", *show, "an argument", "$another", MY="").finish()
    assert code == 2 and re.match(r"lightccrun: rank \d \(pid \d+, host h[12]\) exited with code 2; ", err), err


def test_as_horovod_over_ssh(ssh):
    show = [sys.executable, "-c", "import horovod.runner, socket; print(socket.gethostname(), horovod.runner.__name__)"]
    code, out, err = ssh.start("-np", 2, "-H", "h0:1,h1:1", "--as-horovod", *show).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:h{rank} lightcc.runner" for rank in range(2)]


def test_run_over_ssh(ssh):
    """From Python. A function and results of 20 MB take the same way."""
    code = f"""
import os, socket
from lightcc.runner import run
def f(data):
    return os.environ["HOROVOD_RANK"], socket.gethostname(), data
data = os.urandom(20 << 20)
results = run(f, (data,), num_proc=3, hosts="h0:1,h1:1,h2:1", ssh_port={SSH_PORT}, start_timeout=60,
              ssh_identity_file={str(ssh.folder / "key")!r})
print(*[result[:2] for result in results], all(result[2] == data for result in results))
run(lambda: 1 // (2 - int(os.environ["HOROVOD_RANK"])), num_proc=3, hosts="h0:1,h1:1,h2:1", ssh_port={SSH_PORT},
    ssh_identity_file={str(ssh.folder / "key")!r})
"""
    job = Job(*ssh.hosts.command("h0", [sys.executable, "-c", code]), PATH=f"{ssh.folder}/bin:{os.environ['PATH']}",
              cwd=ssh.folder)
    code, out, err = job.finish()
    assert out == "('0', 'h0') ('1', 'h1') ('2', 'h2') True\n", err
    assert code == 1 and re.search(r"RuntimeError: run: rank 2 \(pid \d+, host h2\) exited with code 1", err)
    assert err.endswith("ZeroDivisionError: integer division or modulo by zero\n\n"), err
    ssh.expect_nobody()


def test_signals_over_ssh(ssh):
    job = ssh.start("-np", 3, "-H", "h0:1,h1:1,h2:1", *SLEEPERS)
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(3)))
    job.process.terminate()
    assert job.finish()[::2] == (143, "lightccrun: interrupted by signal 15 (SIGTERM); ended 3 ranks\n")
    ssh.expect_nobody()


def test_a_killed_launcher_leaves_nobody_over_ssh(ssh):
    job = ssh.start("-np", 3, "-H", "h0:1,h1:1,h2:1", *SLEEPERS)
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(3)))
    job.process.kill()
    job.finish()
    ssh.expect_nobody()


def test_a_killed_ssh_is_a_lost_host(ssh):
    job = ssh.start("-np", 3, "-H", "h0:1,h1:1,h2:1", *SLEEPERS)
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(3)))
    (connection,) = [p for p in job.living() if p.name() == "ssh" and "h2" in p.cmdline()]
    connection.kill()
    code, _, err = job.finish()
    assert code == 1 and err == ("lightccrun: lost host h2 with rank 2: ssh was killed by signal 9 (SIGKILL)"
                                 "; ended the other 2 ranks\n")
    ssh.expect_nobody()


def test_a_host_that_is_cut_off_is_named_within_seconds(ssh):
    job = ssh.start("-np", 4, "-H", "h0:1,h1:2,h2:1", *SLEEPERS)
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(4)))
    ssh.hosts.cut("h1")
    try:
        began = time.monotonic()
        assert job.process.wait(DEADLINE_S) == 1
        assert time.monotonic() - began < LOST_S
    finally:
        ssh.hosts.restore("h1")
    err = job.process.stderr.read().decode()
    assert re.match(r"lightccrun: lost host h1 with ranks 1, 2: ssh exited with code 255: .*not responding.*"
                    r"; ended the other 2 ranks\n", err), err
    job.process.stderr.close()
    job.process.stdout.close()
    ssh.expect_nobody()  # now that it can hear, its agent notices too


def test_a_host_that_ssh_cannot_reach_is_named(ssh):
    ssh.hosts.cut("h2")
    try:
        code, out, err = ssh.start("-np", 2, "-H", "h1:1,h2:1", "--start-timeout", 20, "echo", "hi").finish()
    finally:
        ssh.hosts.restore("h2")
    assert code == 1 and out == "" and "agent on host h2: ssh exited with code 255: ssh: connect to host h2 port" in err
    code, out, err = ssh.start("-np", 2, "-H", "h1:1,nonesuch:1", "echo", "hi").finish()
    assert code == 1 and "host nonesuch: ssh exited with code 255: ssh: Could not resolve hostname nonesuch" in err
    ssh.expect_nobody()

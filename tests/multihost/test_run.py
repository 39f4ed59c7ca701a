"""run() on emulated hosts: results, failures and ends. The launcher is on no host but where it says so."""
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import lightcc.numpy as hvd
from jobs import DEADLINE_S, Job, launch, wait_until
from lightcc.launch import remote
from lightcc.runner import run

THREE = {"num_proc": 4, "hosts": "h2:1,h0:2,h1:9"}
LAUNCHER = "import os, signal, socket, subprocess, sys, time\nfrom lightcc.runner import run\n"


@pytest.fixture(autouse=True)
def by_namespaces(hosts, monkeypatch):
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", hosts.launch_command)
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def rank():
    return int(os.environ["HOROVOD_RANK"])


def slowed(hosts, folder, way):
    """A launch command over a relay that passes 1 MB/s."""
    relay = folder / "relay.py"
    relay.write_text("import os, time\nwhile chunk := os.read(0, 10_000):\n    os.write(1, chunk); time.sleep(0.01)\n")
    return hosts.launch_command.replace('exec sh -c "$1"', way.format(relay=f"{sys.executable} {relay}"))


# Results.

def test_results_are_in_rank_order_from_all_hosts(capfd):
    def where(x, y):
        print("hello")
        return rank(), socket.gethostname(), os.environ["HOROVOD_LOCAL_RANK"], os.getcwd(), x + y

    assert run(where, (1,), {"y": 2}, **THREE) == [
        (0, "h2", "0", os.getcwd(), 3), (1, "h0", "0", os.getcwd(), 3), (2, "h0", "1", os.getcwd(), 3),
        (3, "h1", "0", os.getcwd(), 3)]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}]<stdout>:hello" for rank in range(4)]


def test_ranks_work_together():
    def total():
        hvd.init()
        return hvd.allreduce(np.full(3, 10.0 ** hvd.rank()), op=hvd.Sum).tolist()

    assert run(total, network_interfaces="eth0", **THREE) == [[1111.0] * 3] * 4


def test_the_launcher_can_be_on_one_of_the_hosts(hosts, tmp_path):
    (tmp_path / "hostfile").write_text("h0 slots=1\nh1 slots=1\n")
    job = Job(*hosts.command("h0", [sys.executable, "-c", LAUNCHER + f"""
import lightcc.numpy as hvd, numpy as np
def total():
    hvd.init()
    return socket.gethostname(), hvd.allreduce(np.full(3, 10.0 ** hvd.rank()), op=hvd.Sum).tolist()
print(run(total, num_proc=2, hostfile={str(tmp_path / 'hostfile')!r}))
"""]))
    code, out, err = job.finish()
    assert (code, out) == (0, "[('h0', [11.0, 11.0, 11.0]), ('h1', [11.0, 11.0, 11.0])]\n"), err


def test_large_arguments_and_results():
    """As each result of 100 MB is unpickled straight from its memory, the launcher says how much there is of such; its
    own has the values then, and one memory mapped."""
    code, out, err = Job(sys.executable, "-c", LAUNCHER + """
import resource
def memory_mb(data):
    ours = [path for path in map("/proc/self/fd/{}".format, range(100))
            if os.path.lexists(path) and "memfd:lightcc" in os.readlink(path)]
    sizes = {status.st_ino: status.st_size for status in map(os.stat, ours)}  # a mapping has the descriptor twice
    return data, sum(sizes.values()) >> 20
class Result:
    def __init__(self, data):
        self.data = data
    def __reduce__(self):
        return memory_mb, (self.data,)
def more(data):
    return Result(data[:-1] + os.environ["HOROVOD_RANK"].encode())
def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
data = os.urandom(1 << 20) * 100
before = peak_mb()
results = run(more, (data,), num_proc=3, hosts="h0:2,h1:1")
print(peak_mb() - before, *[held for _, held in results])
for rank, (result, _) in enumerate(results):
    assert result == data[:-1] + str(rank).encode()
""").finish(120)
    assert code == 0, err
    peak, *held = map(int, out.split())
    assert peak < 450 and held == [300, 200, 100]


def test_a_module_of_our_path_is_found(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("import os\ndef f():\n    return int(os.environ['HOROVOD_RANK'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here
    assert run(only_here.f, **THREE) == [0, 1, 2, 3]


def test_it_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(rank, **THREE)))
    thread.start()
    thread.join(DEADLINE_S)
    assert results == [0, 1, 2, 3]


def test_what_a_function_leaves_behind_ends(hosts):
    """The fixture looks."""
    assert run(lambda: subprocess.Popen(["sleep", "600"]) and None, **THREE) == [None] * 4


# Failures.

def test_an_exception_names_its_rank_and_host():
    def fail():
        if rank() == 3:
            raise KeyError("the cause")
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)^run: rank 3 \(pid \d+, host h1\) exited with code 1; ended the other "
                                           r"3 ranks\n\nTraceback .*, in fail\n.*KeyError: 'the cause'\n$"):
        run(fail, **THREE)
    assert time.monotonic() - began < 300


def test_of_several_exceptions_the_first_is_told(tmp_path):
    """Rank 3 raises first but takes its time to end. These hosts share their files."""
    def fail():
        import atexit
        (tmp_path / str(rank())).touch()
        if rank() == 3:
            while len(list(tmp_path.iterdir())) < 4:
                time.sleep(0.02)
            atexit.register(time.sleep, 1)
            (tmp_path / "raises").touch()
            raise KeyError("the cause")
        while not (tmp_path / "raises").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        raise RuntimeError("a consequence")

    with pytest.raises(RuntimeError, match=r"(?s)^run: rank 3 \([^)]*host h1\) .*; ended the other 3 ranks\n\n"
                                           r"Traceback .*KeyError: 'the cause'\n$"):
        run(fail, **THREE)


@pytest.mark.parametrize("end, message", [
    (lambda: os._exit(7), r"^run: rank 2 \(pid \d+, host h0\) exited with code 7; ended the other 3 ranks$"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL),
     r"^run: rank 2 \(pid \d+, host h0\) was killed by signal 9 \(SIGKILL\); ended the other 3 ranks$"),
    (lambda: os.kill(os.getppid(), signal.SIGKILL),
     r"^run: lost host h0 with ranks 1, 2: ip .*; ended the other 2 ranks$"),
    (lambda: sys.exit(5), r"^run: rank 2 \(pid \d+, host h0\) exited with code 5; ended the other 3 ranks$"),
])
def test_a_death_names_rank_host_and_how(end, message):
    def die():
        if rank() == 2:
            end()
        time.sleep(600)

    with pytest.raises(RuntimeError, match=message):
        run(die, **THREE)


def test_a_rank_that_leaves_no_result_is_named():
    with pytest.raises(RuntimeError, match=r"^run: rank 1 \(host h0\) exited with code 0 before the function returned"):
        run(lambda: os._exit(0) if rank() == 1 else None, **THREE)


def test_a_result_that_cannot_travel_names_its_rank():
    class Spoilt:
        def __reduce__(self):
            return int, ("no number",)

    with pytest.raises(RuntimeError, match=r"(?s)rank 2 \(pid \d+, host h0\) exited with code 1.*the result of rank 2, "
                                           r"of type lock, cannot be pickled: cannot pickle '_thread.lock' object"):
        run(lambda: threading.Lock() if rank() == 2 else None, **THREE)
    with pytest.raises(RuntimeError, match=r"^run: the result of rank 2 \(host h0\) cannot be unpickled here: "
                                           r"ValueError\(\"invalid literal for int"):
        run(lambda: Spoilt() if rank() == 2 else None, **THREE)


def test_a_value_on_its_way_does_not_hold_a_failure_up(hosts, tmp_path, monkeypatch):
    """A result of 100 MB begins to come; then another rank fails."""
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", slowed(hosts, tmp_path, 'sh -c "$1" | {relay}'))

    def half():
        if rank() == 0:
            return bytes(100 << 20)
        time.sleep(3)
        os._exit(9)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+, host h1\) exited with code 9; ended the other rank$"):
        run(half, num_proc=2, hosts="h0:1,h1:1")
    assert time.monotonic() - began < 90  # the result alone would take 100


def test_a_host_that_cannot_be_reached_is_named(monkeypatch, hosts):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"cannot start lightcc's agent on host h9: ip exited with code \d+: .*h9"):
        run(rank, num_proc=2, hosts="h0:1,h9:1")
    silent = shlex.join(["sh", "-c", 'test {host} = h1 && exec sleep 600; exec sh -c "$1"', "sh", "{command}"])
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", silent)
    with pytest.raises(RuntimeError, match=r"no answer within 8 s .* from lightcc's agent on h1"):
        run(rank, num_proc=2, hosts="h0:1,h1:1", start_timeout=8)
    assert time.monotonic() - began < 120


def test_a_host_that_takes_nothing_more_is_lost(hosts, monkeypatch):
    """Its agent speaks, but does not hear."""
    monkeypatch.setattr(remote, "SILENCE_S", 8.0)
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", hosts.launch_command.replace(
        'exec sh -c "$1"', '(head -c 100000; exec sleep 600) | sh -c "$1"'))
    with pytest.raises(RuntimeError, match="agent on host h0: it has taken nothing of what it was sent for 8 s"):
        run(len, (bytes(10 << 20),), hosts="h0:1")
    wait_until(lambda: not hosts.pids(), "what was killed to be gone", hosts.pids)  # a lost host is not waited for


def test_a_program_that_is_not_there_names_its_host():
    with pytest.raises(RuntimeError, match=r"host h0: rank 0: cannot start '/no/python': No such file"):
        run(rank, num_proc=1, hosts="h0:1", executable="/no/python")


def test_what_it_refuses(monkeypatch):
    with pytest.raises(ValueError, match="4 processes do not fit"):
        run(rank, num_proc=4, hosts="h0:1,h1:2")
    with pytest.raises(ValueError, match="no network interface of this host is '=nonesuch'"):
        run(rank, num_proc=2, hosts="localhost:1,h1:1", network_interfaces="nonesuch")
    with pytest.warns(DeprecationWarning, match="network_interface is deprecated, use network_interfaces"), \
            pytest.raises(ValueError, match="no network interface of this host is '=nonesuch'"):
        run(rank, num_proc=2, hosts="localhost:1,h1:1", network_interface="nonesuch")
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", "ssh {host}")
    with pytest.raises(ValueError, match="LIGHTCC_LAUNCH_COMMAND: 'ssh {host}' does not say where {command} goes"):
        run(rank, num_proc=2, hosts="h0:1,h1:1")
    code, _, err = launch("-np", 2, "-H", "h0:1,h1:1", "true")
    assert code == 2 and "'ssh {host}' does not say where {command} goes" in err


def test_lightccrun_honours_the_launch_command_of_the_environment():
    code, out, err = launch("-np", 2, "-H", "h0:1,h1:1", "hostname")
    assert (code, sorted(out.splitlines()), err) == (0, ["[0]<stdout>:h0", "[1]<stdout>:h1"], "")


# Ends from outside.

@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nobody_on_any_host(hosts, signum):
    job = Job(*hosts.command("h3", [sys.executable, "-c", LAUNCHER + """
def wait():
    child = subprocess.Popen(["sleep", "600"])
    print("up")
    child.wait()
try:
    run(wait, num_proc=4, hosts="h0:1,h1:2,h3:1")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""]))
    job.wait_for(*(f"[{rank}]<stdout>:up" for rank in range(4)))
    assert all(hosts.pids(name) for name in ("h0", "h1", "h3"))
    job.process.send_signal(signum)
    code, out, _ = job.finish()
    assert (code, out) == ((0, "interrupted\n") if signum == signal.SIGINT else (-signum, ""))
    wait_until(lambda: not hosts.pids(), "all hosts to be empty", hosts.pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_signals_while_a_function_or_a_result_travels(hosts, tmp_path, signum):
    for way, func, args in (('{relay} | sh -c "$1"', "len", "(bytes(100 << 20),)"),
                            ('sh -c "$1" | {relay}', "bytes", "(100 << 20,)")):
        job = Job(sys.executable, "-c", LAUNCHER + f"""
try:
    print("up", flush=True)
    run({func}, {args}, num_proc=1, hosts="h0:1")
except KeyboardInterrupt:
    print("interrupted", flush=True)
""", LIGHTCC_LAUNCH_COMMAND=slowed(hosts, tmp_path, way))
        job.wait_for("up")
        wait_until(lambda: hosts.pids("h0"), "the agent to have begun")
        time.sleep(1)
        job.process.send_signal(signum)
        code, out, err = job.finish()
        assert (code, out) == ((0, "interrupted\n") if signum == signal.SIGINT else (-signum, "")), err
        wait_until(lambda: not hosts.pids(), "all hosts to be empty", hosts.pids)

"""Elastic jobs on emulated hosts, each with one worker: what happens when workers, hosts and the driver are lost. The
driver is on no host; what reaches it from a host does not pass the host's cable."""
import contextlib
import os
import re
import signal
import sys
import time

import pytest

from elastic_jobs import TRAINING, job, printed, result, trained, workers
from emulated import Hosts
from jobs import start, wait_until

pytestmark = pytest.mark.long

NAMES = ["h0", "h1", "h2"]
# Until the others go on, and until nobody is left. bench/elastic.py measures; here two cores may have much else to do.
KILLED_S, LOST_S, ABANDONED_S = 60.0, 60.0, 60.0
INIT = "import lightcc.numpy as hvd; print('init', flush=True); hvd.init()"
GONE = "the launcher of this elastic job is gone: it has closed the connection"


@pytest.fixture(scope="module")
def hosts():
    with Hosts(len(NAMES)) as hosts:
        yield hosts


def training(hosts, tmp_path, *flags, framework="numpy"):
    """A job that trains, with a worker on each host."""
    running = job(tmp_path, "-np", 3, "--min-np", 1, "-H", ",".join(f"{name}:1" for name in NAMES),
                  "--launch-command", hosts.launch_command, *flags, passes="inf", pause_s=0.02,
                  framework=framework)
    trained(running, 3)
    return running


def worker(running, hosts, name):
    (found,) = [process for process in workers(running) if process.pid in hosts.pids(name)]
    return found


def goes_on(running, size, within_s):
    began = time.monotonic()
    printed(running, f"size {size}\n")
    trained(running)
    assert time.monotonic() - began < within_s


def finish(running, tmp_path):
    """What the driver has said, and the world's size in each of its epochs."""
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0, err
    sizes = result(out)
    return err, [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]


def test_a_killed_worker_and_a_host_that_only_the_driver_reaches_cost_only_themselves(hosts, tmp_path):
    running = training(hosts, tmp_path, "--start-timeout", 8, framework="torch")
    killed, apart = worker(running, hosts, "h1"), worker(running, hosts, "h2")
    killed.suspend()
    time.sleep(3)  # for which a worker is waited, so this is no epoch's end
    killed.resume()
    trained(running, 3)
    killed.kill()
    goes_on(running, 2, KILLED_S)
    try:
        hosts.cut("h2")
        goes_on(running, 1, LOST_S + 8)
    finally:
        hosts.restore("h2")
    err, sizes = finish(running, tmp_path)
    assert sizes == [3, 2, 1]
    assert f"lightccrun: worker 1 (pid {killed.pid} on host h1) was killed by signal 9 (SIGKILL)\n" in err, err
    assert "lightccrun: epoch 2: 2 workers on h0, h2\n" in err, err
    assert re.search(rf"worker 2 \(pid {apart.pid} on host h2\) cannot reach worker 0 \(pid \d+ on host h0\)", err), err
    assert "lightccrun: epoch 4: 1 worker on h0\n" in err, err


def test_a_host_that_falls_silent_is_lost_and_comes_back_after_a_cooldown(hosts, tmp_path):
    """That of rank 0, as if its power had failed: the driver's connection does not end."""
    running = training(hosts, tmp_path, "--blacklist-cooldown-range", 2, 2)
    lost = worker(running, hosts, "h0")
    old = hosts.pids("h0")
    try:
        hosts.cut("h0")
        for pid in old:
            os.kill(pid, signal.SIGSTOP)
        goes_on(running, 2, LOST_S)
    finally:
        hosts.restore("h0")
        for pid in set(old) & set(hosts.pids("h0")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not set(old) & set(hosts.pids("h0")), "what was on the lost host to end")
    printed(running, "size 3\n")
    err, sizes = finish(running, tmp_path)
    assert sizes == [3, 2, 3]
    assert "lightccrun: lost host h0: it has been silent for 4 s\n" in err, err
    assert f"lightccrun: worker 0 (pid {lost.pid} on host h0) was lost with its host\n" in err, err
    assert "lightccrun: epoch 2: 2 workers on h1, h2\n" in err, err


def test_workers_and_agents_say_so_and_end_when_the_driver_is_killed(hosts, tmp_path):
    """Into files, as nobody else listens any more. One job trains; of another, a worker waits for a second in init."""
    launch = hosts.launch_command.replace('"$1"', f'"$1" 2>>{tmp_path}/agent.{{host}}')
    program = ["sh", "-c", 'trap "" TERM; exec 2>"$0".$HOROVOD_RANK; exec "$@"']  # which the agent sends a second later
    first_waits = ["sh", "-c", 'test $HOROVOD_RANK = 0 || exec sleep 600; exec "$@"', "sh"]
    trains, waits = tmp_path / "trains", tmp_path / "waits"
    jobs = [start("-np", 2, "--min-np", 2, "-H", where, "--launch-command", launch, *program, log, *command)
            for where, log, command in (
                ("h0:1,h1:1", trains, [sys.executable, TRAINING, tmp_path, "inf"]),
                ("h1:1,h2:1", waits, [*first_waits, sys.executable, "-c", INIT]))]
    trained(jobs[0])
    printed(jobs[1], "init")
    wait_until((tmp_path / "waits.1").exists, "the rank that does not come to have begun")
    for running in jobs:
        running.process.kill()
    wait_until(lambda: not hosts.pids(), "all hosts to be empty", hosts.pids, ABANDONED_S)
    for running in jobs:
        running.finish()
    for log in ("trains.0", "trains.1"):
        assert GONE in (tmp_path / log).read_text()
    assert (tmp_path / "waits.0").read_text().endswith(f"RuntimeError: init: {GONE}\n")
    for name, agents in (("h0", 1), ("h1", 2), ("h2", 1)):
        assert (tmp_path / f"agent.{name}").read_text() == agents * (
            f"lightcc's agent on host {name}: the launcher is gone; ending its ranks\n")

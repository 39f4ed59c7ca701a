"""run() with elastic workers: results, workers that die and come, failures, and that nothing is left."""
import os
import re
import signal
import threading
import time

import elastic_functions as functions
import psutil
import pytest

from jobs import DEADLINE_S, expect_run_leaves_nobody, wait_until
from lightcc.runner import run

BY_SHELL = "sh -c {command}"  # starts the agents of other hosts, which are all this one


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", BY_SHELL)
    before = mine()
    yield
    # A discovery script may have been killed just now. What was there before may go at any time: other files' garbage.
    wait_until(lambda: mine() <= before, "all of the job to be gone", lambda: mine() - before)


def mine():
    """Children and descriptors of this process."""
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = {(place, os.readlink(place)) for place in places if os.path.lexists(place)}  # not what listed them
    return files | {process.pid for process in psutil.Process().children()}


# Results.

@pytest.mark.parametrize("hosts", [None, "h1:1,localhost:1,h2:1"])
def test_it_returns_what_the_first_min_num_proc_ranks_return(hosts):
    assert run(functions.count, (3,), num_proc=3, min_num_proc=2, hosts=hosts) == [(0, 3, 0), (1, 3, 1)]


def test_any_of_three_arguments_makes_it_elastic():
    def variables():
        return os.environ.get("HOROVOD_ELASTIC"), os.environ["HOROVOD_RANK"]

    for elastic, count in (({"min_num_proc": 2}, 2), ({"max_num_proc": 1}, 1),
                           ({"host_discovery_script": "echo localhost", "slots": 1}, 1)):
        assert run(variables, **elastic) == [("1", str(number)) for number in range(count)]
    assert run(variables) == [(None, "0")]


def test_large_arguments_and_results():
    data = os.urandom(1 << 20) * 5
    results = run(functions.extended, (data,), num_proc=3, min_num_proc=3, hosts="h1:2,localhost:1")
    assert all(result == data + bytes([rank]) for rank, result in enumerate(results)) and len(results) == 3


def test_it_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(functions.count, (2,), min_num_proc=2)))
    thread.start()
    thread.join(DEADLINE_S)
    assert results == [(0, 2, 0), (1, 2, 1)]


# Workers that die and come.

@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_survivors_return(victim):
    assert run(functions.train, (1, 2, victim), num_proc=3, min_num_proc=2, hosts="h1:1,h2:1,localhost:1") == [
        (0, 2, 0), (1, 2, 2)]


def test_a_newcomer_on_another_host_has_the_function_and_returns():
    assert run(functions.train, (1, 2), min_num_proc=2, max_num_proc=2, hosts="localhost:1,h1:1,h2:1") == [
        (0, 2, 0), (1, 2, 2)]


def test_a_newcomer_on_this_host_after_its_cooldown():
    assert run(functions.train, (1, 2), min_num_proc=2, cooldown_range=(0.1, 1)) == [(0, 2, 0), (1, 2, 2)]


def test_hosts_that_a_script_names_later(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1")
    later = "localhost:1\nh1"
    assert run(functions.grow, (str(hosts), later, 3), min_num_proc=1, slots=2, reset_limit=1,
               host_discovery_script=f"cat {hosts}") == [(0, 3, 0)]


# Failures.

@pytest.mark.parametrize("hosts, host", [(None, r"\S+"), ("h1:2", "h1")])
def test_a_failure_names_worker_and_host_and_ends_in_its_traceback(hosts, host):
    with pytest.raises(RuntimeError) as error:
        run(functions.raise_in, (1,), min_num_proc=2, hosts=hosts)
    named = rf"worker 1 \(pid \d+ on host {host}\)"
    assert re.match(rf"(?s)run: no host is left whose workers have not failed \(--failures-per-host 1\); the first: "
                    rf"{named} exited with code 1\n\n{named} raised an exception\n\nTraceback .*\nKeyError: "
                    r"'the cause'\n$", str(error.value)), error.value


def test_a_result_that_cannot_be_pickled():
    with pytest.raises(RuntimeError, match="the result of worker 0, of type lock, cannot be pickled: "):
        run(threading.Lock, min_num_proc=1)


def test_too_few_are_left():
    with pytest.raises(RuntimeError, match=r"^run: no host is left .*; the first: worker 0 \(pid \d+ on host \S+\) was "
                                           r"killed by signal 9 \(SIGKILL\)$"):
        run(functions.train, (0, 2), min_num_proc=2)


@pytest.mark.parametrize("follow, end", [
    (functions.fail, r"exited with code 1, so it has no result; .*\nKeyError: 'of rank 1'\n$"),
    (functions.step, r"was in init\(\) for another world, so it has no result; .*$"),
    (lambda state: os._exit(0), "exited with code 0 before the function returned, so it has no result$"),
])
def test_who_does_not_follow_the_first_that_returns(follow, end):
    assert run(functions.after_the_first, (follow,), num_proc=2, min_num_proc=1) == ["first"]
    with pytest.raises(RuntimeError, match=rf"(?s)^run: worker 1 \(pid \d+ on host \S+\), rank 1, {end}"):
        run(functions.after_the_first, (follow,), min_num_proc=2)


@pytest.mark.parametrize("arguments, message", [
    ({"executable": "/no/python"}, "worker 0 .*was not started: .*cannot start '/no/python': No such file or "),
    ({"executable": "/no/python", "hosts": "h1:1"}, "worker 0 .* on host h1.* was not started: .*cannot start '/no"),
    ({"host_discovery_script": "exit 3"}, "^host discovery: exit 3 exited with code 3$"),
    ({"host_discovery_script": "echo h1"}, "printed 'h1' without slots"),
])
def test_what_cannot_begin(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        run(functions.worker, min_num_proc=1, **arguments)


def test_a_host_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", "sh -c 'echo no way >&2; exit 3' {command}")
    with pytest.raises(RuntimeError, match=r"worker 0 \(pid unknown on host h1\) was lost with its host: sh exited "
                                           r"with code 3: no way$"):
        run(functions.worker, min_num_proc=1, hosts="h1:1")


def test_slots_that_do_not_come(monkeypatch, capfd):
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "2.5")
    monkeypatch.setattr("lightcc.elastic.membership.SAY_AFTER_S", 0.1)
    with pytest.raises(RuntimeError, match=r"^run: after 2.5 s \(--elastic-timeout\) there were [01] of 2 slots$"):
        run(functions.worker, min_num_proc=2, host_discovery_script="echo localhost:1")
    said = r"lightccrun: waiting for slots: [01] of 2 are there; at most 2.5 s \(--elastic-timeout\)\n"
    assert re.fullmatch(said, capfd.readouterr().err)


@pytest.mark.parametrize("arguments, message", [
    ({"slots": 2}, "slots is for elastic jobs: say min_num_proc, max_num_proc or host_discovery_script too"),
    ({"reset_limit": 2}, "reset_limit is for elastic jobs"),
    ({"cooldown_range": (1, 2)}, "cooldown_range is for elastic jobs"),
    ({"num_proc": 2, "min_num_proc": 3}, "min_num_proc 3, num_proc 2: expected min_num_proc <= num_proc <= max_num_pr"),
    ({"num_proc": 3, "max_num_proc": 2}, "min_num_proc 3, num_proc 3, max_num_proc 2: expected"),
    ({"min_num_proc": 0}, "min_num_proc: '0' is not a whole number, 1 or more"),
    ({"max_num_proc": 1.5}, "max_num_proc: '1.5' is not a whole number, 1 or more"),
    ({"num_proc": -1, "max_num_proc": 1}, "num_proc: '-1' is not a whole number, 1 or more"),
    ({"min_num_proc": 1, "reset_limit": True}, "reset_limit: 'True' is not a whole number, 0 or more"),
    ({"min_num_proc": 1, "slots": 2}, "slots is for hosts that a host_discovery_script names"),
    ({"min_num_proc": 1, "cooldown_range": 5}, "cooldown_range: expected two times in seconds, the shorter first"),
    ({"min_num_proc": 1, "cooldown_range": (9, 3)}, "cooldown_range: expected two times"),
    ({"host_discovery_script": "x", "hosts": "h1:1"}, "give either host_discovery_script or hosts"),
    ({"min_num_proc": 1, "hosts": "h1:1", "hostfile": "x"}, "give either hosts or a hostfile"),
    ({"min_num_proc": 3, "hosts": "h1:2"}, "3 processes do not fit: the hosts have 2 slots"),
])
def test_arguments_that_are_none_or_contradict_each_other(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run(functions.worker, **arguments)


def test_deprecated_names():
    with pytest.warns(DeprecationWarning) as warned:
        assert run(functions.worker, np=2, min_np=1, max_np=2) == [0]
    assert [str(warning.message) for warning in warned] == [
        f"run: {old} is deprecated, use {new}" for old, new in (("np", "num_proc"), ("min_np", "min_num_proc"),
                                                                ("max_np", "max_num_proc"))]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left(signum):
    expect_run_leaves_nobody(signum, 'min_num_proc=2, hosts="localhost:1,h1:1"')


def test_a_discovery_script_that_hangs_is_not_left(tmp_path):
    asked, hangs = tmp_path / "asked", tmp_path / "hangs"
    script = f"test -e {asked} && touch {hangs} && exec sleep 600; touch {asked}; echo localhost:1"

    def wait():
        while not hangs.exists():
            time.sleep(0.02)

    assert run(wait, host_discovery_script=script) == [None]

"""Hosts of elastic jobs: those of a list, those that a script prints, and the thread that looks again and again."""
import os
import select
import signal
import stat
import sys
import threading

import pytest

from jobs import DEADLINE_S, Job, wait_until
from lightcc.elastic.discovery_thread import DiscoveryThread
from lightcc.launch.discovery import DiscoveryError, FixedHosts, HostDiscovery, HostDiscoveryScript
from lightcc.launch.hosts import Host


@pytest.mark.parametrize("printed, slots, found", [
    ("a:2\nb:3\n", None, {"a": 2, "b": 3}), ("b\n\n  a:1  \n", 4, {"b": 4, "a": 1}), ("", None, {}),
    ("a:1\na:2", None, {"a": 3}), ("[::1]:2\nnode-1.x", 1, {"::1": 2, "node-1.x": 1}), ("a:0", None, {"a": 0}),
])
def test_what_a_script_prints(tmp_path, printed, slots, found):
    (tmp_path / "hosts").write_text(printed)
    discovered = HostDiscoveryScript(f"cat {tmp_path / 'hosts'}", slots).find_available_hosts_and_slots()
    assert list(discovered.items()) == list(found.items())  # in this order


@pytest.mark.parametrize("script, message", [
    ("echo a", "printed 'a' without slots; print host:slots, or say --slots-per-host"),
    ("echo 'a:2 b:3'", "printed 'a:2 b:3'; expected host or host:slots"),
    ("echo -oProxyCommand=x:2", "expected host or host:slots"),
    ("echo one >&2; echo two >&2; exit 3", "exited with code 3: one | two"),
    ("/nonesuch", "exited with code 127"),
    ("echo a:" + "9" * 5000, "expected host or host:slots"),
    ("echo a; while :; do echo a:1; done", "printed more than 1048576 bytes; expected a line host:slots for each host"),
    ("echo b:1; while :; do echo a; done >&2", "took more than 0.5 s"),
    (r"printf 'a\033[2J'", r"printed 'a\x1b[2J'; expected host or host:slots"),
    (r"printf '\033]0;x\007no' >&2; exit 1", r"exited with code 1: \x1b]0;x\x07no"),
])
def test_a_script_that_is_none(script, message, monkeypatch):
    if "0.5 s" in message:
        monkeypatch.setattr("lightcc.launch.discovery._SCRIPT_TIMEOUT_S", 0.5)
    with pytest.raises(DiscoveryError) as error:
        HostDiscoveryScript(script).find_available_hosts_and_slots()
    assert str(error.value).startswith(f"host discovery: {script} ") and message in str(error.value)


def test_a_script_that_cannot_be_executed(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("echo a:1")
    script.chmod(stat.S_IRUSR)
    with pytest.raises(DiscoveryError, match="code 126"):
        HostDiscoveryScript(str(script)).find_available_hosts_and_slots()


def test_what_a_script_leaves_running_is_not_waited_for(tmp_path):
    discovery = HostDiscoveryScript(f"sleep 600 & echo $! > {tmp_path}/pid; echo a:1")
    try:
        assert discovery.find_available_hosts_and_slots() == {"a": 1}
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_script_ends_with_who_runs_it(tmp_path):
    program = ("from lightcc.runner.elastic.discovery import HostDiscoveryScript\n"
               "HostDiscoveryScript('true').find_available_hosts_and_slots()\n"
               f"HostDiscoveryScript('touch {tmp_path}/runs; sleep 600; true').find_available_hosts_and_slots()")
    job = Job(sys.executable, "-c", program)
    wait_until((tmp_path / "runs").exists, "the script to run")
    job.process.kill()
    job.finish()  # fails if somebody is left


def test_a_script_does_not_begin_before_its_end_is_cared_for(tmp_path):
    program = ("import os\n"
               "from lightcc.runner.elastic.discovery import HostDiscoveryScript\n"
               "from lightcc.launch.watcher import Watcher\n"
               "Watcher.add = lambda *_: os.kill(os.getpid(), 9)\n"
               f"HostDiscoveryScript('touch {tmp_path}/runs').find_available_hosts_and_slots()")
    assert Job(sys.executable, "-c", program).finish()[0] == -signal.SIGKILL
    assert not (tmp_path / "runs").exists()


def test_a_script_is_ended_by_stop(tmp_path):
    discovery = HostDiscoveryScript(f"touch {tmp_path}/runs; sleep 600; echo a:1")
    errors = []

    def look():
        with pytest.raises(DiscoveryError) as error:
            discovery.find_available_hosts_and_slots()
        errors.append(str(error.value))

    thread = threading.Thread(target=look)
    thread.start()
    wait_until((tmp_path / "runs").exists, "the script to run")
    discovery.stop()
    thread.join()
    look()
    assert "exited with code -9" in errors[0] and "since stop() was called" in errors[1], errors


def test_arguments_by_name_and_a_program_that_looks_in_its_own_way():
    class Mine(HostDiscoveryScript):
        def _execute_discovery_script(self):
            return "a:2\nb"

    assert Mine("ignored", 3).find_available_hosts_and_slots() == {"a": 2, "b": 3}
    assert HostDiscoveryScript(discovery_script="echo c", slots=1).find_available_hosts_and_slots() == {"c": 1}


def test_fixed_hosts_are_a_copy():
    given = {"a": 1}
    fixed = FixedHosts(given)
    given["b"] = 2
    fixed.find_available_hosts_and_slots()["c"] = 3
    assert fixed.find_available_hosts_and_slots() == {"a": 1}


class Scripted(HostDiscovery):
    def __init__(self, *answers):
        self.answers = list(answers)

    def find_available_hosts_and_slots(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def looks():
    """looks(*answers) gives a function that returns the hosts that are found next, and whether they are here, and an
    event. Host "me" is, and "slow" too, which is not known before the event is set."""
    answered = threading.Event()
    threads = []

    def start(*answers):
        def is_here(name):
            return name == "me" or (name == "slow" and answered.wait(DEADLINE_S))

        def take():
            assert select.select([thread.fd], [], [], DEADLINE_S)[0]
            return [(host.name, thread.is_here(host.name)) for host in thread.take()[0]]

        thread = DiscoveryThread(Scripted(*answers), is_here)
        threads.append(thread)
        return take, answered

    yield start
    answered.set()
    for thread in threads:
        thread.close()


def test_a_name_that_is_slow_to_resolve_holds_up_no_other_host(looks):
    take, answered = looks({"me": 1}, {"slow": 1, "me": 1, "b": 1})
    assert take() == [("me", True)]
    assert take() == [("me", True), ("b", False)]
    answered.set()
    assert take() == [("slow", True), ("me", True), ("b", False)]


def test_at_first_all_hosts_are_resolved_but_not_for_ever(looks, monkeypatch):
    monkeypatch.setattr("lightcc.elastic.discovery_thread.RESOLVE_S", 2.0)
    take, _ = looks({"slow": 1, "me": 1})
    assert take() == [("slow", False), ("me", True)]


def test_the_thread_tells_of_changes_and_errors_only(monkeypatch):
    monkeypatch.setattr("lightcc.elastic.discovery_thread.PERIOD_S", 0.01)
    turns = threading.Semaphore(0)

    class ByTurns(Scripted):
        def find_available_hosts_and_slots(self):
            turns.acquire()
            return super().find_available_hosts_and_slots()

    thread = DiscoveryThread(ByTurns({"a": 1}, {"a": 1}, DiscoveryError("no"), {"a": 1}, {"a": 2}))
    for looks, news in ((1, ([Host("a", 1)], "")), (2, (None, "no")), (2, ([Host("a", 2)], ""))):
        turns.release(looks)
        assert select.select([thread.fd], [], [], DEADLINE_S)[0] and thread.take() == news
    thread.close()
    turns.release(9)

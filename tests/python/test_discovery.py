"""Hosts of elastic jobs: those of a list, those that a script prints, and the thread that looks again and again."""
import select
import stat

import pytest

from lightcc.elastic.discovery_thread import DiscoveryThread
from lightcc.runner.elastic.discovery import DiscoveryError, FixedHosts, HostDiscovery, HostDiscoveryScript
from lightcc.runner.hosts import Host


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
])
def test_a_script_that_is_none(script, message):
    with pytest.raises(DiscoveryError) as error:
        HostDiscoveryScript(script).find_available_hosts_and_slots()
    assert str(error.value).startswith(f"host discovery: {script} ") and message in str(error.value)


def test_a_script_that_cannot_be_executed(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("echo a:1")
    script.chmod(stat.S_IRUSR)
    with pytest.raises(DiscoveryError, match="code 126"):
        HostDiscoveryScript(str(script)).find_available_hosts_and_slots()


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


def test_the_thread_tells_of_changes_and_errors_only(monkeypatch):
    monkeypatch.setattr("lightcc.elastic.discovery_thread.PERIOD_S", 0.05)
    thread = DiscoveryThread(Scripted({"a": 1}, {"a": 1}, DiscoveryError("no"), {"a": 1}, {"a": 2}))
    took = []
    while select.select([thread.fd], [], [], 0.5)[0]:
        took.append(thread.take())
    thread.close()
    assert took == [([Host("a", 1)], ""), (None, "no"), ([Host("a", 2)], "")]

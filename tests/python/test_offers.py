"""Hosts that come by themselves (lightcc/launch/offers.py): a plain process stands in for a scheduler's task."""
import pickle
import socket
import subprocess
import sys

import pytest

from jobs import wait_until
from lightcc.elastic import driver, results
from lightcc.elastic.limits import Limits
from lightcc.launch import offers, pickling
from lightcc.launch.discovery import HostDiscovery
from lightcc.launch.local import Job, pythonpath_setting
from lightcc.launch.run_files import RunFiles

DEADLINE_S = 300
TASK = """
import pickle, sys
from lightcc.launch.offers import offer
offer(pickle.loads(bytes.fromhex(sys.stdin.readline())), {"OF_THE_TASK": "yes"})
print("over")
"""


class Task:
    def __init__(self, invitation):
        self.process = subprocess.Popen([sys.executable, "-c", TASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.process.stdin.write(pickle.dumps(invitation).hex() + "\n")
        self.process.stdin.flush()

    def end(self):
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return out + err


class Coming(HostDiscovery):
    def __init__(self, there):
        self._there = there

    def find_available_hosts_and_slots(self):
        return self._there.hosts()


@pytest.fixture
def there():
    found = offers.Offers(["127.0.0.1"])
    yield found
    found.close()


def rank_and_variable():
    import os

    import lightcc.numpy as hvd
    hvd.init()
    return hvd.rank(), hvd.size(), os.environ["OF_THE_TASK"]


def test_a_job_runs_on_hosts_that_come_and_those_that_are_not_wanted_end(there):
    tasks = [Task(there.invitation(number)) for number in range(3)]
    wait_until(lambda: len(there.hosts()) == 3, "all offers")
    with RunFiles([]) as run_files:
        with open(run_files.function, "wb", closefd=False) as file:
            pickling.write(file, rank_and_variable, (), {})
        job = Job([], lambda rank: [sys.executable, "-m", "lightcc.launch.task"], run_files=run_files,
                  settings=pythonpath_setting(), agent_command=there.agent_command, start_timeout_s=DEADLINE_S)
        outcome = driver.drive(job, Limits(2, 2, 2), Coming(there), 1, 2, is_here=lambda name: False)
        assert results.values(outcome, 2, run_files) == [(0, 2, "yes"), (1, 2, "yes")]
    there.close()
    assert [task.end() for task in tasks] == ["over\n"] * 3


def test_who_does_not_know_the_secret_is_no_host_and_gets_no_agent(there):
    stranger = Task(there.invitation(0)._replace(secret=b"another"))
    assert "the driver of an elastic job cannot be reached from host" in stranger.end()
    with socket.create_connection(("127.0.0.1", there.invitation(0).port)):  # and says nothing, and holds nobody up
        own = Task(there.invitation(1))
        wait_until(there.hosts, "an offer")
    assert not there.has_come(0) and there.has_come(1)
    assert "secret" not in repr(there.invitation(0))
    assert not [word for word in there.agent_command("h") if there.invitation(0).secret.hex() in word]
    there.close()
    assert own.end() == "over\n"


def test_a_task_that_runs_again_takes_the_place_of_its_first_try(there):
    first = Task(there.invitation(7))
    wait_until(there.hosts, "an offer")
    (name,) = there.hosts()
    second = Task(there.invitation(7))
    wait_until(lambda: there.hosts() and name not in there.hosts(), "another offer", there.hosts)
    assert list(there.hosts()) == [f"{name}.1"]
    assert first.end() == "over\n"
    there.withdraw(7)
    assert there.hosts() == {} and second.end() == "over\n"


def test_a_host_whose_task_has_ended_is_lost_with_a_reason(there):
    done = subprocess.run(there.agent_command("h1-0"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (255, "the task of host h1-0 has ended\n")

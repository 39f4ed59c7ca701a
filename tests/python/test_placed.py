"""Processes that a scheduler has placed: here it is this test, which carries what they say of each other over pipes."""
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightcc.launch import hosts

DEADLINE_S = 300

PROGRAM = """
import json, os, sys
import numpy as np
import lightcc.numpy as hvd
from lightcc.core.exceptions import HorovodInternalError
from lightcc.launch import placed

def place(rank, processes, meeting):
    placed.place(rank, processes, meeting)
    return {name: value for name, value in os.environ.items() if name.startswith(("HOROVOD_", "OMP_", "RANK", "WORLD"))}

def init(comm=None):
    hvd.init(comm)
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
            hvd.allreduce(np.ones(1) * hvd.rank(), op=hvd.Sum)[0]]

do = {"here": placed.here, "open": placed.open_meeting, "place": place, "init": init, "shutdown": hvd.shutdown}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        print(json.dumps({"is": do[name](*arguments)}), flush=True)
    except (ValueError, HorovodInternalError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
"""


class Started:
    """A process that somebody else has started."""

    def __init__(self, **variables):
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, **variables})
        self._deadline = threading.Timer(DEADLINE_S, self.process.kill)
        self._deadline.start()

    def begin(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def reply(self):
        line = self.process.stdout.readline()
        assert line, f"the process has ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, *command):
        self.begin(*command)
        return self.reply()

    def end(self):
        self._deadline.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(monkeypatch):
    """Starts processes, one for each dictionary of variables."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = []

    def begin(*variables):
        started.extend(Started(**one) for one in variables)
        return started

    yield begin
    for one in started:
        one.end()


def ask_all(processes, *command):
    for one in processes:
        one.begin(*command)
    return [one.reply() for one in processes]


def meet(processes):
    """Places them; returns what each has in its environment then."""
    said = [reply["is"] for reply in ask_all(processes, "here")]
    meeting = processes[0].ask("open")["is"]
    for rank, one in enumerate(processes):
        one.begin("place", rank, said, meeting)
    return [one.reply()["is"] for one in processes]


def test_placed_processes_form_a_world_and_the_variables_say_what_hvd_says(start):
    processes = start({"LIGHTCC_HOST_ID": "a"}, {"LIGHTCC_HOST_ID": "b"}, {"LIGHTCC_HOST_ID": "a"})
    variables = meet(processes)
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    said = [[int(one[f"HOROVOD_{name}"]) for name in names] for one in variables]
    assert said == [[0, 3, 0, 2, 0, 2], [1, 3, 0, 1, 1, 2], [2, 3, 1, 2, 0, 1]]
    assert [reply["is"] for reply in ask_all(processes, "init")] == [[*one, 3.0] for one in said]
    assert all(int(one["OMP_NUM_THREADS"]) >= 1 and one["WORLD_SIZE"] == "3" for one in variables)


def test_a_second_init_needs_a_new_meeting(start):
    processes = start({}, {})
    meet(processes)
    assert [reply["is"][1] for reply in ask_all(processes, "init")] == [2, 2]
    assert [reply["is"][1] for reply in ask_all(processes, "init")] == [2, 2]  # nothing happens
    ask_all(processes, "shutdown")
    for reply in ask_all(processes, "init"):
        assert reply["error"].startswith("ValueError: init(): a scheduler has placed this process, rank ")
        assert "the meeting that rank 0 opens anew" in reply["error"]
    meet(processes)
    assert [reply["is"][1] for reply in ask_all(processes, "init")] == [2, 2]


def test_some_of_the_ranks_are_no_world_here(start):
    processes = start({}, {})
    meet(processes)
    for reply in ask_all(processes, "init", [1]):
        assert reply["error"] == ("ValueError: init(comm=[1]): a scheduler has placed the 2 ranks of this world; use "
                                  "process sets for some of them.")
    assert [reply["is"][1] for reply in ask_all(processes, "init", [0, 1])] == [2, 2]


def test_a_rank_that_ends_before_init_is_named_at_the_deadline(start):
    processes = start({"HOROVOD_START_TIMEOUT": "1"}, {})
    meet(processes)
    processes[1].end()
    error = processes[0].ask("init")["error"]
    assert error.startswith("HorovodInternalError: ") and "rank 1" in error


def test_what_another_launcher_has_left_does_not_matter(start):
    """A driver under lightccrun starts a scheduler, whose processes have the driver's environment."""
    left = {"LIGHTCC_JOB_ID": "the driver's", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1", "LIGHTCC_LAUNCHER_FD": "99"}
    processes = start(left, left)
    assert [one["HOROVOD_SIZE"] for one in meet(processes)] == ["2", "2"]
    assert [reply["is"][:2] for reply in ask_all(processes, "init")] == [[0, 2], [1, 2]]


def test_other_versions_are_refused_with_rank_and_host(start):
    (one,) = start({})
    mine = one.ask("here")["is"]
    other = [*["node7", "m"], "0.0.1", "3.8"]
    error = one.ask("place", 0, [mine, other], one.ask("open")["is"])["error"]
    assert error.startswith("ValueError: rank 1 on host node7 has lightcc 0.0.1 with Python 3.8; but rank 0 on host ")
    assert one.ask("place", 2, [mine, mine], one.ask("open")["is"])["error"] == "ValueError: there is no rank 2 among 2"


def test_the_program_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(page[page.index("## Any other scheduler"):].partition("```python\n")[2].partition("```")[0])
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n")


def test_a_meeting_does_not_show_its_secret():
    from lightcc.core.meeting import Meeting
    assert "s3cret" not in repr(Meeting("job", "s3cret", "1.2.3.4:5"))


def test_ranks_of_a_host_need_not_be_neighbours():
    found = hosts.of_ranks([hosts.Machine(key, f"host {key}", False) for key in "abacab"])
    assert [(one.host, one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in found] == [
        ("host a", 0, 3, 0, 3), ("host b", 0, 2, 1, 3), ("host a", 1, 3, 0, 2), ("host c", 0, 1, 2, 3),
        ("host a", 2, 3, 0, 1), ("host b", 1, 2, 1, 2)]

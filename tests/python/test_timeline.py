"""The timeline as users get it: by HOROVOD_TIMELINE or at run time, a file that json.load reads, slices that nest,
times that fit the clock on the wall; and what is left of it after a kill -9."""
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

import ranks
from jobs import DEADLINE_S


@pytest.fixture(autouse=True)
def rows_of_tensors(monkeypatch):
    """Horovod's layout; that of buckets is in test_merge.py and tracing_test.cc."""
    monkeypatch.setenv("LIGHTCC_TIMELINE_ROWS", "tensors")


STRANGE = 'quote" back\\slash line\nbreak\ttab ünï 漢字 😀 </script>'


class Timeline:
    """A file, read back and checked: in each row every E ends the last B, and times do not go back."""

    def __init__(self, text):
        self.events = json.loads(text)
        self.start_s = self.events[0]["args"]["start_time_since_epoch_in_micros"] / 1e6
        names = {e["pid"]: e["args"]["name"] for e in self.events
                 if e["name"] == "process_name" and e["pid"] != 0}
        self.rows = {}  # name: slices and ticks as (depth, name, begin in s, end in s, args of both)
        open_slices, last = {}, {}
        for e in self.events:
            if e["ph"] not in "BEX":
                continue
            row, now = names[e["pid"]], e["ts"] / 1e6
            stack, found = open_slices.setdefault(row, []), self.rows.setdefault(row, [])
            assert now >= last.get(row, 0), f"time goes back in {row}: {e}"
            last[row] = now
            if e["ph"] == "E":
                begun = stack.pop()
                assert begun[1] == e["name"]
                begun[3] = now
                begun[4].update(e.get("args", {}))
            else:
                found.append([len(stack), e["name"], now, now, dict(e.get("args", {}))])
                if e["ph"] == "B":
                    stack.append(found[-1])
        self.open = {row: [slice[1] for slice in stack] for row, stack in open_slices.items() if stack}

    def names(self, row):
        """Of all slices in order, indented by two blanks a level; ticks are left out."""
        return ["  " * depth + name for depth, name, *_ in self.rows[row] if not name.isdigit()]

    def ticks(self, row):
        return {name: begin for depth, name, begin, *_ in self.rows[row] if name.isdigit()}

    def slice(self, row, name):
        return next(slice for slice in self.rows[row] if slice[1] == name)

    def instants(self, name):
        return [e for e in self.events if e["ph"] == "i" and e["name"] == name]


def load(path):
    timeline = Timeline(path.read_text())
    assert timeline.open == {}
    assert timeline.events[-1]["name"] == "TIMELINE_END" and timeline.events[-1]["args"] == {"dropped_events": 0}
    return timeline


EVERYTHING = """
import ctypes, sys, time, numpy as np, lightcc.numpy as hvd
from lightcc.core import lib
from lightcc.core.request_buffer import RequestBuffer
hvd.init()
x = np.ones(6, np.float32)
hvd.allreduce(x, name="w", op=hvd.Sum)
hvd.grouped_allreduce([x, x.astype(np.float64), x], name="group")
hvd.allgather(x[:hvd.rank() + 1], name="g")
hvd.broadcast(x, hvd.size() - 1, name="b")
hvd.alltoall(np.ones(hvd.size()), name="a")
hvd.reducescatter(np.ones(hvd.size()), name="r")
hvd.barrier()
hvd.allreduce(x, name=sys.argv[1])
name, barrier = ctypes.create_string_buffer(b'bad \\xff"'), RequestBuffer(0)
barrier.set_request(lib.BARRIER, 0, 0, ctypes.addressof(name))
lib.finish(lib.submit(barrier.address))
hvd.barrier()
before, is_last = time.time(), hvd.rank() == hvd.size() - 1
late = None if is_last else hvd.allreduce_async(x, name="late")
hvd.barrier()  # the others have submitted it
if is_last:
    time.sleep(0.5)
    late = hvd.allreduce_async(x, name="late")
hvd.synchronize(late)
if hvd.rank() == 0:
    print("times", before, time.time(), flush=True)
"""


def run(np, *arguments):
    code, output = ranks.launch(np, ["-c", *arguments], ranks.DEADLINE_S)
    assert code == 0, output
    return output


@pytest.mark.parametrize("np", (1, 2, 3))
def test_the_file_of_a_job(np, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "t.json"))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    begin = time.time()
    output = run(np, EVERYTHING, STRANGE)
    before, after = map(float, output.split("times ")[1].split()[:2])
    assert os.listdir(tmp_path) == ["t.json"]  # rank 0 writes, no other
    timeline = load(tmp_path / "t.json")

    everyone = {str(rank) for rank in range(np)}
    for key in ("allreduce.w", "allreduce.group", "allgather.g", "broadcast.b", "alltoall.a", "reducescatter.r",
                "barrier.noname.0", f"allreduce.{STRANGE}", "barrier.bad \ufffd\""):
        kind, names = key.split(".")[0].upper(), timeline.names(key)
        assert names[:2] == ["NEGOTIATE_" + kind, kind] and all(name.startswith("  ") for name in names[2:]), names
        assert set(timeline.ticks(key)) == everyone
        negotiation, done = timeline.slice(key, "NEGOTIATE_" + kind), timeline.slice(key, kind)
        assert all(negotiation[2] <= tick <= negotiation[3] for tick in timeline.ticks(key).values())
        assert negotiation[3] <= done[2] <= done[3]
        assert done[4]["status"] == "ok"
    w = timeline.slice("allreduce.w", "ALLREDUCE")[4]
    assert w == {"dtype": "float32", "shape": "[6]", "bytes": 24, "op": "sum", "fused_requests": 1, "status": "ok"}
    group = timeline.names("allreduce.group")
    assert "  MEMCPY_IN_FUSION_BUFFER" in group and "  MEMCPY_OUT_FUSION_BUFFER" in group
    assert "  shared" in group
    assert timeline.slice("allreduce.group", "ALLREDUCE")[4]["bytes"] == 96
    assert len(timeline.instants("CYCLE_START")) >= 11

    # Against the clock on the wall; two clocks are read one after the other, and the machine may be busy.
    assert begin - 0.1 <= timeline.start_s <= before + 0.1
    late = timeline.slice("allreduce.late", "NEGOTIATE_ALLREDUCE")
    done = timeline.slice("allreduce.late", "ALLREDUCE")
    assert before - 0.1 <= timeline.start_s + late[2] and timeline.start_s + done[3] <= after + 0.1
    if np > 1:
        ticks = timeline.ticks("allreduce.late")
        assert max(ticks, key=ticks.get) == str(np - 1)
        assert late[3] - late[2] > 0.2


IN_TWO_DIMENSIONS = """
import numpy as np, lightcc.numpy as hvd
hvd.init()
for name in ("one", "two"):
    hvd.allreduce(np.ones(1_000_000, np.float32), name=name, op=hvd.Sum)
hvd.allreduce(np.ones(10, np.float32), name="small", op=hvd.Sum)
"""
PHASES = ["LOCAL_REDUCESCATTER", "CROSS_ALLREDUCE", "LOCAL_ALLGATHER"]


@pytest.mark.parametrize("node, phases", ((2, PHASES), (1, PHASES[1:2])))
def test_the_phases_of_2d_have_rows_of_their_own(node, phases, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "t.json"))
    monkeypatch.setenv("LIGHT_INTRA_SIZE", str(node))
    monkeypatch.setenv("LIGHT_HIERARCHICAL_THRESHOLD", "1000")
    run(2 * node, IN_TWO_DIMENSIONS)
    timeline = load(tmp_path / "t.json")
    assert "  2d" in timeline.names("allreduce.one") and "  2d" not in timeline.names("allreduce.small")
    assert [name for name in PHASES if name in timeline.rows] == phases
    for name in phases:
        assert [(s[1], s[4]) for s in timeline.rows[name]] == [
            (name, {"request": f"allreduce.{which}", "fused_requests": 1}) for which in ("one", "two")]
    for i, key in enumerate(("allreduce.one", "allreduce.two")):
        whole = timeline.slice(key, "2d")
        slices = [timeline.rows[name][i] for name in phases]
        begins, ends = [s[2] for s in slices], [s[3] for s in slices]
        assert begins == sorted(begins) and ends == sorted(ends)  # chunk by chunk, they overlap
        assert whole[2] <= begins[0] and ends[-1] <= whole[3]
        assert all(begin < end for begin, end in zip(begins, ends))


AT_RUN_TIME = """
import pathlib, sys, pytest, torch, lightcc.torch as hvd
folder = sys.argv[1] + "/"
with pytest.raises(ValueError, match="init"):
    hvd.start_timeline(folder + "never")
with pytest.raises(ValueError, match="init"):
    hvd.stop_timeline()
hvd.init()
def step(name):
    hvd.barrier()
    hvd.allreduce(torch.ones(3), name=name)
    hvd.barrier()
step("before")
hvd.stop_timeline()  # there is none
hvd.start_timeline(folder + "a", mark_cycles=True)
step("first")
hvd.stop_timeline()
hvd.stop_timeline()
step("between")
hvd.start_timeline(pathlib.Path(folder + "b"))
step("second")
hvd.start_timeline(folder + "c")  # completes b
step("third")
hvd.stop_timeline()
hvd.start_timeline(folder + "of {rank}")
step("everywhere")
hvd.shutdown()
with pytest.raises(ValueError, match="init"):
    hvd.stop_timeline()
"""


@pytest.mark.parametrize("np", (1, 2, 3))
def test_start_and_stop_at_run_time(np, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    output = run(np, AT_RUN_TIME, str(tmp_path))
    assert output.count("no timeline is being written") == 2  # rank 0 says so; the others write none anyway
    own = [f"of {rank}" for rank in range(np)]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", *own]
    for file, name in {"a": "first", "b": "second", "c": "third", **{of: "everywhere" for of in own}}.items():
        timeline = load(tmp_path / file)
        assert [row for row in timeline.rows if row.startswith("allreduce")] == [f"allreduce.{name}"], file
        assert bool(timeline.instants("CYCLE_START")) == (file == "a")
        assert timeline.events[0]["args"]["name"].startswith(f"lightcc rank {file[3:] or 0} of {np} on host ")
    for rank in range(1, np):  # only a coordinator knows who is ready
        assert load(tmp_path / f"of {rank}").ticks("allreduce.everywhere") == {}


def test_it_must_be_announced_when_the_job_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    run(2, """
import sys, pytest, lightcc.numpy as hvd
hvd.init()
with pytest.raises(ValueError, match="HOROVOD_TIMELINE"):
    hvd.start_timeline(sys.argv[1])
hvd.stop_timeline()
""", str(tmp_path / "t"))
    assert os.listdir(tmp_path) == []


def test_a_path_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    run(2, """
import re, socket, sys, pytest, numpy, lightcc.numpy as hvd
hvd.init()
path = sys.argv[1] + "/none/t.json"
if hvd.rank() == 0:
    expected = f"on rank 0, host {socket.gethostname()}: cannot write '{path}': No such file or directory"
    with pytest.raises(ValueError, match="start_timeline " + re.escape(expected)):
        hvd.start_timeline(path)
else:
    hvd.start_timeline(path)  # this rank would not write it
assert (hvd.allreduce(numpy.ones(2), op=hvd.Sum) == 2).all()
""", str(tmp_path))
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "none" / "{rank}"))
    code, output = ranks.launch(2, ["-c", "import lightcc.numpy as hvd; hvd.init()"], ranks.DEADLINE_S)
    assert code == 1
    assert "ValueError: HOROVOD_TIMELINE on rank " in output and f"cannot write '{tmp_path}/none/" in output


KILLED = """
import os, signal, sys, time, numpy as np, lightcc.numpy as hvd
hvd.init()
x = np.ones(1000, np.float32)
path = os.environ["HOROVOD_TIMELINE"]
try:
    for step in range(1002):
        if step == 1001 and hvd.rank() == int(sys.argv[1]):
            while hvd.rank() == 0 and open(path).read().count('"ALLREDUCE"') < 2 * step:
                time.sleep(0.01)  # until what was done is in the file; the other waits
            while hvd.rank() == 1 and not os.path.exists(path + ".waits"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        handle = hvd.allreduce_async(x, name=f"w{step % 3}")
        if step == 1001:
            open(path + ".waits", "w").close()
        hvd.synchronize(handle)
except hvd.HorovodInternalError:
    hvd.shutdown()
"""


@pytest.mark.parametrize("victim", (0, 1))
def test_what_a_killed_rank_leaves_behind(victim, tmp_path):
    path, job, processes = tmp_path / "t.json", uuid.uuid4().hex, []
    for rank in range(2):
        env = dict(os.environ, HOROVOD_RANK=str(rank), HOROVOD_SIZE="2", HOROVOD_LOCAL_RANK=str(rank),
                   HOROVOD_LOCAL_SIZE="2", LIGHTCC_JOB_ID=job, OMP_NUM_THREADS="1", HOROVOD_TIMELINE=str(path))
        processes.append(subprocess.Popen([sys.executable, "-c", KILLED, str(victim)], env=env, text=True,
                                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        assert processes[victim].wait(DEADLINE_S) == -signal.SIGKILL, processes[victim].stdout.read()
        assert processes[1 - victim].wait(DEADLINE_S) == 0, processes[1 - victim].stdout.read()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    text = path.read_text()
    if victim == 0:  # it was writing: nothing is lost but what came last
        with pytest.raises(ValueError):
            json.loads(text)
        try:
            timeline = Timeline(text + "]")
        except ValueError:  # killed inside a write: its last line is cut
            timeline = Timeline(text.rsplit(",\n", 1)[0] + "]")
    else:
        timeline = load(path)
        lost = [slice for slice in timeline.rows["allreduce.w2"] if slice[4].get("status") == "peer_lost"]
        assert lost and "rank 1" in lost[-1][4]["error"]
    for i in range(3):
        row = f"allreduce.w{i}"
        assert len([name for name in timeline.names(row) if name == "ALLREDUCE"]) >= 333
        assert set(timeline.ticks(row)) == {"0", "1"}

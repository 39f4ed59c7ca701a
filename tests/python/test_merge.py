"""lightcc-explain --merge: one file for Perfetto of the timelines of all ranks and of profiles of PyTorch. Perfetto's
own parser is a program that its package downloads, so what it asks for is checked here: kinds, numbers, nesting, names.
"""
import gzip
import json

import pytest

import ranks
from lightcc.explain import cli

CLOCKS_AGREE_US = 50.0
WALL_US = 1_700_000_000_000_000  # since 1970

JOB = """
import sys, torch
import lightcc.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()

step()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    for _ in range(5):
        step()
profile.export_chrome_trace(sys.argv[1] + f"/profile.{hvd.rank()}.json")
"""


def merged(tmp_path, capsys, *files):
    out = tmp_path / "merged.json"
    code = cli.main(["--merge", *map(str, files), "--output", str(out)])
    captured = capsys.readouterr()
    return code, captured.out if code == 0 else captured.err, json.loads(out.read_text()) if code == 0 else None


def expect_whole(trace):
    """What Perfetto's importer of JSON counts as an error is not there. Returns slices by process and thread: name,
    begin and end in microseconds, depth."""
    slices, stacks = {}, {}
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["ph"] in "BEXiICMsftbenS" and isinstance(event["name"], str), event
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], (int, float)), event
        assert event["pid"] in names, f"a process without a name: {event}"
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int), event
        if event["ph"] == "C":
            assert event["args"] and all(value >= 0 for value in event["args"].values()), event
        row = event["pid"], event.get("tid")
        if event["ph"] == "B":
            stacks.setdefault(row, []).append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, begin = stacks[row].pop()
            assert name == event["name"] and begin <= event["ts"]
            slices.setdefault(row, []).append((begin, event["ts"], name))
        elif event["ph"] == "X":
            slices.setdefault(row, []).append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert not any(stacks.values()), "slices without an end"
    for row, found in slices.items():
        open_ = []
        for begin, end, name in sorted(found, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1][1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1][1] + 0.002, f"{name} begins in {open_[-1]} and ends after it: {row}"
            open_.append((begin, end))
    return slices, names


@pytest.mark.parametrize("rows", ["buckets", "tensors"])
def test_a_job_is_merged(rows, tmp_path, capsys):
    """Both ranks' timelines and the profile of rank 1, in either layout. What rank 1 submits, it submits in a span. In
    the file of rank 0, the coordinator, a tensor's slice begins with whichever rank came first."""
    code, output = ranks.launch(2, ["-c", JOB, str(tmp_path)], ranks.DEADLINE_S, LIGHTCC_TIMELINE_ROWS=rows,
                                HOROVOD_TIMELINE=str(tmp_path / "timeline.{rank}.json"))
    assert code == 0, output
    files = [tmp_path / name for name in ("timeline.0.json", "timeline.1.json", "profile.1.json")]
    code, line, trace = merged(tmp_path, capsys, *files)
    assert code == 0 and "2 timelines and 1 profiles" in line
    slices, names = expect_whole(trace)
    lightcc = {name.split(":")[0]: pid for pid, name in names.items() if ": lightcc, on host " in name}
    assert set(lightcc) == {"rank 0", "rank 1"}
    sends = [(begin, end) for found in slices.values() for begin, end, name in found if name.startswith("lightcc.send")]
    assert len(sends) >= 5
    first, last = sends[0][0], max(end for _, end in sends)
    submitted = [begin for (pid, _), found in slices.items() if pid == lightcc["rank 1"]
                 for begin, _, name in found if name == "NEGOTIATE_ALLREDUCE"]
    inside = [begin for begin in submitted if first - CLOCKS_AGREE_US <= begin <= last + CLOCKS_AGREE_US]
    assert len(inside) >= 5
    for begin in inside:
        apart_us = min(max(since - begin, begin - until) for since, until in sends)  # below 0: inside
        assert apart_us <= CLOCKS_AGREE_US, (apart_us, begin, sends)
    if rows == "buckets":
        threads = {event["args"]["name"] for event in trace["traceEvents"]
                   if event["name"] == "thread_name" and event["pid"] == lightcc["rank 0"]}
        assert {"steps", "bucket 1"} <= threads and len(threads) < 16
        steps = [name for found in slices.values() for *_, name in found if name.startswith("STEP ")]
        assert steps.count("STEP 6") == 2
        assert any(event["ph"] == "C" and event["args"]["in flight"] > 0 for event in trace["traceEvents"])


# Files that cannot be merged

def timeline(tmp_path, rank=0, size=2, wall_us=WALL_US, name=None):
    path = tmp_path / (name or f"timeline.{rank}.json")
    about = {"name": f"lightcc rank {rank} of {size} on host h", "start_time_since_epoch_in_micros": wall_us}
    path.write_text(json.dumps([
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": about},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "bucket 1"}},
        {"ph": "B", "name": "ALLREDUCE", "pid": 0, "tid": 1, "ts": 1.0},
        {"ph": "E", "name": "ALLREDUCE", "pid": 0, "tid": 1, "ts": 5.5},
        {"ph": "i", "name": "TIMELINE_END", "pid": 0, "tid": 0, "ts": 1000.0, "s": "g"}]))
    return path


def profile(tmp_path, base_us=WALL_US, span="lightcc.wait", ts=2.0, name="profile.json", **more):
    path = tmp_path / name
    text = json.dumps({"traceEvents": [{"ph": "X", "name": span, "pid": 7, "tid": 7, "ts": ts, "dur": 1.0},
                                       {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}],
                       **({} if base_us is None else {"baseTimeNanoseconds": base_us * 1000}), **more})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_times_are_joined_by_the_clock(tmp_path, capsys):
    files = [timeline(tmp_path), timeline(tmp_path, 1, wall_us=WALL_US + 10),
             profile(tmp_path, WALL_US + 20, name="profile.json.gz", distributedInfo={"rank": 1}),
             profile(tmp_path, None, ts=WALL_US + 23.0)]
    code, _, trace = merged(tmp_path, capsys, *files)
    assert code == 0
    slices, names = expect_whole(trace)
    assert trace["metadata"]["start_time_since_epoch_in_micros"] == WALL_US + 1
    assert sorted((names[pid], *found[0]) for (pid, _), found in slices.items()) == [
        (f"{files[3]}: python", 22.0, 23.0, "lightcc.wait"), ("rank 0: lightcc, on host h", 0.0, 4.5, "ALLREDUCE"),
        ("rank 1: lightcc, on host h", 10.0, 14.5, "ALLREDUCE"), ("rank 1: python", 21.0, 22.0, "lightcc.wait")]


@pytest.mark.parametrize("make, said", [
    (lambda t: [timeline(t), profile(t, WALL_US + 3_600_000_000)], "cannot be joined: they have no time in common"),
    (lambda t: [timeline(t), timeline(t, 1, wall_us=WALL_US - 86_400_000_000)], "2023-11-14 22:13:20"),
    (lambda t: [timeline(t), profile(t, None)], "no baseTimeNanoseconds"),
    (lambda t: [timeline(t), profile(t, span="aten::mm")], "no span of lightcc's"),
    (lambda t: [timeline(t), timeline(t, name="other.json")], "both of rank 0"),
    (lambda t: [timeline(t), timeline(t, 1, size=3)], "different jobs"),
    (lambda t: [profile(t)], "none of these files is a timeline"),
    (lambda t: [t / "none.json"], "No such file"),
])
def test_what_cannot_be_merged_is_said(make, said, tmp_path, capsys):
    code, error, _ = merged(tmp_path, capsys, *make(tmp_path))
    assert code == 2 and said in error and not (tmp_path / "merged.json").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 2]", "no json", '[{"ph": "M", "args": {"name": "x"}}]', "\xff"])
def test_what_is_no_recording_is_said(text, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text, encoding="latin-1")
    code, error, _ = merged(tmp_path, capsys, timeline(tmp_path), path)
    assert code == 2 and f"{path}: this is neither a timeline of lightcc" in error


def test_a_rank_that_was_killed(tmp_path, capsys):
    path = timeline(tmp_path)
    path.write_text(path.read_text()[:-60])
    assert merged(tmp_path, capsys, path, timeline(tmp_path, 1))[0] == 0

"""bench/allreduce.py: that it runs, refuses a library with wrong sums, and that its arithmetic is right. bench/steps.py
and bench/keras_fit.py: the same, of teams that are scripted. bench/multihost.py, bench/replay.py and
bench/convergence.py: tiny runs."""
import json
import math
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import warm

import lightcc.core.lib

pytestmark = pytest.mark.long

DEADLINE_S = 400
BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ("--ranks", "2", "--bindings", "own", "--rounds", "1", "--seconds-per-point", "0.005", "--no-gradients")

# An MPI of two ranks with MPICH's binary interface whose all-reduce forgets the other rank.
FORGETFUL = """
#include <stdlib.h>
#include <string.h>
int MPI_Init(void* a, void* b) { return 0; }
int MPI_Finalize(void) { return 0; }
int MPI_Comm_rank(int c, int* rank) { *rank = atoi(getenv("PMI_RANK")); return 0; }
int MPI_Comm_size(int c, int* size) { *size = 2; return 0; }
int MPI_Get_library_version(char* text, int* length) { strcpy(text, "forgetful"); *length = 9; return 0; }
int MPI_Allreduce(const void* in, void* out, int count, int type, int op, int comm) {
  if (in != (void*)-1) memcpy(out, in, 4 * count);
  return 0;
}
int MPI_Iallreduce(const void* in, void* out, int count, int type, int op, int comm, int* request) { return 1; }
int MPI_Waitall(int count, int* requests, void* statuses) { return 1; }
"""
MPIEXEC = """#!/bin/sh
while [ "$1" != -n ]; do shift; done
shift 2
PMI_RANK=0 "$@" & PMI_RANK=1 "$@" & wait
"""


def test_results_go_into_the_checkout_wherever_a_benchmark_is_started(bench):
    sources = {path.name: path.read_text() for path in BENCH.rglob("*.py")}
    assert [name for name, text in sources.items() if '("build' in text] == []
    import where
    assert where.RESULTS == BENCH.parent / "build" / "bench"


def run(folder, *arguments, **environment):
    """What it printed, and what it left in its JSON."""
    result = folder / "allreduce.json"
    command = [sys.executable, str(BENCH / "allreduce.py"), *TINY, "--json", str(result),
               "--png", str(folder / "allreduce.png"), *arguments]
    library = {"LIGHTCC_LIBRARY": str(Path(lightcc.core.lib._library._name).resolve())}
    done = warm.run(command, DEADLINE_S, folder, **library, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, json.loads(result.read_text())


def run_between_hosts(folder, program, *arguments):
    """What it left in its JSON. The hosts are so in name only."""
    pytest.importorskip("torch")
    result = folder / f"{program}.json"
    command = [sys.executable, str(BENCH / f"{program}.py"), "--loopback", "--hosts", "1,1", "--json", str(result),
               *arguments]
    done = warm.run(command, DEADLINE_S, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def rows_between_hosts(tmp_path_factory):
    return run_between_hosts(tmp_path_factory.mktemp("multihost"), "multihost", "--sizes", "4K,256K", "--small", "40",
                             "--lone", "--cyclic", "--rounds", "3")["rows"]


@pytest.mark.slow
def test_a_tiny_run_between_hosts_is_checked_and_measured(rows_between_hosts):
    rows = rows_between_hosts[:2]
    assert [(row["hosts"], row["bytes"]) for row in rows] == [([1, 1], 4096), ([1, 1], 262144)]
    for row in rows:
        assert {side: len(xs) for side, xs in row["samples_s"].items()} == dict.fromkeys(
            ["lightcc", "lightcc, cyclic", "gloo", "gloo, cyclic"], 3)
        assert all(spread >= 1 for spread in row["spread"].values())
        assert all(cpu > 0 for xs in row["samples_cpu_s"].values() for cpu in xs)


@pytest.mark.slow
def test_many_tensors_between_hosts_stand_beside_the_best_of_gloos_ways(rows_between_hosts):
    rows = rows_between_hosts[2:]
    assert [(row["tensors"], row["bytes"]) for row in rows] == [(40, 40 * 4096), (10, 10240)]
    for row in rows:
        ways = row["tried_s"]
        assert set(ways) == {"gloo, one by one", "gloo, all started", "gloo, fused"}
        assert min(ways, key=ways.get) in row["samples_s"]
        assert set(row["samples_s"]) - set(ways) == {"lightcc", "lightcc, cyclic"}
    assert [goal["what"] for goal in rows[1]["goals"]][:1] == ["median of lightcc"]


@pytest.mark.slow
def test_a_replayed_step_is_checked_and_takes_as_long_as_its_computation(tmp_path):
    trace = tmp_path / "tiny.json"
    trace.write_text(json.dumps({"forward": 0.25, "ready": [1 - i / 400 for i in range(161)]}))
    result, = run_between_hosts(tmp_path, "replay", "--models", "tiny", "--trace", str(trace), "--ratio", "2",
                                "--rounds", "1", "--steps", "1", "--warm-up", "2")["rows"]
    assert (result["model"], result["hosts"]) == ("tiny", [1, 1])
    assert result["computation_s"] == result["communication_s"] / 2
    assert set(result["samples_s"]) == {"lightcc", "lightcc, flat", "DDP over gloo", "alone"}
    assert all(x >= 0.99 * result["computation_s"] for xs in result["samples_s"].values() for x in xs)
    assert set(result["collectives_a_step"]) == {"lightcc", "lightcc, flat"}
    assert all(0 < count <= 161 for count in result["collectives_a_step"].values())


def without_quick_imports(folders):
    """For bench/convergence.py, which needs the whole of scikit-learn."""
    return [folder for folder in folders if Path(folder).name != "quick_imports"]


@pytest.mark.slow
def test_a_short_training_is_compressed_with_and_without_error_feedback(tmp_path):
    for package in ("torch", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, str(BENCH / "convergence.py"), "--np", "2", "--data", "digits", "--seeds", "1",
               "--epochs", "2", "--png", "digits.png", "--output", "digits.json"]
    path = os.pathsep.join(without_quick_imports(os.environ["PYTHONPATH"].split(os.pathsep)))
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    rows = {row["setting"]: row for row in json.loads((tmp_path / "digits.json").read_text())["rows"]}
    runs = {setting: row["runs"][0] for setting, row in rows.items()}
    sent = {setting: run["points"][-1][1] / run["steps"] for setting, run in runs.items()}
    net = 4 * (64 * 512 + 512 * 512 + 512 * 10)
    biases = 4 * (512 + 512 + 10)
    assert sent["dense"] == net + biases  # between two: half of it to the other, and then the sum of the other half
    assert sent["top-k 1 %"] == pytest.approx(biases + 0.06 / 4 * net, rel=0.02)  # 6 bytes an element
    assert sent["top-k 1 %, no error feedback"] == sent["top-k 1 %"] < sent["int8"] < 0.6 * sent["dense"]
    assert runs["dense"]["compressed_share"] == 0
    assert all(run["compressed_share"] > 0.99 for setting, run in runs.items() if setting != "dense")
    assert all(run["score"] > 50 for run in runs.values()), done.stdout
    assert runs["top-k 1 %"]["training_loss"] != runs["top-k 1 %, no error feedback"]["training_loss"]
    assert [len(row["goals"]) for row in rows.values()] == [0, 1, 1, 2, 0]
    assert (tmp_path / "digits.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_short_benchmark_runs_where_readme_starts_it(tmp_path):
    """In the checkout, whose folder lightcc is not the package."""
    pytest.importorskip("torch")
    command = [sys.executable, str(BENCH / "smoke.py"), "--repeats", "1", "--calls", "5", "--idle", "0.1"]
    done = warm.run([*command, "--output", str(tmp_path / "smoke.json")], DEADLINE_S, BENCH.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "smoke.json").read_text())["rows"]
    assert len(rows) > 3 and "ratio" in done.stdout, done.stdout
    callers = [path for path in BENCH.glob("*.py") if "lightcc.run(" in path.read_text()]
    assert len(callers) >= 4 and all("leave_checkout()" in path.read_text() for path in callers)


def test_a_tiny_run_measures_lightcc_and_gloo(tmp_path):
    pytest.importorskip("torch")
    text, result = run(tmp_path, "--peers", "gloo", "--sizes", "4,64K")
    assert "LEFT OUT" not in text
    assert [row["bytes"] for row in result["rows"]] == [4, 65536]
    for row in result["rows"]:
        assert set(row["seconds"]) == {"lightcc", "lightcc shared", "floor", "gloo"}
        assert all(len(times) == 1 and 0 < times[0] < 10 for times in row["seconds"].values())
        assert row["verdicts"]["lightcc"]["peer"] == "gloo"


def test_a_library_with_wrong_sums_is_left_out(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "forgetful.c").write_text(FORGETFUL)
    (tmp_path / "bin" / "mpiexec").write_text(MPIEXEC)
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "lib" / "libmpi.so.12"),
                    str(tmp_path / "forgetful.c")], check=True)
    text, result = run(tmp_path, "--peers", "mpich", "--sizes", "64", "--settings", "1", BENCH_MPICH=str(tmp_path))
    assert "LEFT OUT: mpich (default): error rank" in text and "WRONG RESULT: tensor 0 of 16 floats" in text
    assert "mpich" not in result["rows"][0]["seconds"] and "lightcc" in result["rows"][0]["seconds"]


def test_a_library_that_is_not_there_is_named_with_what_would_help(tmp_path):
    text, result = run(tmp_path, "--peers", "impi", "--sizes", "4", BENCH_IMPI=str(tmp_path / "nowhere"))
    assert f"LEFT OUT: impi: {tmp_path}/nowhere/bin/mpiexec is not there: --install puts impi-rt into" in text


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.parametrize("model, gradients, numbers", [
    ("resnet50", 161, 25_557_032), ("vgg16", 32, 138_357_544),  # as torchvision.models has them
    ("bert_base", 199, 109_482_240),                            # as bert-base-uncased has them
])
def test_the_gradients_are_those_of_the_model(bench, model, gradients, numbers):
    import shapes
    counts = list(map(math.prod, shapes.MODELS[model]()))
    assert (len(counts), sum(counts)) == (gradients, numbers)


@pytest.mark.parametrize("ready, nbytes, hosts, finish", [
    ([1.0], [100], 2, 1.0 + 1.0),
    ([1.0], [100], 4, 1.0 + 1.5),
    ([1.0, 5.0], [100, 100], 2, 5.0 + 1.0),            # the first one is hidden behind computation
    ([1.0, 1.5], [100, 100], 2, 1.0 + 2.0),            # the second one waits for it
    ([3.0, 1.0, 3.0], [50, 100, 50], 2, 3.0 + 1.0),    # in any order, ready together
])
def test_the_floor_is_that_of_a_cable_that_never_rests_while_a_gradient_waits(bench, ready, nbytes, hosts, finish):
    import floor
    assert floor.last_reduced_s(ready, nbytes, hosts, 100.0, 0.0) == pytest.approx(finish)
    start_ups = {2: 0.25, 4: 0.5}[hosts]
    assert floor.exposed_s(ready, nbytes, hosts, 100.0, 0.25) == pytest.approx(finish - max(ready) + start_ups)


def test_the_floor_is_the_largest_of_what_each_moment_leaves_to_be_sent(bench):
    import floor
    draw = random.Random(1)
    for _ in range(100):
        ready = [draw.uniform(0, 10) for _ in range(draw.randint(1, 20))]
        nbytes = [draw.randint(1, 300) for _ in ready]
        most = max(t + floor.bound_s(3, sum(size for r, size in zip(ready, nbytes) if r >= t), 100.0) for t in ready)
        assert floor.last_reduced_s(ready, nbytes, 3, 100.0, 0.0) == pytest.approx(most)


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "bert_base"])
def test_the_network_that_is_recorded_has_those_gradients(bench, model):
    torch = pytest.importorskip("torch")
    import networks
    import shapes
    with torch.device("meta"):
        parameters = list(networks.NETWORKS[model].make().parameters())
    assert [tuple(parameter.shape) for parameter in parameters] == shapes.MODELS[model]()


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "bert_base"])
def test_each_model_has_a_trace_whose_backward_goes_from_the_last_layer_to_the_first(bench, model):
    pytest.importorskip("torch")
    import replay
    trace = replay.trace_of(model, None)
    assert max(trace.ready) == trace.ready[0] == 1 and min(trace.ready) in trace.ready[-2:]
    assert 0.2 < trace.forward < 0.5  # backward is about twice the work


@pytest.mark.parametrize("of_floor, alone, rate, verdict", [
    (1.1, 1.0, "1gbit", "1.10 of it, goal <= 1.15: ok"), (1.2, 1.0, "1gbit", "1.20 of it, goal <= 1.15: MISSED"),
    (1.1, 1.0, "2gbit", "counts for nothing: too little goodput"),
    (1.1, 1.1, "1gbit", "counts for nothing: the step alone is late by 100 ms"),
])
def test_exposed_communication_is_held_against_the_floor(bench, of_floor, alone, rate, verdict):
    pytest.importorskip("torch")
    import replay
    trace = replay.Trace("resnet50", 0.5, [1.0, *[0.5] * 160])
    goodput, latency = 120e6, 0.1
    least = 0.5 + sum(trace.nbytes) / goodput - 1.0 + latency  # from half of the computation on the cable never rests
    steps_alone = [alone, alone - 0.2, alone + 0.3]
    row = {"hosts": [2, 2], **replay.summary({
        "computation_s": 1.0, "collectives_a_step": {"lightcc": 1.0},
        "samples_s": {"lightcc": [x + of_floor * least for x in steps_alone], "alone": steps_alone}})}
    replay.hold_against_floor(row, trace, goodput, latency, rate)
    assert row["floor_s"] == pytest.approx(least)
    assert row["exposed_s"] == {"lightcc": pytest.approx(of_floor * least)}
    assert verdict in replay.floor_lines(row, rate)


def test_ratio_is_paired_by_round_and_held_against_the_strongest_peer(bench):
    import report
    row = {"ranks": 2, "case": "65536", "bytes": 65536, "seconds": {
        "lightcc": [1.0, 10.0, 2.0], "floor": [0.1, 0.1, 0.1], "weak": [9.0, 9.0, 9.0], "strong": [2.0, 20.0, 3.0]}}
    verdict = report.verdicts(row)["lightcc"]
    assert (verdict["peer"], verdict["ratio"], verdict["goal"], verdict["met"]) == ("strong", 0.5, 1.3, True)
    assert verdict["low"] == 0.5 and verdict["high"] == pytest.approx(2 / 3)
    row["seconds"]["strong"] = [0.5, 5.0, 1.0]
    assert report.verdicts(row)["lightcc"]["met"] is False


@pytest.mark.parametrize("text, size", [("4", 4), ("64K", 65536), ("1M", 1 << 20), ("16MiB", 16 << 20)])
def test_sizes_are_read(bench, text, size):
    import allreduce
    assert allreduce.size_of(text) == size


def test_exposed_time_is_what_a_step_takes_beyond_the_one_alone(bench):
    import steps
    found = steps.summary({steps.ALONE: [0.010] * 3, "ours": [0.012] * 3, "theirs": [0.018] * 3}, "ours", "theirs")
    assert found["exposed_ms"] == {"ours": pytest.approx(2), "theirs": pytest.approx(8)}
    assert [found["ratio"], *found["interval"], found["step_ratio"]] == pytest.approx([0.25, 0.25, 0.25, 12 / 18])
    lost = steps.summary({steps.ALONE: [0.010], "ours": [0.012], "theirs": [0.009]}, "ours", "theirs")
    assert (lost["ratio"], lost["interval"]) == (None, [None, None])


def import_convergence(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "path", without_quick_imports(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    import convergence
    return convergence


def trained(setting, scores, losses=(0.5, 0.5, 0.5)):
    """A row of bench/convergence.py."""
    return {"setting": setting, "runs": [{"score": a, "training_loss": b} for a, b in zip(scores, losses)]}


@pytest.mark.parametrize("scores, met", [((97.6, 98.4, 95.5), True), ((97.4, 98.4, 95.5), False)])
def test_convergence_holds_the_mean_over_the_seeds_against_dense(bench, scores, met, monkeypatch):
    convergence = import_convergence(monkeypatch)
    rows = {"dense": trained("dense", (98, 99, 96))}
    goal, = convergence.goals_of(trained("top-k 1 %", scores), rows)
    assert (goal["what"], goal["met"]) == ("score at least dense's - 0.5", met)
    assert convergence.goals_of(rows["dense"], rows) == convergence.goals_of(trained("top-k 1 %", scores), {}) == []


def test_convergence_wants_feedback_to_help_by_more_than_the_seeds_differ(bench, monkeypatch):
    convergence = import_convergence(monkeypatch)
    rows = {"top-k 1 %": trained("top-k 1 %", (98, 99, 96), (0.1, 0.2, 0.3))}
    without = trained("top-k 1 %, no error feedback", (97, 97, 93), (0.2, 0.2, 0.3))
    score, loss = convergence.goals_of(without, rows)
    assert score == {"what": "score worse than with feedback, by 2.00 > ± 1.00", "met": True}
    assert loss == {"what": "training loss too, by 0.033 > ± 0.058", "met": False}


class ScriptedTeam:
    """Two ranks that train in no time. moved: what a training makes of their parameters, which are zeros before."""

    def __init__(self, moved=((1.0, 2.0), (1.0, 2.0)), seconds=0.010):
        self.moved, self.seconds, self.trained, self.collectives = moved, seconds, False, 0

    def ask(self, method, *arguments):
        return [getattr(self, method)(rank, *arguments) for rank in (0, 1)]

    def load(self, rank, name):
        self.trained = False
        return 2

    def train(self, rank, steps):
        self.trained = True
        self.collectives += 3 * (steps + 1) if rank == 0 else 0
        return self.seconds * (1 + rank)  # rank 1 is slower

    def parameters(self, rank):
        values = array("f", self.moved[rank] if self.trained else (0.0, 0.0)).tobytes()
        return values.hex(), values

    def counters(self, rank):
        return {"collectives": self.collectives}


def test_keras_fit_counts_the_slowest_rank_and_the_collectives_of_a_step(bench):
    import keras_fit
    sides = {keras_fit.ALONE: 0.010, keras_fit.OURS: 0.011, keras_fit.ALONE_XLA: 0.008, keras_fit.OURS_XLA: 0.009,
             keras_fit.THEIRS: 0.016}
    teams = {side: ScriptedTeam(seconds=seconds) for side, seconds in sides.items()}
    row = keras_fit.line(keras_fit.compare(teams, "mlp", 3, 10), "legacy")
    assert row.split(" | ")[1:5] == ["legacy", "2", "3.0", "20.0"]
    assert row.split(" | ")[5:] == ["22.0", "32.0", "0.69", "2.0", "12.0", "0.17 (0.17 to 0.17)", "16.0", "18.0 |"]
    del teams[keras_fit.THEIRS]
    row = keras_fit.line(keras_fit.compare(teams, "mlp", 3, 10), "3")
    assert row == "| a perceptron | 3 | 2 | 3.0 | 20.0 | 22.0 | – | – | 2.0 | – | – | 16.0 | 18.0 |"


@pytest.mark.parametrize("moved, what", [
    (((1.0, 2.0), (1.0, 2.5)), "lightcc's ranks differ in their parameters"),
    (((1.0, 2.5), (1.0, 2.5)), "MWMS has other parameters than lightcc"),
])
def test_keras_fit_measures_nothing_that_is_wrong(bench, moved, what):
    import keras_fit
    teams = {side: ScriptedTeam() for side in (keras_fit.ALONE, keras_fit.OURS_XLA, keras_fit.THEIRS)}
    teams[keras_fit.OURS] = ScriptedTeam(moved)
    if "MWMS" in what:
        teams[keras_fit.OURS_XLA] = ScriptedTeam(moved)
    with pytest.raises(AssertionError, match=what):
        keras_fit.compare(teams, "mlp", 1, 1)
    assert teams[keras_fit.ALONE].trained is False


def test_keras_fit_wants_parameters_to_move(bench):
    import keras_fit
    still = ScriptedTeam(((0.0, 0.0), (0.0, 0.0)))
    with pytest.raises(AssertionError, match="nothing was learned"):
        keras_fit.compare({side: still for side in (keras_fit.ALONE, keras_fit.OURS, keras_fit.OURS_XLA)}, "mlp", 1, 1)


@pytest.mark.slow
def test_cores_runs_on_two_ranks_and_on_two_hosts_or_says_why_not(bench, tmp_path, capsys):
    import cores
    result = tmp_path / "cores.json"
    cores.main(["--ranks", "2", "--per-host", "1", "--oversubscribe", "--rounds", "1", "--sizes", "4,4K", "--model",
                "tiny", "--idle", "0.1", "--minutes", "60", "--output", str(result)])
    said, found = capsys.readouterr().out, json.loads(result.read_text())
    hosts = [[2], [1, 1]][:len(found["idle_ms_a_second"])]
    assert [(row["ranks"], row["case"]) for row in found["rows"]] == [
        (ranks, case) for ranks in hosts for case in ("1 float", "4 KiB", "gradients", "step")]
    assert len(hosts) + len(found["left_out"]) == 2 and said.count("LEFT OUT: ") == len(found["left_out"]), said
    assert all(row["lightcc"] > 0 and row["gloo"] > 0 for row in found["rows"]) and "<= 0.1 x gloo" in said


def test_cores_holds_each_number_of_ranks_against_the_fewest(bench):
    import cores
    rows = [cores.row_of((ranks,), "64 MiB", {"lightcc": [seconds] * 3, "gloo": [1.0, 9.0, 1.0]})
            for ranks, seconds in ((2, 0.1), (16, 0.3))]
    rows.append(cores.row_of((8, 8), "64 MiB", {"lightcc": [0.2], "gloo, fused": [0.4], "gloo, one by one": [0.9]}))
    cores.add_growth(rows)
    assert [(row["ratio"], row["goal"], row["met"]) for row in rows] == [
        (0.1, None, None), (0.3, 0.25, False), (0.5, None, None)]
    assert [row["growth"] and round(row["growth"], 9) for row in rows] == [1.0, 3.0, None]
    assert rows[2]["peer"] == "gloo, fused"
    assert cores.line_of(rows[1]).split() == ("16 ranks 64 MiB 300.00 ms 1,000.00 ms 0.300 3.00 "
                                               "<= 0.25 x gloo MISSED").split()


def test_cores_leaves_out_what_the_machine_has_no_cores_for(bench):
    import cores
    runs, left_out = cores.plan([2, 4, 8, 16], 8, 8, False, True)
    assert runs == [(2,), (4,), (8,)]
    assert [text.split(":")[0] for text in left_out] == ["16 ranks", "2 hosts of 8 ranks"]
    assert cores.plan([2, 16], 8, 2, True, False) == ([(2,), (16,)], [
        "2 hosts of 8 ranks: only root can make network namespaces"])
    assert cores.plan([2], 0, 2, False, False) == ([(2,)], [])

"""lightcc-explain: predictions, cluster files and their errors, and a recorded step. No ranks are needed."""

import json
import math
import re
from pathlib import Path

import pytest

from lightcc.explain import Cluster, candidates, cli, cluster, fewer, median_step, picture

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
MIB = 1 << 20


def run(capsys, *argv):
    code = cli.main([str(one) for one in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- predictions

def test_bytes_of_2d_and_of_the_flat_ring():
    slow = Cluster(hosts=[2] * 4, nic_gbit_per_s=1, latency_us=0, message_us=0, local_latency_us=0,
                   memory_gbyte_per_s=1e6)
    found = {one.name: one for one in candidates(slow, 64 * MIB)}
    assert found["ring"].seconds == pytest.approx(2 * 7 / 8 * 64 * MIB / 125e6, rel=1e-3)
    assert found["2d (pairwise)"].seconds == pytest.approx(2 * 3 / 4 * 64 * MIB / 125e6, rel=1e-3)
    assert found["2d (pairwise)"].bound_by == "NIC out" and found["2d (pairwise)"].lanes == 2


def test_the_quickest_is_first_and_parts_add_up():
    ways = candidates(Cluster(hosts=[4, 2, 3]), 3 * MIB, compressed_share=0.01)
    assert [one.seconds for one in ways] == sorted(one.seconds for one in ways)
    assert {one.algorithm for one in ways} >= {"2d", "ring", "halving_doubling", "compressed"}
    for one in ways:
        assert one.seconds == pytest.approx(one.latency_s + one.transfer_s + one.local_s, rel=1e-6)


def test_fewer_bytes_win_on_a_slow_network_only():
    def best(gbit):
        return candidates(Cluster(hosts=[2] * 4, nic_gbit_per_s=gbit), 64 * MIB, compressed_share=0.02)[0].algorithm
    assert best(1) == "compressed" and best(400) != "compressed"


def test_message_by_message_agrees_with_the_closed_form():
    for hosts in ([1, 1], [2, 2], [2] * 4):
        closed = {one.name: one.seconds for one in candidates(Cluster(hosts=hosts), 16 * MIB)}
        simulated = {one.name: one.seconds for one in candidates(Cluster(hosts=hosts), 16 * MIB, simulated=True)}
        assert closed.keys() == simulated.keys()
        for name, seconds in closed.items():
            assert simulated[name] == pytest.approx(seconds, rel=0.1), (name, hosts)


def test_one_host_and_one_rank():
    assert candidates(Cluster(hosts=[4]), MIB)[0].algorithm == "shared"
    assert cli.collective_lines(Cluster(), MIB, []) == ["one rank: nothing to reduce"]


@pytest.mark.parametrize("changes, message", [
    ({"hosts": []}, "host_count"), ({"hosts": [2, 0]}, "hosts"), ({"nic_gbit_per_s": 0.0}, "nic_bytes_per_s"),
    ({"latency_us": -1.0}, "latency_s"), ({"memory_gbyte_per_s": math.nan}, "memory_bytes_per_s"),
    ({"oversubscription": 0.5}, "oversubscription")])
def test_a_cluster_that_cannot_be_is_a_value_error(changes, message):
    with pytest.raises(ValueError, match=message):
        candidates(Cluster(**{"hosts": [2, 2], **changes}), MIB)


def test_numbers_that_cannot_be_are_value_errors():
    with pytest.raises(ValueError, match="-1 bytes"):
        candidates(Cluster(hosts=[1, 1]), -1)
    with pytest.raises(ValueError, match="compressed_share"):
        candidates(Cluster(hosts=[1, 1]), MIB, compressed_share=1.5)
    with pytest.raises(ValueError, match="4096"):
        candidates(Cluster(hosts=[1] * 5000), MIB, simulated=True)


# ---- cluster files

def written(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text, line, key, expected", [
    ("hosts: 2\nnics: none\n", 2, "nics", "a whole number, 1 or more"),
    ("hosts: 2\nlatency_us: -3\n", 2, "latency_us", "0 or more"),
    ("hosts: 2\n\nnic_gbit_per_s: .inf\n", 3, "nic_gbit_per_s", "above 0"),
    ("hosts: 2\nfull_duplex: 1\n", 2, "full_duplex", "true or false"),
    ("hosts: 2\nnic_gbit: 3\n", 2, "nic_gbit", "there are hosts"),
    ("hosts: 2\nhosts: 3\n", 2, "hosts", "twice"),
    ("hosts: 0\n", 1, "hosts", "from 1 to"),
    ("hosts: [2, 0]\n", 1, "hosts", "a list of whole numbers"),
    ("hosts: [2, 2]\nranks_per_host: 2\n", 2, "ranks_per_host", "already lists"),
    ("nics: 1\n", 1, "hosts", "how many"),
    ("hosts: 2\ntraining:\n  compute_ms: 3\n", 3, "training.gradient_mbyte", "missing"),
    ("hosts: 2\ntraining: 3\n", 2, "training", "a mapping"),
    ("hosts: 2\ntraining: {gradient_mbyte: 1, compute_ms: 1, samples_per_rank: 1, overlap: 2}\n", 2,
     "training.overlap", "from 0 to 1"),
    ("- 1\n", 1, "the file", "a mapping"),
])
def test_errors_of_a_cluster_file_name_line_and_key(tmp_path, capsys, text, line, key, expected):
    path = written(tmp_path, text)
    code, out, error = run(capsys, "--cluster", path)
    assert code == 2 and not out
    assert error.startswith(f"lightcc-explain: {path}, line {line}: ") and f"'{key}'" in error and expected in error


def test_files_that_are_none(tmp_path, capsys):
    assert "no YAML" in run(capsys, "--cluster", written(tmp_path, "hosts: [1"))[2]
    assert "empty" in run(capsys, "--cluster", written(tmp_path, ""))[2]
    assert "No such file" in run(capsys, "--cluster", tmp_path / "nothing.yaml")[2]


def test_every_field_can_be_set(tmp_path):
    found = cluster.load(written(tmp_path, "hosts: [3, 1]\nnics: 2\nnic_gbit_per_s: 100\nfull_duplex: false\n"
                                 "flow_gbit_per_s: 10\nlatency_us: 20\nmessage_us: 2\nlocal_latency_us: 0.5\n"
                                 "memory_gbyte_per_s: 80\npod_hosts: 1\noversubscription: 2\n"))
    assert found.cluster == Cluster([3, 1], 2, 100, False, 10, 20, 2, 0.5, 80, 1, 2) and found.training is None


def test_published_numbers_stand_beside_the_predicted_ones(capsys):
    code, out, _ = run(capsys, "--cluster", CLUSTERS / "two_hosts_of_8.yaml")
    assert code == 0
    predicted, published = re.search(r"2d to ring: predicted ([\d.]+), published ([\d.]+)", out).groups()
    assert float(published) == pytest.approx(7183.5 / 5421.9, abs=1e-3)
    assert float(predicted) > 1


def test_a_hundred_thousand_ranks_take_no_ring(capsys):
    code, out, _ = run(capsys, "--cluster", CLUSTERS / "cloud_of_12500.yaml", "--bytes", "64M")
    assert code == 0 and "100000 ranks on 12500 hosts of 8" in out
    assert out.splitlines()[1].startswith("2d (halving_doubling), 8 lanes")


def test_the_command_line(capsys, tmp_path):
    code, out, _ = run(capsys, "--np", 7, "--hosts", 3, "--bytes", "4096", "--nic-gbit", 100)
    assert code == 0 and "4 KiB among 7 ranks on 3 hosts of different sizes, 1 x 100 Gbit/s" in out
    assert run(capsys, "--np", 2, "--hosts", 3)[0] == 2
    assert run(capsys, "--cluster", CLUSTERS / "cloud_of_12500.yaml", "--hosts", 3)[0] == 2
    for wrong in (["--np", "0"], ["--np", "2", "--bytes", "1X"], ["--np", "2", "--compressed", "2"], []):
        with pytest.raises(SystemExit):
            cli.main(wrong)
    capsys.readouterr()


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(capsys, "--np", 4, "--hosts", 2, "--png", tmp_path / "curve.png")[0] == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_second_panel_has_ratios_by_the_best():
    ratios = picture.by_best({"ring": [4.0, 3.0, math.nan], "2d": [2.0, 6.0, 5.0]})
    assert ratios["2d"] == [1.0, 2.0, 1.0] and ratios["ring"][:2] == [2.0, 1.0] and math.isnan(ratios["ring"][2])


# ---- docs/explain.md

PAGE = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
NUMBER = re.compile(r"\d+(\.\d+)?")


def test_the_page_shows_what_the_command_prints(capsys):
    """But for the lines in whose place it has "..."."""
    examples = re.findall(r"```\n\$ lightcc-explain (--np .*)\n((?:.*\n)*?)```", PAGE)
    assert len(examples) == 2
    for command, shown in examples:
        code, out, _ = run(capsys, *command.split())
        pattern = re.escape(shown).replace(re.escape("...\n"), "(?:.*\n)+")
        assert code == 0 and re.fullmatch(pattern, out), out


def test_what_fewer_exchanges_bring_follows_from_the_exchange():
    def ways(exchange_s, **changes):
        asked = {"sync_every": 10, "fragments": 5, "delay": 0, **changes}
        return {way.name: way for way in fewer.ways(lambda nbytes: exchange_s * nbytes / 1000, 1000, 2, 1.0, **asked)}
    slow = ways(4.0)
    assert slow["DelayedGradients"].step_s == 4.0 and slow["DelayedGradients"].exposed_s == 3.0
    assert slow["DistributedOptimizer"].exposed_s == pytest.approx(4 - 2 / 3)
    assert slow["LocalSGD"].exposed_s == slow["DiLoCo"].exposed_s == pytest.approx(0.4)
    assert slow["DiLoCo"].bytes_per_s == pytest.approx(1000 / 10 / 1.4)
    assert ways(4.0, delay=1)["DiLoCo"].exposed_s == 0.0, "a fragment takes 0.8 s"
    assert ways(10.0, delay=1)["DiLoCo"].exposed_s == pytest.approx(0.5), "each of 5 fragments, in 10 steps, one second"
    assert ways(40.0, delay=9)["DiLoCo"].step_s == pytest.approx(4.0), "the cable has no time for more"
    quick = ways(0.5)
    assert quick["DistributedOptimizer"].exposed_s == quick["DelayedGradients"].exposed_s == 0
    for wrong in ({"fragments": 11}, {"delay": 10}, {"delay": -1}, {"sync_every": 0}):
        with pytest.raises(ValueError, match="--sync-every"):
            ways(1.0, **wrong)


def test_a_codec_that_cannot_run_has_no_row(capsys):
    asked = "--np", 8, "--compressed", 0.02, "--compute-ms"
    assert run(capsys, *asked, 200, "--hosts", 2)[1].count(", codec") == 2
    code, out, _ = run(capsys, *asked, 200)  # one host
    assert code == 0 and "DiLoCo" in out and ", codec" not in out
    for wrong in ("inf", "nan", "0"):
        code, _, err = run(capsys, *asked, wrong)
        assert (code, err) == (2, "lightcc-explain: --compute-ms: give what a step computes, above 0\n")


def test_the_page_shows_a_recorded_step_as_the_command_does(tmp_path, capsys):
    """A step has other numbers each time, and its lines come in the order of these."""
    shown = re.search(r"\n\$ lightcc-explain --step .*\n((?:.*\n)*?)```", PAGE)[1]
    events = []
    for event in events_of(6, late_us=200):
        if event["name"] == "2d" and event["ph"] == "B":  # first it is copied
            events += [{**event, "name": "MEMCPY_IN_FUSION_BUFFER"},
                       {**event, "name": "MEMCPY_IN_FUSION_BUFFER", "ph": "E", "ts": event["ts"] + 5}]
            event["ts"] += 5
        events.append({**event, "name": "shared"} if event["name"] == "2d" else event)
    code, out, _ = run(capsys, "--step", recorded(tmp_path, events))
    like = [NUMBER.sub("N", " ".join(line.split())).replace("N us", "N ms").replace("N B", "N KiB")
            for line in (*shown.splitlines(), "", *out.splitlines())]
    cut = like.index("")
    assert code == 0 and set(like[:cut]) <= set(like[cut:]), out


# ---- a recorded step

def events_of(steps, late_us=0.0, exchange_us=100.0, of=2):
    """A timeline of `of` tensors a step of 1 ms; rank 1 is ready so much later than rank 0."""
    events = [{"ph": "M", "name": "process_name", "pid": row + 1, "args": {"name": f"allreduce.g{row}"}}
              for row in range(of)]
    for step in range(steps):
        for row in range(of):
            ready = 1000.0 * step + 400 * row
            agreed = ready + late_us
            end = agreed + exchange_us

            def slice_of(kind, name, ts, row=row, **args):
                events.append({"ph": kind, "name": name, "ts": ts, "pid": row + 1, "args": args})
            slice_of("B", "NEGOTIATE_ALLREDUCE", ready)
            slice_of("X", "0", ready)
            slice_of("X", "1", agreed)
            slice_of("E", "NEGOTIATE_ALLREDUCE", agreed)
            slice_of("B", "ALLREDUCE", agreed, bytes=4000, fused_requests=1)
            slice_of("B", "2d", agreed)
            slice_of("E", "2d", end)
            slice_of("E", "ALLREDUCE", end)
    return events


def buckets_of(steps, late_us=0.0, exchange_us=100.0):
    """The same by buckets: one of two tensors in each step."""
    events = [{"ph": "M", "name": name, "pid": 0, "tid": row, "args": {"name": text}} for name, row, text in (
        ("process_name", 0, "lightcc rank 0 of 2 on h"), ("thread_name", 1, "steps"), ("thread_name", 2, "bucket 1"))]
    bucket = {"bytes": 8000, "fused_requests": 2, "tensors": "allreduce.a, allreduce.b"}
    for step in range(steps):
        ready = 1000.0 * step
        agreed = ready + late_us
        end = agreed + exchange_us
        for row, kind, name, ts, args in (
                (1, "B", f"STEP {step + 1}", ready, {}), (2, "B", "NEGOTIATE_ALLREDUCE", ready, {}),
                (0, "C", "bytes", ready, {"in flight": 8000, "waiting": 8000}), (2, "X", "0", ready, {}),
                (2, "X", "1", agreed, {}), (2, "E", "NEGOTIATE_ALLREDUCE", agreed, {}),
                (2, "B", "ALLREDUCE", agreed, bucket), (2, "B", "2d", agreed, {}), (2, "E", "2d", end, {}),
                (2, "E", "ALLREDUCE", end, {}), (1, "E", f"STEP {step + 1}", ready + 1000, {})):
            events.append({"ph": kind, "name": name, "ts": ts, "pid": 0, "tid": row, "args": args})
    return events


def recorded(tmp_path, events):
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(events))
    return path


def test_where_the_time_of_a_step_went(tmp_path):
    step = median_step(str(recorded(tmp_path, events_of(6, late_us=200))))
    assert (step.number, step.count, step.tensors, step.collectives, step.nbytes) == (3, 6, 2, 2, 8000)
    assert step.seconds == pytest.approx(1e-3) and sum(step.parts.values()) == pytest.approx(1e-3)
    assert step.parts["waiting for a rank"] == pytest.approx(400e-6)
    assert step.parts["exchange"] == pytest.approx(200e-6) and step.parts["nothing in flight"] == pytest.approx(400e-6)
    assert step.exposed == pytest.approx(100e-6)
    assert (step.last_rank, step.last_rank_share, step.algorithms) == ("1", 1.0, {"2d": 2})


def test_a_step_of_a_timeline_by_buckets(tmp_path, capsys):
    path = recorded(tmp_path, buckets_of(6, late_us=200))
    step = median_step(str(path))
    assert (step.number, step.count, step.tensors, step.collectives, step.nbytes) == (3, 6, 2, 1, 8000)
    assert step.parts["waiting for a rank"] == pytest.approx(200e-6)
    assert step.parts["exchange"] == pytest.approx(100e-6) and step.parts["nothing in flight"] == pytest.approx(700e-6)
    assert (step.last_rank, step.last_rank_share, step.algorithms) == ("1", 1.0, {"2d": 2})
    assert "wait for rank 1, the last for 100% of the tensors" in run(capsys, "--step", path)[1]
    assert "at least two" in run(capsys, "--step", recorded(tmp_path, buckets_of(1)))[2]


def test_an_exchange_hides_a_wait(tmp_path):
    # The second tensor waits from 400 on while the first is exchanged from 200 to 700.
    step = median_step(str(recorded(tmp_path, events_of(4, late_us=200, exchange_us=500))))
    assert step.parts["waiting for a rank"] == pytest.approx(200e-6)
    assert step.parts["exchange"] == pytest.approx(800e-6)


def test_advice_follows_what_took_the_time(tmp_path, capsys):
    late = run(capsys, "--step", recorded(tmp_path, events_of(5, late_us=300)))[1]
    assert "wait for rank 1, the last for 100% of the tensors" in late and "compression" in late
    busy = run(capsys, "--step", recorded(tmp_path, events_of(5, exchange_us=350)))[1]
    assert "wait for rank" not in busy and "Compression.fp16" in busy
    quiet = run(capsys, "--step", recorded(tmp_path, events_of(5, exchange_us=10)))[1]
    assert "less than a tenth" in quiet


def test_a_timeline_whose_end_is_missing(tmp_path):
    path = recorded(tmp_path, events_of(4))
    path.write_text(path.read_text()[:-1] + ", {\"ph\": \"B\", \"na")
    assert median_step(str(path)).count == 4


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "no json", '[{"a": 1}]'])
def test_what_is_no_timeline_is_said(tmp_path, capsys, text):
    path = tmp_path / "timeline.json"
    path.write_text(text)
    code, _, error = run(capsys, "--step", path)
    assert code == 2 and "no timeline" in error or "no tensor appears twice" in error


def test_one_step_is_too_few(tmp_path, capsys):
    assert "at least two steps" in run(capsys, "--step", recorded(tmp_path, events_of(1)))[2]

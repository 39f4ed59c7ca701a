"""examples/embedding_flights.py on invented flights: alone, on two ranks, and beside nn.Embedding; embedding_online.py;
and what the benchmarks of embeddings print, with their ids and arithmetic."""
import re
import sys
from pathlib import Path

import invented_flights
import numpy
import pytest
import warm
from invented_flights import FLIGHTS

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return invented_flights.write(tmp_path_factory.mktemp("flights"))


def table(folder, *arguments, launcher=()):
    """What it prints: the AUC and the number of rows of each model."""
    command = [*launcher, sys.executable, str(ROOT / "examples" / "embedding_flights.py"), "--data", str(folder)]
    done = warm.run([*command, *arguments], DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FLIGHTS:,} flights" in done.stdout
    return [(float(auc), int(rows.replace(",", ""))) for auc, rows in
            re.findall(r"\| (\d\.\d+) \| ([\d,]+) \| \d+ \|", done.stdout)]


@pytest.mark.parametrize("optimizer", ["sparse_adam", "adagrad"])
def test_a_table_learns_as_a_finished_vocabulary(folder, optimizer):
    (ours, born), (theirs, rows), _ = table(folder, "--compare", "--optimizer", optimizer)
    assert born == rows
    assert abs(ours - theirs) < 1e-3
    assert ours > 0.7


def test_two_ranks_learn_what_one_learns(folder):
    alone = table(folder)
    together = table(folder, launcher=[sys.executable, "-m", "lightcc.runner", "-np", "2"])
    assert [rows for _, rows in together] == [rows for _, rows in alone]
    assert together[0][0] == pytest.approx(alone[0][0], abs=2e-3)


def test_a_table_that_stays_small(folder, tmp_path):
    """On two ranks; and what it exports is read without lightcc."""
    done = warm.run([sys.executable, "-m", "lightcc.runner", "-np", "2", sys.executable,
                     ROOT / "examples" / "embedding_online.py", "--data", folder, "--export", tmp_path], DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(float(auc), int(rows.replace(",", ""))) for auc, rows in
             re.findall(r"\| (0\.\d+) \| ([\d,]+) \| [\d.]+% \|", done.stdout)]
    assert len(found) == 3 and found[1][1] <= found[0][1] and found[2][1] < found[0][1]
    exported = int(re.search(r"([\d,]+) rows are in", done.stdout)[1].replace(",", ""))
    done = warm.run([sys.executable, ROOT / "examples" / "embedding_reader.py", tmp_path, "fields"], DEADLINE_S)
    assert done.stdout.startswith(f"{exported} rows of fields"), done.stdout + done.stderr


def test_a_picture_of_auc_and_rows(folder, tmp_path):
    """Each small table has a twin of as many rows that ids share."""
    pytest.importorskip("matplotlib", reason="missing: matplotlib")
    done = warm.run([sys.executable, ROOT / "examples" / "embedding_online.py", "--data", folder, "--compare",
                     "--png", tmp_path / "rows.png"], DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| ([^|]+) \| 0\.\d+ \| ([\d,]+) \|", done.stdout)
    tables = [count for name, count in rows if name != "hashed"]
    assert len(tables) == 9 and tables[1:] == [count for name, count in rows if name == "hashed"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_benchmark_of_rows_that_come_and_go():
    command = [sys.executable, str(ROOT / "bench" / "embedding_life.py"), "--rounds", "1", "--rows", "20000"]
    done = warm.run([*command, "--parts", "evict", "save", "recovery", "counted"], DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = re.findall(r"\| (\d+\.\d+) \| at (?:most|least) [\d.]+ \| (?:ok|MISSED) \|", done.stdout)
    assert len(ratios) == 8 and all(float(ratio) > 0 for ratio in ratios), done.stdout


def test_the_benchmark_of_updates_that_come_late():
    done = warm.run([sys.executable, ROOT / "bench" / "embedding_late.py", "--steps", "20"], DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = {name: numpy.array(numbers.split(" | "), float)
              for name, numbers in re.findall(r"^\| (depth [^|]+) \| (.*) \|$", done.stdout, re.MULTILINE)}
    assert len(errors) == 7 and all(numpy.all(of > 0) for of in errors.values())
    assert not numpy.array_equal(errors["depth 1, None"], errors["depth 1, corr"])


def test_ids_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import embedding_ids as ids
    zipf, uniform = (ids.batches(kind, 10**6, 65536, 1)[0] for kind in ids.KINDS)
    assert 21000 < len(numpy.unique(zipf)) < 22500
    assert 63000 < len(numpy.unique(uniform)) < 64000
    for some in zipf, uniform:
        assert some.min() >= 0 and some.max() < 10**6
        assert len(numpy.unique(ids.raw_keys(some))) == len(numpy.unique(some))

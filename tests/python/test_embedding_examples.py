"""examples/embedding_flights.py on invented flights: alone, on two ranks, and beside nn.Embedding. bench/embedding.py's
ids and arithmetic."""
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[2]
FLIGHTS, DEADLINE_S = 1500, 240
COLUMNS = "year,month,day,sched_dep_time,arr_delay,carrier,flight,tailnum,origin,dest,hour"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Flights of ten days, of which those of one carrier are late."""
    made = tmp_path_factory.mktemp("flights")
    random = numpy.random.default_rng(1)
    lines = [COLUMNS]
    for i in range(FLIGHTS):
        carrier, hour = random.integers(4), random.integers(5, 23)
        delay = 40 if carrier == 1 else random.integers(-20, 20)
        lines.append(f"2013,1,{1 + i * 10 // FLIGHTS},{100 * hour},{delay},C{carrier},{random.integers(90)},"
                     f"N{random.integers(70)},JFK,D{random.integers(20)},{hour}")
    lines.append("2013,1,10,2300,NA,C1,1,N1,JFK,D1,23")  # it never arrived
    with zipfile.ZipFile(made / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    return made


def table(folder, *arguments, launcher=()):
    """What it prints: the AUC and the number of rows of each model."""
    command = [*launcher, sys.executable, str(ROOT / "examples" / "embedding_flights.py"), "--data", str(folder)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
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


def test_ids_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import embedding_ids as ids
    zipf, uniform = (ids.batches(kind, 10**6, 65536, 1)[0] for kind in ids.KINDS)
    assert 21000 < len(numpy.unique(zipf)) < 22500
    assert 63000 < len(numpy.unique(uniform)) < 64000
    for some in zipf, uniform:
        assert some.min() >= 0 and some.max() < 10**6
        assert len(numpy.unique(ids.raw_keys(some))) == len(numpy.unique(some))

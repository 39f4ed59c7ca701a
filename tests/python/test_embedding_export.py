"""An export is the table, for readers that have NumPy alone."""
import glob
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

pytestmark = pytest.mark.torch_sizes
READER = Path(__file__).parents[2] / "examples" / "embedding_reader.py"
DIM = 3


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture
def folder(job, tmp_path):
    return os.path.join(hvd.broadcast_object(str(tmp_path)), "out")


@pytest.fixture
def trained(folder):
    """A table whose row of key k was trained k % 4 + 1 times; that of key 50 has become zero."""
    user = E.HashEmbedding(DIM, name="exported", init=E.Constant(1.0))
    sparse = E.SGD(E.tables(user), lr=0.125)
    for step in range(8):
        keys = [key for key in range(40) if key % 4 >= step] + [50]
        user(torch.tensor(keys)).sum().backward()
        sparse.step()
    return user, sparse


def expected(user):
    mine = {int(key): weight.tolist() for part in slices(user.table, 100)
            for key, weight in zip(part["key"], part["weight"]) if weight.any()}
    return {key: row for rows in hvd.allgather_object(mine) for key, row in rows.items()}


def read(folder):
    with open(os.path.join(folder, "export.json")) as file:
        files = json.load(file)["tables"]["exported"]["files"]
    rows = {}
    for one in files:
        with np.load(os.path.join(folder, one["file"])) as columns:
            assert len(columns["key"]) == one["rows"]
            rows.update({int(key): row.tolist() for key, row in zip(columns["key"], columns["weight"])})
    return rows


def check_an_export_is_the_table(folder, trained):
    assert E.export(folder, trained[0]) == 40
    assert read(folder) == expected(trained[0]) and len(read(folder)) == 40
    E.export(folder, trained[0], min_count=3)
    assert sorted(read(folder)) == [key for key in range(40) if key % 4 >= 2]
    E.export(folder, trained[0], min_l2=1.0)
    assert sorted(read(folder)) == [key for key in range(40) if key % 4 < 3]
    hvd.barrier()
    named = len(glob.glob(os.path.join(folder, "export-*.npz")))
    assert named == hvd.size()


def check_a_function_gets_the_rows(trained):
    mine = {}

    def sink(table, columns):
        assert table == "exported"
        mine.update({int(key): row.tolist() for key, row in zip(columns["key"], columns["weight"])})
    assert E.export(sink, trained[0]) == 40
    assert {key: row for rows in hvd.allgather_object(mine) for key, row in rows.items()} == expected(trained[0])


def check_a_function_that_raises_midway(folder, trained, monkeypatch):
    def sink(table, columns):
        raise KeyError("full")
    with pytest.raises(hvd.HorovodInternalError, match="on rank 0: KeyError: 'full'"):
        E.export(sink, trained[0])
    E.export(folder, trained[0])
    before = read(folder)

    def full(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(hvd.HorovodInternalError, match="No space left"):
        E.export(folder, trained[0], min_count=3)
    monkeypatch.undo()
    assert read(folder) == before == expected(trained[0])


def check_numpy_alone_reads_an_export_and_deltas(folder, trained):
    user, sparse = trained
    E.save(folder, user)
    E.export(folder, user)
    for keys in ([1, 2], [2, 60]):
        user(torch.tensor(keys)).sum().backward()
        sparse.step()
        E.save_delta(folder, user, weights_only=True)
    rows = expected(user)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"import sys, runpy; sys.modules['lightcc'] = None; sys.argv[0] = ''; runpy.run_path({str(READER)!r}, " \
           "run_name='__main__')"
    keys = ["0", "1", "2", "60", "999"]
    done = subprocess.run([sys.executable, "-c", code, folder, "exported", *keys], capture_output=True, text=True,
                          env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.endswith("of exported after delta 2")
    for line in lines:
        key, *row = line.split()
        assert [float(value) for value in row] == rows.get(int(key), [0.0] * DIM)


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="missing: pyarrow")
def check_parquet(folder, trained):
    import pyarrow.parquet
    E.export(folder, trained[0], format="parquet")
    rows = {}
    for path in glob.glob(os.path.join(folder, "*.parquet")):
        columns = pyarrow.parquet.read_table(path).to_pydict()
        rows.update(zip(columns["key"], columns["weight"]))
    assert rows == expected(trained[0])


def check_another_format(folder, trained):
    with pytest.raises(ValueError, match="format='csv'"):
        E.export(folder, trained[0], format="csv")

"""Tables on the disk: what is loaded is what was saved, on any number of ranks, and what is not whole is refused."""
import json
import os
import shutil

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

pytestmark = pytest.mark.torch_sizes
DIM = 3


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


PROGRAM = """
import sys
import test_embedding_checkpoint as test
sys.exit(test.program(*{arguments!r}))
"""


def test_four_ranks_then_three_then_four(tmp_path):
    def run(np, *arguments):
        output = ranks.run_script(PROGRAM.format(arguments=arguments), np, PYTHONPATH=path)
        return [line.split("DIGEST ")[1] for line in output.splitlines() if "DIGEST" in line]

    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    saved, trained_on = run(4, None, str(tmp_path / "a"))
    assert run(3, str(tmp_path / "a"), str(tmp_path / "b"))[0] == saved
    assert run(4, str(tmp_path / "b"), str(tmp_path / "c")) == [saved, trained_on]
    assert len(json.loads((tmp_path / "b/manifest.json").read_text())["shards"]) == 3


def program(source, target):
    """Loads or trains; says what the tables hold; saves; trains on; says it again."""
    hvd.init()
    model = make_model("saved", E.SparseAdam)
    if source is None:
        train(*model, range(20))
    else:
        E.load(source, model[0])
    say(digest(model[0]))
    E.save(target, model[0])
    train(*model, range(20, 30))
    say(digest(model[0]))
    return 0


def say(text):
    if hvd.rank() == 0:
        print("DIGEST", text, flush=True)


def make_model(name, optimizer=E.SparseAdam, dim=DIM, dtype=torch.float32):
    model = torch.nn.ModuleList([E.HashEmbedding(dim, name=f"{name}.user", dtype=dtype),
                                 E.HashEmbedding(5, name=f"{name}.item", init=E.Uniform(-1, 1))])
    return model, optimizer(E.tables(model), lr=0.01) if optimizer else None


def train(model, optimizer, steps):
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        ids = torch.randint(-(1 << 40), 1 << 40, (64,), generator=generator)
        ids[:32] = torch.randint(0, 100, (32,), generator=generator)
        outputs = E.lookup([(module, ids) for module in model])
        sum((output ** 2).sum() for output in outputs).backward()
        optimizer.step()


def all_rows(table):
    """The rows of all ranks, by key, with their slots."""
    mine = {}
    for columns in slices(table, 100):
        names = sorted(columns)
        for row in zip(*(columns[name] for name in names)):
            mine[int(row[names.index("key")])] = b"".join(np.asarray(one).tobytes() for one in row)
    every = hvd.allgather_object(mine)
    assert sum(map(len, every)) == len(set().union(*every))
    return {key: row for rows in every for key, row in sorted(rows.items())}


def digest(model):
    import hashlib
    every = [sorted(all_rows(module.table).items()) for module in model]
    return hashlib.sha256(repr(every).encode()).hexdigest() + f" {[len(rows) for rows in every]}"


@pytest.fixture
def folder(job, request, tmp_path):
    """One for all ranks."""
    return os.path.join(hvd.broadcast_object(str(tmp_path), 0), "saved")


@pytest.fixture
def saved(folder):
    """A folder with a model, whose tables are closed afterwards."""
    model, optimizer = make_model("m")
    train(model, optimizer, range(3))
    E.save(folder, model)
    before = digest(model)
    close(model)
    return folder, before


def close(model):
    for module in model:
        module.table.close()


@pytest.fixture
def loading(saved):
    """load() into other models, which are closed afterwards."""
    models = []

    def load(**options):
        model = make_model("m", **options)[0]
        try:
            E.load(saved[0], model)
        except ValueError:
            close(model)
            raise
        models.append(model)
        return model
    yield load
    for model in models:
        close(model)


def on_first(work, *arguments):
    """On one rank; the others wait."""
    if hvd.rank() == 0:
        work(*arguments)
    hvd.barrier()


def manifest_of(folder):
    with open(os.path.join(folder, "manifest.json")) as file:
        return json.load(file)


def check_what_is_loaded_is_what_was_saved(saved, loading):
    assert digest(loading()) == saved[1]
    assert len(manifest_of(saved[0])["shards"]) == hvd.size()


def check_an_evaluation_after_the_load(folder, job):
    """SparseAdam's rows move on without being looked up; a table that has just been loaded knows how."""
    values = []
    for step in ("save", "load"):
        model, optimizer = make_model("evaluated", E.SparseAdam if step == "save" else None)
        if step == "save":
            train(model, optimizer, range(5))
            E.save(folder, model)
        else:
            E.load(folder, model)
        with torch.no_grad():
            values.append(torch.cat(E.lookup([(module, torch.arange(100)) for module in model]), 1))
        close(model)
    assert torch.equal(*values)


def check_an_optimizer_that_comes_after_the_load(saved, loading):
    model = loading(optimizer=None)
    optimizer = E.SparseAdam(E.tables(model), lr=0.01)
    assert digest(model) == saved[1]
    train(model, optimizer, range(3, 5))


def check_another_optimizer_after_the_load(loading):
    model = loading(optimizer=None)
    with pytest.raises(ValueError, match="m.user.*sparse_adam"):
        E.SGD(E.tables(model))


def check_a_second_save_replaces_the_first(saved, loading):
    folder, before = saved
    model = loading()
    train(model, E.SparseAdam(E.tables(model)), range(3, 6))
    E.save(folder, model)
    after = digest(model)
    close(model)
    assert after != before and digest(loading()) == after
    assert len(os.listdir(folder)) == hvd.size() + 1
    hvd.barrier()


def check_some_of_the_tables(saved, job):
    item = E.HashEmbedding(5, name="m.item", init=E.Uniform(-1, 1))
    E.load(saved[0], item)
    assert len(all_rows(item.table)) > 0


def check_a_table_of_another_kind(saved, loading):
    with pytest.raises(ValueError, match="m.user.*dim.*3.*4"):
        loading(dim=4)
    with pytest.raises(ValueError, match="m.user.*float32.*float64"):
        loading(dtype=torch.float64)


def check_another_optimizer(loading):
    with pytest.raises(ValueError, match="m.user.*sparse_adam.*adagrad"):
        loading(optimizer=E.Adagrad)


def check_a_table_that_was_not_saved(saved):
    with pytest.raises(ValueError, match="no table 'other'; it has m.item, m.user"):
        E.load(saved[0], E.HashEmbedding(3, name="other"))


def check_a_manifest_without_a_shard(saved, loading):
    on_first(os.unlink, os.path.join(saved[0], manifest_of(saved[0])["shards"][-1]["file"]))
    with pytest.raises(ValueError, match="names the shard .* which is not there"):
        loading()
    hvd.barrier()


def check_a_folder_without_a_manifest(saved, loading):
    on_first(os.unlink, os.path.join(saved[0], "manifest.json"))
    with pytest.raises(ValueError, match="has no manifest.json"):
        loading()
    hvd.barrier()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x", "version": 1, "shards": [], "tables": {}}'])
def check_a_foreign_manifest(saved, loading, text):
    def write():
        with open(os.path.join(saved[0], "manifest.json"), "w") as file:
            file.write(text)
    on_first(write)
    with pytest.raises(ValueError, match="manifest.json is no manifest of tables"):
        loading()
    hvd.barrier()


@pytest.mark.parametrize("keep", [4, 100, -1])
def check_a_truncated_shard(saved, loading, keep):
    shard = os.path.join(saved[0], manifest_of(saved[0])["shards"][0]["file"])
    on_first(lambda: os.truncate(shard, keep if keep > 0 else os.path.getsize(shard) + keep))
    with pytest.raises(ValueError, match=r"\.safetensors is (truncated|no safetensors file)"):
        loading()
    hvd.barrier()


def check_a_shard_of_another_save(saved, loading):
    folder, _ = saved
    first = manifest_of(folder)["shards"][0]["file"]
    on_first(shutil.copy, os.path.join(folder, first), os.path.join(folder, "kept"))
    model = loading()
    E.save(folder, model)
    close(model)
    on_first(lambda: shutil.copy(os.path.join(folder, "kept"),
                                 os.path.join(folder, manifest_of(folder)["shards"][0]["file"])))
    with pytest.raises(ValueError, match="is not of the save of"):
        loading()
    hvd.barrier()


def check_a_refused_load_changes_nothing(saved, loading):
    folder, before = saved
    model = loading()
    on_first(os.unlink, os.path.join(folder, "manifest.json"))
    with pytest.raises(ValueError, match="has no manifest"):
        E.load(folder, model)
    assert digest(model) == before


def check_a_rank_that_cannot_write(saved, loading, monkeypatch):
    """What was saved before is still there."""
    folder, before = saved
    model = loading()
    train(model, E.SparseAdam(E.tables(model)), range(3, 4))

    def full(*_):
        raise OSError(28, "No space left on device")
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(hvd.HorovodInternalError, match=f"on rank {hvd.size() - 1}: .*No space left.*shard"):
        E.save(folder, model)
    monkeypatch.undo()
    close(model)
    assert digest(loading()) == before

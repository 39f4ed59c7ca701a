"""Recovery's checkpoints: they are of one step though the tables train on, and what cannot be written does no harm."""
import logging
import os
import shutil

import pytest
import torch
from recovery_job import Job, math_of

import lightcc.torch as hvd
import ranks
from lightcc.embedding.moving import ElasticShard
from lightcc.embedding.recovery_folder import Checkpoints
from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_every_must_be_a_number_of_steps():
    with pytest.raises(ValueError, match="every=0 steps; give at least 1"):
        E.Recovery("somewhere", every=0)


def test_full_every_must_be_a_number_of_checkpoints():
    with pytest.raises(ValueError, match="full_every=0 checkpoints; give at least 1"):
        E.Recovery("somewhere", full_every=0)


@pytest.mark.parametrize("is_counted, admission", [(False, None), (True, None), (True, E.Bloom(4 << 20))])
def check_what_comes_back_is_of_the_step_that_was_saved(is_counted, admission, folder):
    job = Job("recovery.step", folder, every=7, min_count=5 * hvd.size() if is_counted else 1, admission=admission)
    job.state.sync()
    known = {0: (job.rows(), math_of(job.auc))}
    for _ in range(20):
        job.train(1, keys=6000)  # some slices; the tables train on while they are written
        known[job.state.steps] = job.rows(), math_of(job.auc)
    job.finish()
    weight = job.model.dense.weight.item()
    torch.nn.init.constant_(job.model.dense.weight, 7.0)
    step = job.load()
    assert step == 14
    assert len(job.model) and (job.model.stats()["candidates"] > 0) == is_counted
    assert job.state.steps == step and job.rows() == known[step][0]
    assert math_of(job.auc) == pytest.approx(known[step][1])
    assert job.model.dense.weight.item() == pytest.approx(weight)
    job.train(3, keys=6000)
    assert job.rows() == known[step + 3][0], "training goes on as it did"
    job.close()


def check_older_checkpoints_are_removed(folder):
    job = Job("recovery.old", folder, every=2, recovery={"full_every": 1})
    job.state.sync()
    for _ in range(6):
        job.train(2)
        job.finish()
    names = os.listdir(os.path.dirname(job.recovery._newest()))
    assert len(names) <= 2, names
    job.close()


def check_a_full_disk_is_a_warning(folder, monkeypatch, caplog):
    job = Job("recovery.full", folder, every=2)
    job.state.sync()
    job.train(2)
    good = job.finish()

    def full(*_):
        raise OSError(28, "No space left on device")
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "lightcc"):
        job.train(2)
        job.recovery._now.finish()
    hvd.barrier()
    assert ("was not written: [Errno 28] No space left on device" in caplog.text) == (hvd.rank() == hvd.size() - 1)
    monkeypatch.undo()
    assert job.recovery._newest() == good
    assert job.load() == 2
    job.close()


def check_there_is_nothing_of_another_job(folder):
    job = Job("recovery.other", folder, every=2)
    job.state.sync()
    other = Job("recovery.another", folder, every=2)
    other.recovery.enter()
    assert other.recovery.load(other.shards, other.state, {}) is None
    job.close()
    other.close()


def check_an_older_one_is_taken_for_one_that_is_truncated(folder, caplog):
    job = Job("recovery.cut", folder, every=2)
    job.state.sync()
    job.train(2)
    newest = job.finish()
    if hvd.rank() == 0:
        file = os.path.join(newest, "0.rows.safetensors")
        os.truncate(file, os.path.getsize(file) - 1)
    hvd.barrier()
    with caplog.at_level(logging.WARNING, "lightcc"):
        assert job.load() == 0
    assert ("0.rows.safetensors is truncated" in caplog.text) == (hvd.rank() == 0)
    assert job.rows()[0] == 0 and not any(shard.broken for shard in job.shards)
    job.close()


def test_only_whole_folders_count(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), "job")
    assert checkpoints.newest() is None
    for step, whole in ((1, True), (2, True), (3, False)):
        name = checkpoints.name(step, 1)
        os.makedirs(name)
        with open(os.path.join(name, "0.json"), "w") as file:
            file.write('{"size": 2, "after": null, "files": {}}')
        if whole:
            shutil.copy(os.path.join(name, "0.json"), os.path.join(name, "1.json"))
    assert checkpoints.newest() == checkpoints.name(2, 1)
    checkpoints.remove_old()
    assert sorted(os.listdir(checkpoints.folder)) == [os.path.basename(checkpoints.name(n, 1)) for n in (2, 3)]


def test_a_shard_has_no_place_at_first():
    table = E.HashEmbedding(2, name="recovery.place").table
    assert ElasticShard(table).place is None
    table.close()

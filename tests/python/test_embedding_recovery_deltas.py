"""Recovery's deltas: with the full checkpoint before them they are their step, and what is torn is left."""
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from recovery_job import Job, math_of

import lightcc.torch as hvd
import ranks
from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")

MANY = 30_000
COUNTING = [{"min_count": 3}, {"min_count": 3, "admission": E.Bloom(4 << 20)}]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def kinds(job):
    """Of the checkpoints that are left, the oldest first: whether each is a delta."""
    with_done = [name for name in reversed(job.recovery._checkpoints._all())
                 if os.path.exists(os.path.join(name, "0.json"))]
    return [json.load(open(os.path.join(name, "0.json")))["after"] is not None for name in with_done]


def check_a_delta_and_what_is_before_it_are_the_step(folder):
    """Rows go and come back, and train on while they are written."""
    job = Job("deltas.step", folder, every=3, recovery={"full_every": 5}, evict=E.Ttl(4))
    job.state.sync()
    known = {}
    for number in range(1, 22):
        job.train(1, keys=[MANY, 50, 700][number % 3], first=1000 * (number % 4))
        known[number] = job.rows(), math_of(job.auc)
        if number % 3 == 0:
            job.finish()
            assert kinds(job)[-1] == (number // 3 % 5 != 0), "each fifth one has all rows"
    assert job.load() == 21 and job.rows() == known[21][0] and math_of(job.auc) == pytest.approx(known[21][1])
    assert job.finish() and kinds(job)[-1] is False, "the first one of a new world has all rows"
    job.close()


def check_random_deltas_are_their_steps(folder):
    rng = np.random.default_rng(7)
    for optimizer, options in (("SparseAdam", {}), ("GroupAdam", {}), ("SGD", COUNTING[0]), ("Adagrad", COUNTING[1])):
        job = Job(f"deltas.{optimizer}", folder, every=2, recovery={"full_every": 100}, evict=E.Ttl(3),
                  optimizer=optimizer, **options)
        job.state.sync()
        known = {}
        for _ in range(30):
            job.train(1, keys=int(rng.integers(1, 40)), first=int(rng.integers(0, 50)))
            known[job.state.steps] = job.rows()
        job.finish()
        assert sum(kinds(job)) == 15
        assert job.load() == 30 and job.rows() == known[30]
        job.train(2)
        assert job.rows()[0] > 0
        job.close()


@pytest.mark.parametrize("options", [{}, *COUNTING])
def check_a_delta_is_as_small_as_what_has_changed(options, folder):
    job = Job("deltas.small", folder, every=2, recovery={"full_every": 3}, **options)
    job.state.sync()
    job.train(6, keys=MANY)
    full = size_of(job.finish())
    assert not options or job.model.stats()["candidates"] > 0
    job.train(2, keys=20)
    known = job.rows()
    assert job.finish() and kinds(job)[-1]
    assert size_of(job.recovery._newest()) <= 0.05 * full
    assert job.load() == 8 and job.rows() == known
    job.close()


@pytest.mark.parametrize("options", COUNTING)
def check_counts_of_deltas_are_of_their_step(options, folder):
    """Keys are counted, let in, go and come back while the checkpoint before is written."""
    job = Job("deltas.counts", folder, every=3, recovery={"full_every": 20}, evict=E.Ttl(3), **options)
    job.state.sync()
    known = {}
    for number in range(1, 22):
        job.train(1, keys=[MANY, 50, 700][number % 3], first=1000 * (number % 4))
        known[number] = job.rows()
    job.finish()
    assert sum(kinds(job)) == 7
    assert job.load() == 21 and job.rows() == known[21]
    job.train(1, keys=50)
    job.close()


def size_of(folder):
    """Of this rank's files of rows."""
    return sum(os.path.getsize(os.path.join(folder, f"{hvd.rank()}.{name}.safetensors")) for name in ("rows", "log"))


@pytest.mark.parametrize("file", ["rows.safetensors", "log.safetensors", "state", "json"])
@pytest.mark.parametrize("missing", [True, False])
def check_what_is_torn_is_left_with_a_warning(folder, file, missing, caplog):
    """A file of the second of three deltas: the first one is what is whole."""
    job = Job("deltas.torn", folder, every=2, recovery={"full_every": 10})
    job.state.sync()
    folders, known = [], []
    for _ in range(3):
        job.train(2)
        folders.append(job.finish())
        known.append(job.rows())
    path = os.path.join(folders[1], f"{hvd.size() - 1}.{file}")
    if hvd.rank() == 0:
        os.unlink(path) if missing else os.truncate(path, os.path.getsize(path) - 1)
    hvd.barrier()
    with caplog.at_level(logging.WARNING, "lightcc"):
        assert job.load() == 2 and job.rows() == known[0]
    warnings = [one.getMessage() for one in caplog.records if "is not whole" in one.getMessage()]
    assert len(warnings) == (2 if hvd.rank() == 0 else 0)
    assert all(os.path.basename(path) in one for one in warnings), warnings
    job.close()


def check_a_delta_that_follows_itself_is_left(folder):
    job = Job("deltas.circle", folder, every=2, recovery={"full_every": 10})
    job.state.sync()
    job.train(2)
    known = job.rows()
    job.finish()
    job.train(2)
    newest = job.finish()
    if hvd.rank() == 0:
        path = os.path.join(newest, "0.json")
        done = {**json.loads(Path(path).read_text()), "after": os.path.basename(newest)}
        Path(path).write_text(json.dumps(done))
    hvd.barrier()
    assert job.load() == 2 and job.rows() == known
    job.close()


def check_what_cannot_be_read_on_a_rank_is_left(folder, monkeypatch, caplog):
    """What looks whole, and is not what its JSON says when it is read: rows of other columns."""
    job = Job("deltas.foreign", folder, every=2, recovery={"full_every": 10})
    job.state.sync()
    job.train(2)
    known = job.rows()
    good = job.finish()
    job.train(2)
    newest = job.finish()
    if hvd.rank() == 0:
        path = os.path.join(newest, "0.rows.safetensors")
        data = open(path, "rb").read().replace(b"deltas.foreign.weight", b"deltas.foreign.height")
        open(path, "wb").write(data)
    hvd.barrier()
    with caplog.at_level(logging.WARNING, "lightcc"):
        assert job.load() == 2 and job.rows() == known
    assert ("cannot be read" in caplog.text and "0.rows.safetensors" in caplog.text) == (hvd.rank() == 0)
    assert good != newest
    job.close()


def check_a_disk_that_was_full_is_followed_by_all_rows(folder, monkeypatch):
    job = Job("deltas.full", folder, every=2, recovery={"full_every": 10})
    job.state.sync()
    job.train(2)
    job.finish()
    assert kinds(job) == [False, True]

    def full(*_):
        raise OSError(28, "No space left on device")
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    job.train(2)
    job.finish()
    monkeypatch.undo()
    hvd.barrier()
    job.train(2)
    assert job.finish().split("/")[-1].startswith(f"{6:012}") and kinds(job)[-1] is False
    known = job.rows()
    assert job.load() == 6 and job.rows() == known
    job.close()


def check_what_a_delta_needs_is_kept_until_newer_ones_are_whole(folder):
    job = Job("deltas.old", folder, every=1, recovery={"full_every": 3})
    job.state.sync()
    left = []
    for _ in range(7):
        job.train(1)
        job.finish()
        left.append(kinds(job))
    full, delta = False, True
    assert left == [[full, delta], [full, delta, delta], [full, delta, delta, full], [full, delta],
                    [full, delta, delta], [full, delta, delta, full], [full, delta]]
    job.close()


def check_deltas_of_a_save_go_on_beside(folder):
    """The user's own deltas, say for serving, miss nothing that a Recovery has read."""
    job = Job("deltas.beside", folder, every=2, recovery={"full_every": 4}, evict=E.Ttl(5))
    job.state.sync()
    saved = os.path.join(folder, "saved")
    job.train(3)
    E.save(saved, job.model)
    for _ in range(4):
        job.train(3, keys=40)
        E.save_delta(saved, job.model)
    known = job.rows()
    job.finish()
    job.train(1)
    E.load(saved, job.model)
    assert job.rows() == known
    job.close()


def check_a_step_that_was_taken_back_is_in_no_delta(folder):
    job = Job("deltas.back", folder, every=2, recovery={"full_every": 10})
    job.state.sync()
    job.train(3)
    job.model(torch.arange(50)).sum().backward()
    job.sparse.step()
    job.state.restore()
    job.train(1)
    assert job.finish() and kinds(job)[-1] is False
    known = job.rows()
    assert job.load() == 4 and job.rows() == known
    job.close()

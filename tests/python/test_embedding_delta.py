"""A save and the deltas after it are the table, bit for bit, whatever happened in between."""
import glob
import os
import random

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc import embedding
from lightcc.embedding.admission import candidates
from lightcc.embedding.rows import alphas, slices
from lightcc.torch import embedding as E

pytestmark = pytest.mark.torch_sizes
DIM = 2
SEQUENCES = 200  # on one rank; a tenth of it on more
COUNTING = [{}, {"min_count": 2}, {"min_count": 3}, {"min_count": 3, "admission": E.Bloom(4 << 20)}]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture
def folder(job, tmp_path):
    return os.path.join(hvd.broadcast_object(str(tmp_path)), "saved")


def make(optimizer=E.SparseAdam, **options):
    user = E.HashEmbedding(DIM, name="delta", **options)
    return user, optimizer(E.tables(user), lr=0.01)


def train(user, sparse, keys):
    user(torch.tensor(keys, dtype=torch.int64)).square().sum().backward()
    sparse.step()


def content(user):
    """All of this rank's shard, bit for bit."""
    held = {int(row[0]): [np.asarray(one).tobytes() for one in row]
            for part in slices(user.table, 64) for row in zip(*part.values())}
    counted = {int(key): int(count) for part in candidates(user.table) for key, count in zip(*part.values())}
    return held, counted, alphas(user.table).tolist()


def check_a_save_and_deltas_are_the_table(folder):
    """Random sequences of steps, of rows that go and come back, of readings in training, and of deltas."""
    for seed in range(SEQUENCES if hvd.size() == 1 else SEQUENCES // 10):
        rng = random.Random(seed)  # the same on all ranks
        user, sparse = make(rng.choice([E.SparseAdam, E.Adagrad, E.GroupAdam]), evict=E.Ttl(4),
                            **COUNTING[seed % len(COUNTING)])
        own = random.Random(1000 * seed + hvd.rank())
        E.save(folder, user)
        for _ in range(rng.randrange(4, 16)):
            what = rng.choice(["train", "train", "train", "read", "delta", "erase"])
            keys = [own.randrange(24) for _ in range(own.randrange(8))]
            if what == "train":
                train(user, sparse, keys)
            elif what == "read":  # SparseAdam writes to the rows
                user(torch.tensor(keys, dtype=torch.int64))
            elif what == "erase":
                embedding.lib.call("erase", user.table.handle, embedding.lib.address(np.arange(6)), 6)
            else:
                E.save_delta(folder, user)
        last = E.save_delta(folder, user)
        expected = content(user)
        train(user, sparse, [1, 2, 3])
        E.load(folder, user)
        assert content(user) == expected, seed
        assert E.load_deltas(folder, user) == last and content(user) == expected  # again
        user.table.close()


def check_deltas_in_memory(folder):
    user, sparse = make(evict=E.Ttl(3))
    train(user, sparse, range(8))
    E.save(folder, user)
    deltas = []
    for step in range(5):
        train(user, sparse, [step, step + 1, 20 + step])
        deltas.append(embedding.take_delta(user.table, since=step))
    expected = content(user)
    E.load(folder, user)
    for delta in deltas[:3] + deltas[:2] + deltas[1:]:
        embedding.apply_delta(user.table, delta)
    assert content(user) == expected and deltas[-1].sequence == 5
    with pytest.raises(ValueError, match="table 'delta': changes are known since delta 5, not 3"):
        embedding.take_delta(user.table, since=3)
    assert embedding.take_delta(user.table).gone.size == 0


def check_what_was_undone_is_in_no_delta(folder):
    user, sparse = make()
    state = hvd.elastic.TorchState(user)
    E.save(folder, user)
    train(user, sparse, [1])
    state.restore()
    with pytest.raises(ValueError, match="'delta' was not saved or loaded yet, or has gone back"):
        embedding.take_delta(user.table)
    E.save(folder, user)
    assert embedding.take_delta(user.table).rows["key"].size == 0


def check_deltas_that_do_not_follow(folder):
    user, sparse = make()
    with pytest.raises(ValueError, match="'delta' was not saved or loaded yet"):
        embedding.take_delta(user.table)
    E.save(folder, user)
    deltas = []
    for step in range(3):
        train(user, sparse, [step])
        deltas.append(embedding.take_delta(user.table))
    E.load(folder, user)
    before = content(user)
    with pytest.raises(ValueError, match="delta 2 follows delta 1 of step 1; the table is at delta 0, step 0"):
        embedding.apply_delta(user.table, deltas[1])
    assert embedding.apply_delta(user.table, deltas[0])
    E.load(folder, user)
    train(user, sparse, [50])
    with pytest.raises(ValueError, match="or the table was trained since"):
        embedding.apply_delta(user.table, deltas[0])
    E.save(folder, user)
    with pytest.raises(ValueError, match="follows another save"):
        embedding.apply_delta(user.table, deltas[0])
    other = E.HashEmbedding(DIM, name="another")
    E.SGD(E.tables(other), lr=1.0)
    E.save(folder + " 2", other)
    with pytest.raises(ValueError, match="delta 1 is of table 'delta'"):
        embedding.apply_delta(other.table, deltas[0])
    assert len(other.table) == 0 and before[0] == {}


def check_a_delta_that_is_missing_leaves_the_table(folder):
    user, sparse = make()
    E.save(folder, user)
    for step in range(3):
        train(user, sparse, [step])
        E.save_delta(folder, user)
    expected = content(user)
    hvd.barrier()
    if hvd.rank() == 0:
        os.unlink(glob.glob(os.path.join(folder, "delta-*-000002.json"))[0])
    hvd.barrier()
    with pytest.raises(ValueError, match="has delta 3, and delta 2 before it is missing"):
        E.load(folder, user)
    assert content(user) == expected


def check_a_delta_that_cannot_be_written_comes_with_the_next(folder, monkeypatch):
    user, sparse = make()
    E.save(folder, user)
    train(user, sparse, [1, 2])

    def full(*_):
        raise OSError(28, "No space left on device")
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(hvd.HorovodInternalError, match="No space left"):
        E.save_delta(folder, user)
    monkeypatch.undo()
    train(user, sparse, [3])
    assert E.save_delta(folder, user) == 1
    expected = content(user)
    E.load(folder, user)
    assert content(user) == expected


def check_weights_only(folder):
    user, sparse = make(E.SGD)
    E.save(folder, user)
    train(user, sparse, [1, 2])
    assert list(embedding.take_delta(user.table, weights_only=True).rows) == ["key", "weight"]
    E.save(folder, user)
    train(user, sparse, [1, 2])
    E.save_delta(folder, user, weights_only=True)
    with pytest.raises(ValueError, match="has weights only, without slots"):
        E.load(folder, user)


def check_a_new_save_ends_the_deltas_of_the_old_one(folder):
    user, sparse = make()
    E.save(folder, user)
    train(user, sparse, [1])
    E.save_delta(folder, user)
    E.save(folder, user)
    hvd.barrier()
    assert not glob.glob(os.path.join(folder, "delta-*"))
    expected = content(user)
    E.load(folder, user)
    assert content(user) == expected


@pytest.mark.parametrize("options", COUNTING[2:])
def check_a_delta_has_the_candidates_that_have_changed(options, folder):
    user, sparse = make(E.SGD, **options)
    train(user, sparse, range(2000) if hvd.rank() == 0 else [])
    E.save(folder, user)
    assert embedding.take_delta(user.table).counted["key"].size == 0
    train(user, sparse, [5, 6, 7, 7, 5000] if hvd.rank() == 0 else [])
    counted = embedding.take_delta(user.table).counted["key"]
    most = 4 * (6 if "admission" in options else 1)  # a key has six pieces of a filter
    assert 0 < hvd.allreduce(torch.tensor(float(len(counted))), op=hvd.Sum).item() <= most
    if "admission" not in options and hvd.size() == 1:
        assert sorted(counted) == [5, 6, 5000], "7 has a row"


def check_a_delta_has_what_has_changed(folder):
    user, sparse = make(E.Adagrad)
    train(user, sparse, list(range(5000)))
    E.save(folder, user)
    train(user, sparse, list(range(50)))
    E.save_delta(folder, user)
    hvd.barrier()
    bytes_of = {kind: sum(map(os.path.getsize, glob.glob(os.path.join(folder, f"{kind}-*.safetensors"))))
                for kind in ("shard", "delta")}
    assert bytes_of["delta"] < 0.05 * bytes_of["shard"]

"""Tables that all numbers of ranks train alike, and what is in them."""
import numpy as np
import torch

import lightcc.torch as hvd
from lightcc.embedding.admission import candidates
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

DIM = 3
BATCH = 24  # of all ranks together; 1, 2, 3 and 4 divide it


def embedding(name, optimizer=E.SGD, lr=0.1, **options):
    module = E.HashEmbedding(DIM, name=name, **{"init": E.Normal(0, 1), "dtype": torch.float64, **options})
    return module, optimizer(E.tables(module), lr=lr)


def batch(step, most=40):
    """The keys of a step over all ranks, in the order of the ranks; and this rank's."""
    rng = np.random.default_rng(step)
    keys = rng.zipf(1.3, BATCH) % most + step // 10 * 3
    return keys.tolist(), keys.reshape(hvd.size(), -1)[hvd.rank()].tolist()


def train(module, optimizer, steps):
    for step in steps:
        module(torch.tensor(batch(step)[1])).sum().backward()
        optimizer.step()


def keys_of(module):
    """The keys of all ranks that have rows, with count and last."""
    mine = [(int(key), int(count), int(last)) for part in slices(module.table, 100)
            for key, count, last in zip(part["key"], part["count"], part["last"])]
    return sorted(sum(hvd.allgather_object(mine), []))


def counted(module):
    mine = [(int(key), int(count)) for part in candidates(module.table)
            for key, count in zip(part["key"], part["count"])]
    return dict(sum(hvd.allgather_object(mine), []))


def expect_counts_go_back(user, sparse):
    """With a restore, as exactly as rows."""
    state = hvd.elastic.TorchState(user, sparse=sparse)
    train(user, sparse, range(12))
    state.save()
    then = counted(user), keys_of(user)
    train(user, sparse, range(12, 24))
    later = counted(user), keys_of(user)
    state.restore()
    assert (counted(user), keys_of(user)) == then and then[0] != later[0]
    train(user, sparse, range(12, 24))
    assert (counted(user), keys_of(user)) == later

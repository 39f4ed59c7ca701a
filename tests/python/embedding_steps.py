"""Steps on ranks with random keys and gradients, the same for any framework, and what an oracle makes of them."""
import embedding_oracles as oracles
import numpy as np

import lightcc.numpy as hvd

DIM = 4
KEYS = [0, 1, -1, 7, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345678901, 2, 3, 4, 5]


def mine(step, count=9):
    """Keys and gradients of this rank in a step, and those of all ranks; a rank may have none."""
    every = []
    for rank in range(hvd.size()):
        rng = np.random.default_rng([step, rank])
        n = 0 if rank and (step + rank) % 4 == 0 else count
        every.append((rng.choice(KEYS, n), rng.normal(size=(n, DIM))))
    return every[hvd.rank()], every


def trained_oracle(first, rule, steps, lr=1e-3, average=True):
    """first: the rows of KEYS before."""
    start = dict(zip(KEYS, first))
    oracle = oracles.Table(rule, lambda key: start[key])
    for step in range(steps):
        sums = {}
        for keys, gradients in mine(step)[1]:
            own = {}
            for key, gradient in zip(keys.tolist(), gradients):
                own[key] = own.get(key, 0) + gradient
            for key, gradient in own.items():
                sums[key] = sums.get(key, 0) + gradient / (hvd.size() if average else 1)
        oracle.update(list(sums), np.array(list(sums.values())).reshape(-1, DIM), lr)
    return oracle

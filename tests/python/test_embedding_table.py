"""A table against a dictionary: rows are born, trained, erased and saved at random, and there are no others."""
import random

import numpy as np
import pytest

from lightcc import embedding
from lightcc.embedding import lib, rows
from lightcc.embedding.exchange import Keys, Lookup, Step, Update

pytestmark = pytest.mark.usefixtures("job")

DIM = 3
EDGES = [0, 1, -1, (1 << 63) - 1, -(1 << 63)]  # keys that an index might use for something else
NUMBERS = {"lr": 1.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "l1": 0.0, "l2": 0.0, "l21": 0.0}


class Pair:
    """A table whose weights are whole numbers, and what they must be."""

    def __init__(self, name):
        self.table = embedding.Table(name, DIM, "float64", embedding.Zeros())
        self.table.attach(embedding.Rule("sgd"))
        self.expected = {}

    def train(self, keys, values):
        """Adds values to rows; those that are not there are born."""
        lookup = Lookup([(self.table, Keys(np.array(keys, np.int64)))], training=True, prefetch=False)
        [found] = lookup.finish()
        sums = np.zeros((len(found.keys), DIM))
        np.add.at(sums, found.inverse, -np.asarray(values, np.float64))
        Step([Update(self.table, [(found, sums)], NUMBERS)], average=False).finish()
        for key, value in zip(keys, values):
            self.expected[key] = self.expected.get(key, np.zeros(DIM)) + value

    def erase(self, keys):
        array = np.array(keys, np.int64)
        lib.call("erase", self.table.handle, lib.address(array), len(array))
        for key in keys:
            self.expected.pop(key, None)

    def check(self, others=()):
        held = {int(key): weight for part in rows.slices(self.table, 97)
                for key, weight in zip(part["key"], part["weight"])}
        assert held.keys() == self.expected.keys() and len(self.table) == len(held)
        assert all(np.array_equal(held[key], weight) for key, weight in self.expected.items())
        for key in [*random.sample(sorted(held), min(20, len(held))), *others]:
            assert (key in self.table) == (key in self.expected)
        keys = np.array([*held, *others], np.int64)
        [found] = Lookup([(self.table, Keys(keys))], training=False, prefetch=False).finish()
        zero = np.zeros(DIM)
        assert np.array_equal(found.rows[found.inverse], [self.expected.get(int(key), zero) for key in keys])


@pytest.mark.parametrize("seed", range(3))
def test_against_a_dictionary(seed, tmp_path):
    random.seed(seed)
    rng = np.random.default_rng(seed)
    pair, space = Pair(f"dictionary {seed}"), [*EDGES, *rng.integers(-(1 << 63), (1 << 63) - 1, 3000).tolist()]
    for turn in range(60):
        what = random.choice(["train", "train", "train", "erase", "save"])
        if what == "train":
            keys = random.choices(space, k=random.choice([0, 1, 50, 1000]))
            pair.train(keys, rng.integers(-9, 10, (len(keys), DIM)))
        elif what == "erase":
            pair.erase(random.choices(space, k=random.choice([1, 100, 2000])))
        else:
            embedding.save(str(tmp_path), [pair.table])
            saved = {key: weight.copy() for key, weight in pair.expected.items()}
            pair.train(random.choices(space, k=5), np.ones((5, DIM)))  # which the load undoes
            pair.table.close()
            pair = Pair(f"dictionary {seed}")
            embedding.load(str(tmp_path), [pair.table])
            pair.expected = saved
        if turn % 10 == 9:
            pair.check(random.choices(space, k=50))
    pair.erase(list(pair.expected))
    pair.check(EDGES)
    pair.table.close()


def test_memory_is_given_back():
    table = embedding.Table("given back", 64, "float64", embedding.Zeros())
    keys = np.arange(200_000)
    rows.insert(table, {"key": keys, "weight": np.ones((len(keys), 64))})
    full = table.stats()
    assert full["rows"] == len(keys) and full["bytes"] >= len(keys) * full["record_bytes"]
    lib.call("erase", table.handle, lib.address(keys), len(keys) - 1000)
    assert len(table) == 1000 and table.stats()["bytes"] < full["bytes"] / 2
    assert [key in table for key in (0, len(keys) - 1001, len(keys) - 1000)] == [False, False, True]
    table.close()


def test_a_row_that_comes_back_is_a_new_one():
    table = embedding.Table("comes back", DIM, "float64", embedding.Normal(0, 1))
    table.attach(embedding.Rule("adagrad"))

    def train():
        [found] = Lookup([(table, Keys(np.array([5])))], training=True, prefetch=False).finish()
        Step([Update(table, [(found, np.ones((1, DIM)))], NUMBERS)], average=False).finish()
        return next(rows.slices(table, 10))
    first = train()
    assert first["count"][0] == 1 and first["last"][0] == 1
    train()
    key = np.array([5])
    lib.call("erase", table.handle, lib.address(key), 1)
    again = train()
    assert again["count"][0] == 1 and again["last"][0] == 3
    assert np.array_equal(again["weight"], first["weight"]) and np.array_equal(again["v"], first["v"])
    table.close()

"""Rows that come and go in TensorFlow and Keras: the keys that have a row are those that PyTorch's step, which is
lightcc.embedding's own, leaves after the same lookups."""
import gc

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.numpy as hvd
import ranks
from lightcc import embedding
from lightcc.embedding import exchange
from lightcc.embedding.rows import slices
from lightcc.embedding.rules import NUMBERS, Rule
from lightcc.tensorflow import embedding as of_tensorflow

pytestmark = pytest.mark.usefixtures("job")
STEPS, IDS = 24, 4
LIFE = {"max_rows": {"max_rows": 32}, "admission": {"min_count": 3, "admission": embedding.Bloom(4 << 20)},
        "both": {"min_count": 2, "admission": embedding.Bloom(4 << 20, error=0.05), "max_rows": 20,
                 "evict": embedding.Ttl(9)},
        "asking": {"evict": embedding.Asking(lambda key, count, last, step: last + 5 < step, every=2)}}


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(params=LIFE)
def life(request):
    return LIFE[request.param]


def ids_of(step):
    """This rank's. Some come often, most a few times within a while."""
    rng = np.random.default_rng([step, hvd.rank()])
    return np.concatenate([rng.integers(3, size=1), 8 * (step // 3) + rng.integers(8, size=IDS - 1)])


def expected_keys(life, steps=STEPS, lr=0.5):
    """After steps without a framework."""
    table = embedding.Table("expected", 1, init=embedding.Zeros(), **life)
    table.attach(Rule("sgd"))
    for step in range(steps):
        lookup = exchange.Lookup([(table, exchange.Keys(ids_of(step)))], training=True, prefetch=False)
        found, = lookup.finish()
        numbers = dict.fromkeys(NUMBERS, 0.0) | {"lr": lr}
        exchange.Step([exchange.Update(table, [(found, np.ones_like(found.rows))], numbers)], average=True).finish()
    live = keys_of(table)
    table.close()
    return live


def keys_of(table):
    """Of all ranks, and how often and when each was trained."""
    found = {}
    for part in slices(table, 1 << 10, only=("key", "count", "last")):
        found.update((int(key), (int(count), int(last)))
                     for key, count, last in zip(part["key"], part["count"], part["last"]))
    return {key: one for rows in hvd.allgather_object(found) for key, one in rows.items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def check_hash_embedding(life, compiled):
    user = of_tensorflow.HashEmbedding(1, f"user.{compiled}", of_tensorflow.Zeros(), **life)
    step = tf.function(step_of(user)) if compiled else step_of(user)
    for number in range(STEPS):
        step(tf.constant(ids_of(number)))
    live = keys_of(user.table)
    assert live and live == expected_keys(life)
    if "max_rows" in life:
        assert len(live) <= life["max_rows"] and sum(hvd.allgather_object(user.stats()["evicted"])) > 0


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def check_fit(keras, E, life, steps_per_execution):
    layer = E.Embedding(1, name=f"life.{steps_per_execution}", init=E.Zeros(), **life)
    model = keras.Sequential([keras.layers.Input((IDS,), dtype="int64"), layer, keras.layers.Flatten(),
                              keras.layers.Dense(1)])
    model.compile(E.Optimizer(keras.optimizers.SGD(0.1), E.SGD(0.5)), "mse", steps_per_execution=steps_per_execution)
    ids = np.stack([ids_of(step) for step in range(STEPS)])
    model.fit(ids, np.ones((STEPS, 1), np.float32), batch_size=1, shuffle=False, verbose=0)
    live = keys_of(layer.table)
    assert live and live == expected_keys(life)


def step_of(user):
    """In which the row of each id gets a gradient of 1."""
    sparse = of_tensorflow.SGD(0.5)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user(ids))
        sparse.apply_gradients(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))
    return step


def check_rows_go_while_a_rank_serves():
    user = of_tensorflow.HashEmbedding(1, "served", max_rows=40)
    step = tf.function(step_of(user))
    for number in range(10 if hvd.rank() == 0 else 6):
        step(100 * number + 10 * hvd.rank() + tf.range(8))
    of_tensorflow.serve()
    live = keys_of(user.table)
    assert len(live) <= 40 and set(range(900, 908)) <= set(live)


def check_a_graph_that_is_gone_keeps_no_table():
    for _ in range(2):  # of one name
        tf.function(step_of(of_tensorflow.HashEmbedding(1, "kept", max_rows=4)))(tf.range(8))
        gc.collect()


@pytest.mark.parametrize("compiled, error", [(False, ValueError), (True, tf.errors.InvalidArgumentError)])
def check_a_function_that_fails_ends_the_step_on_all_ranks(compiled, error):
    def fail(key, count, last, step):
        if hvd.rank() == hvd.size() - 1:
            raise KeyError("no such row")
        return count > 9

    user = of_tensorflow.HashEmbedding(1, "fails", evict=embedding.Asking(fail, every=1))
    step = step_of(user)
    text = rf"'fails': the eviction's function failed on rank {hvd.size() - 1}: .*no such row"
    with pytest.raises(error, match=text):
        (tf.function(step) if compiled else step)(tf.range(8))
    assert len(keys_of(user.table)) == 8


def check_the_config_comes_back(E, life):
    layer = E.Embedding(1, name="config", **life)
    if "evict" in life and isinstance(life["evict"], embedding.Asking):
        with pytest.raises(ValueError, match="'config': a config cannot name its function of evict="):
            layer.get_config()
        return
    config = layer.get_config()
    again = type(layer).from_config(config)
    again.build((None, 1))
    assert again.table.max_rows == life.get("max_rows", 0) and again.table.admission == life.get("admission")
    assert again.table.policy == life.get("evict") and again.get_config() == config


def check_wrong_arguments(E):
    for options, text in (({"max_rows": -1}, "max_rows=-1"), ({"admission": E.Bloom(4 << 20)}, "give one above 1")):
        with pytest.raises(ValueError, match=f"table 'wrong life'.*{text}"):
            E.Embedding(1, name="wrong life", **options)(tf.constant([[1]]))

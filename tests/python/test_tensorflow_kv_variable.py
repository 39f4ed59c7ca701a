"""TFPlus's names, in graphs of TensorFlow 1's style and eagerly: rows are what the oracles and TensorFlow's own
optimizers make of a variable with all rows."""
import logging

import embedding_oracles as oracles
import numpy as np
import pytest
import tensorflow as tf
from embedding_steps import DIM, KEYS, mine, trained_oracle

import lightcc.numpy as exchanged
import lightcc.tensorflow as hvd
import ranks
from lightcc import embedding
from lightcc.tensorflow import kv_variable as kv
from lightcc.tensorflow.kv_variable import ordering, variables

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("job")
STEPS = 8
KINDS = {tf.int32: [1, 2], tf.int64: [1 << 62, -1], tf.string: ["a", "b" * 50]}
ZEROS, NORMAL = tf.zeros_initializer(), v1.random_normal_initializer(0.0, 1.0, seed=3)
OPTIMIZERS = {
    "Adam": (lambda: kv.AdamOptimizer(0.05), oracles.LazyAdam()),
    "Adagrad": (lambda: kv.AdagradOptimizer(0.05), oracles.Adagrad(eps=0, initial=0.1)),
    "GroupAdam": (lambda: kv.GroupAdamOptimizer(0.05, l1_regularization_strength=0.1, l21_regularization_strength=0.01),
                  oracles.GroupAdam(l1=0.1, l21=0.01)),
    "SparseGroupFtrl": (lambda: kv.SparseGroupFtrlOptimizer(0.05, l1_regularization_strength=0.1,
                                                            l2_regularization_strength=0.1,
                                                            l21_regularization_strength=0.01),
                        oracles.GroupAdagrad(l1=0.1, l2=0.1, l21=0.01))}


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(autouse=True)
def closed():
    yield
    for table in variables._tables.values():
        table.close()


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def user(name="user", initializer=NORMAL, **options):
    return kv.get_kv_variable(name, DIM, **{"value_dtype": tf.float64, "initializer": initializer, **options})


def weighted(variable):
    """Placeholders of ids and of the gradients that their rows get, and the loss that makes these."""
    ids, gradients = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float64, [None, DIM])
    return ids, gradients, tf.reduce_sum(kv.embedding_lookup(variable, ids) * gradients)


def started():
    session = v1.Session()
    session.run(v1.global_variables_initializer())
    return session


# Training

@pytest.mark.parametrize("name", OPTIMIZERS)
def check_each_optimizer_in_a_graph(graph, name):
    make, oracle = OPTIMIZERS[name]
    variable, step = user(), v1.train.get_or_create_global_step()
    ids, gradients, loss = weighted(variable)
    read = kv.embedding_lookup(variable, tf.constant(KEYS, tf.int64), training=False)
    train = make().minimize(loss, global_step=step)
    assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [train]
    with started() as session:
        first = session.run(read)
        for i in range(STEPS):
            session.run(train, dict(zip((ids, gradients), mine(i)[0])))
        found, count = session.run([read, step])
    np.testing.assert_allclose(found, trained_oracle(first, oracle, STEPS, 0.05).read(KEYS), rtol=1e-9, atol=1e-12)
    assert count == STEPS == kv.table_of(variable).stats()["steps"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def check_each_optimizer_eagerly(name):
    make, oracle = OPTIMIZERS[name]
    variable, optimizer, step = user(), make(), tf.Variable(0, dtype=tf.int64)
    first = kv.embedding_lookup(variable, KEYS, training=False).numpy()
    for i in range(STEPS):
        ids, gradients = mine(i)[0]
        optimizer.minimize(lambda: tf.reduce_sum(kv.embedding_lookup(variable, tf.constant(ids, tf.int64)) * gradients),
                           global_step=step, var_list=[variable])
    expected = trained_oracle(first, oracle, STEPS, 0.05).read(KEYS)
    np.testing.assert_allclose(kv.embedding_lookup(variable, KEYS, training=False), expected, rtol=1e-9, atol=1e-12)
    assert step.numpy() == STEPS


def check_in_a_function():
    variable, optimizer = user(initializer=ZEROS), kv.AdagradOptimizer(1.0, 1e-30)
    dense = tf.Variable(0.0, dtype=tf.float64)

    @tf.function
    def step(ids):
        optimizer.minimize(lambda: tf.reduce_sum(kv.embedding_lookup(variable, ids)) + dense,
                           var_list=[variable, dense])

    for _ in range(2):
        step(tf.constant([7, 9]))
    assert np.allclose(kv.embedding_lookup(variable, [7, 9], training=False), -1 - 0.5 ** 0.5)
    assert np.isclose(dense, -1 - 0.5 ** 0.5)


@pytest.mark.parametrize("make", [
    lambda: kv.AdamOptimizer(0.05), lambda: kv.AdagradOptimizer(0.05), lambda: kv.GroupAdamOptimizer(0.05),
    lambda: kv.SparseGroupFtrlOptimizer(0.05, l1_regularization_strength=0.1, l2_regularization_strength=0.1)],
    ids=OPTIMIZERS)
def check_rows_and_a_dense_variable_beside_them(graph, make):
    """Where each step has all keys, an optimizer makes the same of a variable that has all of them."""
    variable = user(initializer=ZEROS)
    dense = v1.get_variable("dense", [len(KEYS), DIM], tf.float64, initializer=v1.zeros_initializer())
    gradients = v1.placeholder(tf.float64, [len(KEYS), DIM])
    rows = kv.embedding_lookup(variable, tf.constant(KEYS, tf.int64))
    train = make().minimize(tf.reduce_sum((rows + tf.gather(dense, list(range(len(KEYS))))) * gradients))
    random = np.random.default_rng(hvd.rank())
    with started() as session:
        for _ in range(STEPS):
            session.run(train, {gradients: random.normal(size=(len(KEYS), DIM))})
        found, expected = session.run([rows, dense])
    assert np.abs(expected).min() > 0 or "Ftrl" in make().get_name()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)  # TensorFlow's beta is a float32
    every = exchanged.allgather(expected[np.newaxis])
    assert (every == expected).all()


def check_a_monitored_session(graph, tmp_path):
    variable, step = user(initializer=ZEROS), v1.train.get_or_create_global_step()
    bias = v1.get_variable("bias", [], tf.float64, initializer=v1.zeros_initializer())
    loss = tf.reduce_sum(kv.embedding_lookup(variable, tf.constant([7], tf.int64))) + bias
    train = kv.AdagradOptimizer(1.0).minimize(loss, global_step=step)
    hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(3)]
    folder = str(tmp_path) if hvd.rank() == 0 else None
    with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
        while not session.should_stop():
            session.run(train)
    assert kv.table_of(variable).stats()["steps"] == 3


def check_a_rate_that_is_a_tensor(graph):
    variable, rate = user(initializer=ZEROS), v1.placeholder(tf.float32, [])
    rows = kv.embedding_lookup(variable, tf.constant([7], tf.int64))
    train = kv.AdamOptimizer(rate, beta1=0.0, beta2=0.0, epsilon=0.0).minimize(tf.reduce_sum(rows))
    with started() as session:
        session.run(train, {rate: 0.5})
        session.run(train, {rate: 0.25})
        assert (session.run(rows) == -0.75).all()


def check_gradients_may_be_changed_between(graph):
    variable = user(initializer=ZEROS)
    rows, optimizer = kv.embedding_lookup(variable, tf.constant([7], tf.int64)), kv.SparseGroupFtrlOptimizer(0.1)
    (grad, _), = optimizer.compute_gradients(tf.reduce_sum(rows))
    zero = tf.IndexedSlices(grad.values * 0.0, grad.indices, grad.dense_shape)
    train = optimizer.apply_gradients([(zero, variable)])
    with started() as session:
        session.run(train)
        assert (session.run(rows) == 0).all() and kv.table_of(variable).stats()["steps"] == 1


def check_two_optimizers_with_scopes_as_their_variables(graph):
    losses = []
    for part in ("wide", "deep"):
        with v1.variable_scope(part, reuse=v1.AUTO_REUSE):
            assert user() is user()
            losses.append(tf.reduce_sum(kv.embedding_lookup(user(), tf.constant([7], tf.int64))))
    loss, trains = tf.add_n(losses), []
    for part in ("wide", "deep"):
        of_part = v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES, scope=part)
        assert [one.op.name for one in of_part] == [f"{part}/user"]
        with tf.control_dependencies(trains):
            trains.append(kv.AdagradOptimizer(1.0, name=part).minimize(loss, var_list=of_part))
    both = tf.group(*trains)
    with started() as session:
        session.run(both)
    assert kv.table_of(of_part[0]).stats()["steps"] == 1


# Order

def check_many_tables_have_one_order_on_all_ranks(graph):
    ids = [v1.placeholder(tf.int64, [None]) for _ in range(12)]
    rows = [kv.embedding_lookup(user(f"user{i}"), one) for i, one in enumerate(ids)]
    train = kv.AdamOptimizer().minimize(tf.add_n([tf.reduce_sum(one) for one in rows]))
    lookups = [op for op in graph.get_operations() if op.type == "LightccEmbeddingLookup"]
    assert all(before in after.control_inputs for before, after in zip(lookups, lookups[1:])) and len(lookups) == 12
    with started() as session:
        for i in range(10):
            session.run(train, {one: np.arange(i + hvd.rank()) for one in ids})


def check_one_batch_is_looked_up_in_order_and_another_is_left_alone(graph):
    for _ in range(2):
        batch = v1.placeholder(tf.int64, [None, 2])
        with v1.variable_scope("", reuse=v1.AUTO_REUSE):
            rows = [kv.embedding_lookup(user(name), batch[:, i], training=False) for i, name in enumerate("ab")]
    with started() as session:
        session.run(rows, {batch: [[1, 2]]})  # and not the first batch, which has no value
    first, second, third, fourth = [op for op in graph.get_operations() if op.type == "LightccEmbeddingLookup"]
    of_fourth = ordering.ancestors([fourth])
    assert first in ordering.ancestors([second]) and third in of_fourth and not {first, second} & of_fourth


def check_two_updates_without_an_order_are_told(graph, caplog):
    for name in "ab":
        rows = kv.embedding_lookup(user(name), tf.constant([1], tf.int64))
        kv.AdamOptimizer(name=name).minimize(tf.reduce_sum(rows), var_list=v1.trainable_variables(name))
    assert ("two updates" in caplog.text) == (hvd.size() > 1)


# Lookups

def bags(values, dense_shape=(4, 3)):
    """Rows 0, 1 and 3 of four have ids."""
    return tf.SparseTensor([[0, 0], [0, 2], [1, 1], [3, 0]], values, dense_shape)


def check_combiners_are_those_of_tensorflow():
    variable = user()
    ids, weights = bags(tf.constant([7, 9, 7, 3], tf.int64)), bags(tf.constant([1.0, 2.0, 0.5, 3.0], tf.float64))
    every = kv.embedding_lookup(variable, tf.range(10, dtype=tf.int64), training=False)
    for combiner in ("sum", "mean", "sqrtn", None):
        for given in (None, weights):
            for max_norm in (None, 1.0):
                expected = v1.nn.embedding_lookup_sparse(every, ids, given, combiner=combiner, max_norm=max_norm)
                found = kv.embedding_lookup_sparse(variable, ids, given, combiner=combiner, max_norm=max_norm)
                np.testing.assert_allclose(found, expected, rtol=1e-12)
                if combiner:
                    found = kv.safe_embedding_lookup_sparse(variable, ids, given, combiner, max_norm=max_norm)
                    np.testing.assert_allclose(found, expected, rtol=1e-12)
    found = kv.embedding_lookup(variable, ids.values, max_norm=1.0)
    np.testing.assert_allclose(found, v1.nn.embedding_lookup(every, ids.values, max_norm=1.0), rtol=1e-12)
    assert np.linalg.norm(found, axis=1).max() < 1 + 1e-12


def check_empty_bags_and_weights_that_do_not_count():
    variable = user()
    row = kv.embedding_lookup(variable, [-5, 3], training=False).numpy()
    ids = tf.SparseTensor([[0, 0, 0], [1, 1, 0]], tf.constant([-5, 3], tf.int64), [3, 2, 2])
    found = kv.safe_embedding_lookup_sparse(variable, ids)
    assert found.shape == (3, 2, DIM)
    assert (found[0, 0] == row[0]).numpy().all() and (found[1, 1] == row[1]).numpy().all()
    assert np.count_nonzero(found.numpy().any(-1)) == 2
    found = kv.safe_embedding_lookup_sparse(variable, ids, default_id=3)
    assert (found[2, 1] == row[1]).numpy().all() and (found[0, 0] == row[0]).numpy().all()
    weights = tf.SparseTensor(ids.indices, tf.constant([0.0, 2.0]), ids.dense_shape)
    assert np.count_nonzero(kv.safe_embedding_lookup_sparse(variable, ids, weights).numpy().any(-1)) == 1
    none = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [2, 2])
    assert kv.embedding_lookup_sparse(variable, none, None).shape == (0, DIM)
    assert (kv.safe_embedding_lookup_sparse(variable, none) == tf.zeros([2, DIM], tf.float64)).numpy().all()


def check_combined_rows_are_trained(graph):
    variable = user(initializer=ZEROS)
    ids = bags(tf.constant([7, 9, 7, 3], tf.int64))
    weights = bags(tf.constant([1.0, 2.0, 0.5, 3.0], tf.float64))
    loss = tf.reduce_sum(kv.embedding_lookup_sparse(variable, ids, weights, combiner="sum"))
    loss += tf.reduce_sum(kv.safe_embedding_lookup_sparse(variable, ids, combiner="sum"))
    gradients, = tf.gradients(loss, [variable])
    read = kv.embedding_lookup(variable, tf.constant([0, 3, 7, 9], tf.int64), training=False)
    train = kv.AdagradOptimizer(1.0, 1e-30).apply_gradients([(gradients, variable)])
    with started() as session:
        session.run(train)
        assert session.run(read)[:, 0].tolist() == pytest.approx([0, -1, -1, -1])
    rows = exchanged.allreduce(np.array(len(kv.table_of(variable))), op=exchanged.Sum)
    assert rows == 3  # and none of key 0, which stands for nothing in empty bags


def check_kinds_of_keys():
    for dtype, ids in KINDS.items():
        variable = user(f"keys {dtype.name}", key_dtype=dtype, initializer=ZEROS)
        optimizer = kv.AdagradOptimizer(1.0, 1e-30)
        optimizer.minimize(lambda: tf.reduce_sum(kv.embedding_lookup([variable], tf.constant([ids], dtype))),
                           var_list=[variable])
        assert np.allclose(kv.embedding_lookup(variable, tf.constant(ids, dtype), training=False), -1)


@pytest.mark.parametrize("dtype", KINDS)
def check_kinds_of_keys_in_a_graph(graph, dtype):
    variable, ids = user(key_dtype=dtype, initializer=ZEROS), v1.placeholder(dtype, [None])
    bags = tf.SparseTensor([[0, 0], [0, 1]], ids, [2, 2])
    loss = tf.reduce_sum(kv.safe_embedding_lookup_sparse(variable, bags, combiner="sum"))
    train, read = kv.AdagradOptimizer(1.0, 1e-30).minimize(loss), kv.embedding_lookup(variable, ids, training=False)
    with started() as session:
        session.run(train, {ids: KINDS[dtype]})
        assert np.allclose(session.run(read, {ids: KINDS[dtype]}), -1)


def check_other_variables_are_tensorflows():
    plain = tf.Variable(np.arange(6.0).reshape(3, 2))
    assert kv.embedding_lookup(plain, [2]).numpy().tolist() == [[4, 5]]
    ids = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([0, 2], tf.int64), [1, 2])
    assert kv.embedding_lookup_sparse(plain, ids, None, combiner="sum").numpy().tolist() == [[4, 6]]
    assert kv.safe_embedding_lookup_sparse(plain, ids, combiner="sum").numpy().tolist() == [[4, 6]]


def check_a_key_enters_when_it_was_seen_often_enough(graph):
    variable = user(initializer=tf.ones_initializer(), enter_threshold=3 * hvd.size())
    rows = kv.embedding_lookup(variable, tf.constant([7], tf.int64))
    train = kv.AdagradOptimizer(1.0).minimize(tf.reduce_sum(rows))
    table, counts = kv.table_of(variable), []
    with started() as session:
        for _ in range(4):
            session.run(train)
            counts.append(table.stats()["rows"] + table.stats()["candidates"] * 10)
            assert (session.run(rows) != 0).all() == (len(counts) >= 3)
    assert table.min_count == 3 * hvd.size()
    assert counts in ([10, 10, 1, 1], [0, 0, 0, 0])  # on the key's owner, and on another rank


# Names and initializers

@pytest.mark.parametrize("initializer, expected", [
    (tf.zeros_initializer(), embedding.Zeros()), (tf.zeros_initializer, embedding.Zeros()),
    (v1.ones_initializer(), embedding.Constant(1.0)), (v1.constant_initializer(0.5), embedding.Constant(0.5)),
    (v1.random_uniform_initializer(-1.0, 2.0), embedding.Uniform(-1.0, 2.0)),
    (v1.keras.initializers.RandomNormal(-1, 1), embedding.Normal(-1.0, 1.0)),
    (tf.random_normal_initializer(0.5, 0.25), embedding.Normal(0.5, 0.25)),
    (tf.keras.initializers.RandomUniform(-1.0, 1.0), embedding.Uniform(-1.0, 1.0)),
    (embedding.Normal(0, 2), embedding.Normal(0, 2)), (None, embedding.Normal(0, 0.01))])
def check_initializers(initializer, expected):
    assert kv.table_of(user("init", initializer=initializer)).init == expected


@pytest.mark.parametrize("initializer", [tf.random_normal_initializer(0, tf.constant([1.0, 2.0])), "zeros",
                                         v1.truncated_normal_initializer(), v1.constant_initializer([1.0, 2.0]),
                                         v1.glorot_uniform_initializer()])
def check_initializers_that_no_table_has(initializer):
    with pytest.raises(ValueError, match="'init'"):
        user("init", initializer=initializer)


def check_graphs_share_a_table():
    with tf.Graph().as_default():
        variable = user(initializer=ZEROS)
        rows = kv.embedding_lookup(variable, tf.constant([7], tf.int64))
        train = kv.AdagradOptimizer(1.0, 1e-30).minimize(tf.reduce_sum(rows))
        with started() as session:
            session.run(train)
    with tf.Graph().as_default():
        rows = kv.embedding_lookup(user(initializer=ZEROS), tf.constant([7], tf.int64))
        with started() as session:
            assert np.allclose(session.run(rows), -1)
    assert kv.table_of(user(initializer=ZEROS)) is kv.table_of(variable)


def check_a_partitioner_is_ignored_with_one_warning(graph, caplog, monkeypatch):
    monkeypatch.setattr("lightcc.tensorflow.kv_variable.variables._has_warned", False)
    with caplog.at_level(logging.WARNING, "lightcc"):
        user("a", partitioner=v1.fixed_size_partitioner(2))
        with v1.variable_scope("scope", partitioner=v1.fixed_size_partitioner(2)):
            assert user("b").shape == (0, DIM)
            assert len(list(v1.get_variable("dense", [4]))) == 2
    assert caplog.text.count("partitioner is ignored") == 1


# Bad input

def check_another_variable_of_a_name():
    variable = user("taken")
    for options, what in (({"embedding_dim": DIM + 1}, "dim"), ({"key_dtype": tf.string}, "strings"),
                          ({"enter_threshold": 3}, "min_count"), ({"value_dtype": tf.float32}, "dtype"),
                          ({"initializer": ZEROS}, "init")):
        with pytest.raises(ValueError, match=f"'taken' has {what}="):
            kv.get_kv_variable("taken", **{"embedding_dim": DIM, "value_dtype": tf.float64, "initializer": NORMAL,
                                           **options})
    assert user("taken") is variable


def check_a_name_is_used_again_with_reuse_only(graph):
    variable = user("taken")
    with pytest.raises(ValueError, match="taken"):
        user("taken")
    with v1.variable_scope("", reuse=True):
        assert user("taken") is variable


@pytest.mark.parametrize("options", [
    {"embedding_dim": None}, {"embedding_dim": 0}, {"embedding_dim": [2, 3]}, {"key_dtype": tf.float32},
    {"value_dtype": tf.float16}, {"enter_threshold": -1}, {"regularizer": lambda x: x}, {"kv_options": object()}])
def check_wrong_options(options):
    with pytest.raises(ValueError, match="wrong"):
        kv.get_kv_variable(**{"name": "wrong", "embedding_dim": 4, **options})


def check_wrong_lookups():
    variable, ids = user(), tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
    with pytest.raises(ValueError, match="float32"):
        kv.embedding_lookup(variable, tf.constant([1.5]))
    with pytest.raises(ValueError, match="string"):
        kv.embedding_lookup(variable, ["a"])
    with pytest.raises(ValueError, match="one kv variable"):
        kv.embedding_lookup([variable, variable], [1])
    with pytest.raises(TypeError, match="SparseTensor"):
        kv.embedding_lookup_sparse(variable, [1], None)
    with pytest.raises(TypeError, match="weights"):
        kv.embedding_lookup_sparse(variable, ids, [1.0])
    for look_up in (kv.embedding_lookup_sparse, kv.safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match="combiner='max'"):
            look_up(variable, ids, None, combiner="max")
    with pytest.raises(ValueError, match="no kv variable"):
        kv.table_of(tf.Variable(1.0))


@pytest.mark.parametrize("make", [
    lambda: kv.AdagradOptimizer(0.1, initial_accumulator_value=0.0), lambda: kv.GroupAdamOptimizer(0.1, version=3),
    lambda: kv.GroupAdamOptimizer(0.1, l21_regularization_strength=-1.0),
    lambda: kv.GroupAdamOptimizer(0.1, initial_accumulator_value=-1.0),
    lambda: kv.SparseGroupFtrlOptimizer(0.1, learning_rate_power=-0.6),
    lambda: kv.SparseGroupFtrlOptimizer(0.1, l2_shrinkage_regularization_strength=0.1),
    lambda: kv.SparseGroupFtrlOptimizer(0.1, initial_accumulator_value=0.0),
    lambda: kv.SparseGroupFtrlOptimizer(0.1, l21_regularization_strength=-0.1),
    lambda: hvd.DistributedOptimizer(kv.AdamOptimizer())])
def check_wrong_optimizers(make):
    with pytest.raises(ValueError):
        make()


def check_an_optimizer_of_tensorflow_is_refused(graph):
    variable = user()
    ids, _, loss = weighted(variable)
    kv.AdamOptimizer(name="first").minimize(loss)
    with pytest.raises(ValueError, match="has the optimizer"):
        kv.AdagradOptimizer(0.1).minimize(loss)

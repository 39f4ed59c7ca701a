"""Embeddings by id for TensorFlow, on ranks: in eager mode and in a tf.function, rows are what one process with all the
data would have, and what lightcc.torch.embedding has by the same rules."""
import embedding_oracles as oracles
import numpy as np
import pytest
import tensorflow as tf
from embedding_steps import DIM, KEYS, mine, trained_oracle

import lightcc.tensorflow as hvd
import ranks
from lightcc.embedding import exchange, kernels, load, save
from lightcc.tensorflow import embedding as E

pytestmark = pytest.mark.usefixtures("job")
STEPS = 12
RULES = {"SGD": (E.SGD, oracles.SGD(), {}), "Adagrad": (E.Adagrad, oracles.Adagrad(), {}),
         "Adagrad of rows": (E.Adagrad, oracles.Adagrad(rowwise=True), {"rowwise": True}),
         "LazyAdam": (E.LazyAdam, oracles.LazyAdam(), {}), "SparseAdam": (E.SparseAdam, oracles.SparseAdam(), {}),
         "GroupAdagrad": (E.GroupAdagrad, oracles.GroupAdagrad(l21=0.01), {"l21": 0.01}),
         "GroupAdam": (E.GroupAdam, oracles.GroupAdam(l1=0.1), {"l1": 0.1})}


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_one_thread_of_tensorflow_suffices():
    """A lookup that waited in it would hold up the dense reductions that other ranks wait for."""
    ranks.run_checks(__file__, 2, only="dense_reductions", TF_NUM_INTEROP_THREADS="1")


KILLED = """
import os, signal, sys, time
import tensorflow as tf
import lightcc.tensorflow as hvd
from lightcc.tensorflow import embedding as E
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the ranks that are left, which want to tell first
hvd.init()
user = E.HashEmbedding(4, "user")
step = tf.function(lambda ids: user(ids))
ids = tf.range(100)
step(ids)
open(os.path.join(sys.argv[1], str(hvd.rank())), "w").close()
if hvd.rank() == 1:
    while len(os.listdir(sys.argv[1])) < 3:  # the others are behind the first step
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    step(ids)
except tf.errors.UnknownError as error:
    assert "LightccEmbeddingLookup on rank" in str(error) and "rank 1" in str(error), str(error)
    try:
        user(ids)
    except hvd.HorovodInternalError as error:
        assert isinstance(error, tf.errors.UnknownError), repr(error)
        print("told", flush=True)
"""


def test_a_rank_killed_in_a_lookup_ends_that_of_the_others(tmp_path):
    code, output = ranks.launch(3, ["-c", KILLED, str(tmp_path)], ranks.DEADLINE_S)
    assert code != 0 and output.count("told") == 2, output


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def compiled(request):
    """Makes a function one of TensorFlow's, or leaves it."""
    return in_graph if request.param else at_once


def in_graph(function):
    return tf.function(function, reduce_retracing=True)


def at_once(function):
    return function


def embedding(name, **options):
    return E.HashEmbedding(DIM, name, **{"dtype": tf.float64, "init": E.Normal(0, 1), **options})


def read(module, keys=KEYS):
    return module(np.array(list(keys)), training=False).numpy()


def rows(module):
    """Of all ranks."""
    return int(hvd.allreduce(tf.constant(len(module)), op=hvd.Sum))


def step_of(module, optimizer):
    """A step in which each id's row gets a gradient."""
    def step(ids, gradients):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(module(ids) * gradients)
        grads = tape.gradient(loss, module.trainable_variables)
        optimizer.apply_gradients(zip(grads, module.trainable_variables))
        return loss
    return step


# Training

def check_steps_in_a_function():
    train("SparseAdam", in_graph)


@pytest.mark.parametrize("rule", RULES)
def check_each_rule(rule):
    train(rule, at_once)


def train(rule, compiled):
    kind, oracle, options = RULES[rule]
    user = embedding("rules")
    first = read(user)
    step = compiled(step_of(user, kind(0.05, **options)))
    for i in range(STEPS):
        step(*map(tf.constant, mine(i)[0]))
    expected = trained_oracle(first, oracle, STEPS, 0.05)
    np.testing.assert_allclose(read(user), expected.read(KEYS), rtol=1e-9, atol=1e-12)
    assert rows(user) == len(expected.rows) and user.stats()["steps"] == STEPS


def check_sums_of_ranks(compiled):
    user = embedding("sum", init=E.Zeros())
    compiled(step_of(user, E.SGD(1.0, op=hvd.Sum)))(tf.constant([3, 3]), tf.ones([2, DIM], tf.float64))
    assert (read(user, [3]) == -2 * hvd.size()).all() and (read(user, [4]) == 0).all()


def check_a_learning_rate_may_be_set_or_scheduled(compiled):
    user, optimizer = embedding("rate", init=E.Zeros()), E.SGD(1.0)
    step = compiled(step_of(user, optimizer))
    for rate in (1.0, 0.25):
        optimizer.learning_rate = rate
        step(tf.constant([3]), tf.ones([1, DIM], tf.float64))
    assert (read(user, [3]) == -1.25).all() and optimizer.learning_rate.numpy() == 0.25
    user, optimizer = embedding("schedule", init=E.Zeros()), E.SGD(lambda step: 1.0 / (1.0 + tf.cast(step, tf.float64)))
    step = compiled(step_of(user, optimizer))
    for _ in range(2):
        step(tf.constant([3]), tf.ones([1, DIM], tf.float64))
    assert (read(user, [3]) == -1.5).all() and optimizer.iterations.numpy() == 2
    with pytest.raises(ValueError, match="schedule"):
        optimizer.learning_rate = 1.0


def check_lookups_of_a_step_are_added_up(compiled):
    """The same module twice, in one exchange and in two."""
    user, optimizer = embedding("twice", init=E.Zeros()), E.SGD(1.0)

    def step(a, b, c):
        with tf.GradientTape() as tape:
            of_a, of_b = E.lookup([(user, a), (user, b)])
            loss = tf.reduce_sum(of_a) + 2 * tf.reduce_sum(of_b) + 4 * tf.reduce_sum(user(c))
        optimizer.apply_gradients(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))
        return of_b

    assert compiled(step)(tf.constant([1, 2]), tf.constant([[2, 3, 3]]), tf.constant([3])).shape == (1, 3, DIM)
    assert read(user, [1, 2, 3, 4])[:, 0].tolist() == [-1, -3, -8, 0]


def check_a_rank_without_ids_takes_part(compiled):
    user = embedding("none here", init=E.Zeros())
    ids = tf.constant([7] if hvd.rank() == 0 else [], tf.int64)
    compiled(step_of(user, E.SGD(1.0, op=hvd.Sum)))(ids, tf.ones([len(ids), DIM], tf.float64))
    assert (read(user, [7]) == -1).all() and rows(user) == 1


def check_a_tape_around_a_function():
    user = embedding("around", init=E.Zeros())
    look_up = tf.function(lambda ids: user(ids))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(look_up(tf.constant([1, 1, 2])))
    optimizer = E.SGD(1.0)
    optimizer.apply_gradients(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))
    assert read(user, [1, 2])[:, 0].tolist() == [-2, -1]


def check_dense_reductions_beside_lookups(compiled):
    user, weights = embedding("beside", init=E.Constant(1.0)), [tf.Variable(tf.ones(DIM, tf.float64)) for _ in range(8)]
    optimizer = E.SGD(1.0)

    def whole(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user(ids) * tf.add_n([weight.read_value() for weight in weights]))
        grads = tape.gradient(loss, [*weights, *user.trainable_variables])
        reduced = [hvd.allreduce(grad, op=hvd.Average) for grad in grads[:-1]]
        optimizer.apply_gradients([(grads[-1], user.trainable_variables[0])])
        for grad, weight in zip(reduced, weights):
            weight.assign_sub(0.01 * grad)
        return loss

    run = compiled(whole)
    for _ in range(3):
        run(tf.constant([1, 2, 3]) + hvd.rank())
    every = hvd.allgather(tf.stack(weights)[tf.newaxis])
    assert (every == every[0]).numpy().all() and user.stats()["steps"] == 3


# Exchanges and shapes

def check_several_tables_travel_together():
    user, item = embedding("one", dtype=tf.float32), embedding("two")
    before = E.calls()
    users, items = E.lookup([(user, [1, 2]), (item, [[5], [6]])])
    assert E.calls() == before + 1
    assert users.shape == (2, DIM) and items.shape == (2, 1, DIM)
    assert users.dtype == tf.float32 and items.dtype == tf.float64
    assert np.array_equal(items.numpy()[:, 0], read(item, [5, 6]))


def check_rows_are_where_tensorflow_need_not_copy_them():
    user = embedding("aligned")
    found, = exchange.Lookup([(user.table, exchange.Keys(np.arange(1000)))], training=False, prefetch=False).finish()
    assert found.rows.ctypes.data % 64 == 0


def check_kinds_and_shapes_of_ids():
    user = embedding("kinds")
    expected = read(user, [[1, 2], [2, 1]])
    for dtype in (np.int64, np.int32, np.uint8, np.uint16):
        assert np.array_equal(user(np.array([[1, 2], [2, 1]], dtype), training=False), expected)
    assert np.array_equal(user(np.array([2 ** 64 - 1], np.uint64), training=False), read(user, [-1]))
    assert user(tf.zeros([2, 0, 3], tf.int64)).shape == (2, 0, 3, DIM) and user(7).shape == (DIM,)


def check_strings(compiled):
    words = embedding("words", strings=True, init=E.Zeros())
    texts = ["a", "", "b" * 100, "a", "23 bytes are the limit.", "24 bytes are beyond it.."]
    compiled(step_of(words, E.SGD(1.0)))(tf.constant(texts), tf.ones([len(texts), DIM], tf.float64))
    assert words(tf.constant([*texts, "c"]), training=False).numpy()[:, 0].tolist() == [-2, -1, -1, -2, -1, -1, 0]
    flat, offsets = "".join(texts).encode(), np.cumsum([0, *map(len, texts)])
    expected = kernels.hashed(flat, offsets)
    from lightcc.tensorflow.embedding.keys import keys_of
    keys, checks = keys_of(tf.constant(texts), words.table)
    assert np.array_equal(keys, expected[0]) and np.array_equal(checks.numpy().view(np.uint32), expected[1])


def check_traces_are_bounded_by_size_classes():
    user, traces = embedding("traces"), []

    @tf.function
    def dense(values):
        traces.append(values.shape[0])
        return tf.reduce_sum(values)

    from lightcc.tensorflow.embedding import keys, leaf
    for size in np.random.default_rng(0).integers(1, 700, 1000):
        ids = keys.keys_of(tf.range(int(size)), user.table)
        dense(leaf.look_up([(user.leaf, ids)], False)[0].values)
    assert set(traces) <= {2 ** k for k in range(11)} | {3 * 2 ** k for k in range(9)} and len(traces) <= 20


def check_evaluation_inserts_nothing(compiled):
    user = embedding("evaluation")
    compiled(lambda ids: user(ids, training=False))(tf.constant(KEYS))
    user(tf.constant(KEYS))
    assert rows(user) == 0


def check_tables_are_saved_and_loaded(tmp_path, job):
    user, words = embedding("saved"), embedding("saved words", strings=True)
    optimizer = E.SparseAdam(0.1)
    variables = [*user.trainable_variables, *words.trainable_variables]

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user(ids) ** 2) + tf.reduce_sum(words(tf.strings.as_string(ids)) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    model = tf.Module()
    model.parts = [user, words]
    assert E.tables(model) == [user.table, words.table]
    step(tf.range(20))
    folder = job.broadcast_object(str(tmp_path / "tables"))
    save(folder, E.tables(model))
    step(tf.range(30))
    expected = rows_now(user, words)
    load(folder, E.tables(model))
    step(tf.range(30))
    np.testing.assert_array_equal(rows_now(user, words), expected)


def rows_now(user, words):
    return np.concatenate([read(user, range(40)), words(tf.strings.as_string(tf.range(40)), training=False)])


# Another world

def check_a_function_runs_on_after_the_world_was_left():
    user, optimizer = embedding("worlds", init=E.Zeros()), E.SGD(1.0)
    step = tf.function(step_of(user, optimizer))
    step(tf.constant([3]), tf.ones([1, DIM], tf.float64))
    hvd.shutdown()
    hvd.init()
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"world that was left.*table\.enter\(\)"):
        step(tf.constant([3]), tf.ones([1, DIM], tf.float64))
    user.table.enter()
    step(tf.constant([3]), tf.ones([1, DIM], tf.float64))
    assert (read(user, [3]) == -2).all()


def check_a_closed_table():
    user = embedding("closed")
    look_up = tf.function(lambda ids: user(ids))
    look_up(tf.constant([3]))
    user.table.close()
    with pytest.raises(tf.errors.FailedPreconditionError, match="closed"):
        look_up(tf.constant([3]))


# Bad input

@pytest.mark.parametrize("ids, text", [
    (np.array([1.5]), "float64"), (np.array([True]), "bool"), (["a"], "for integers"), ([[1], [2, 3]], "no tensor"),
    ([{"id": 1}], "no tensor")])
def check_wrong_ids(ids, text):
    user = embedding("wrong ids")
    with pytest.raises(ValueError, match="'wrong ids'") as raised:
        user(ids)
    assert text in str(raised.value)
    with pytest.raises(ValueError, match="for strings"):
        embedding("wrong strings", strings=True)([1])


def check_a_function_for_xla_is_refused():
    user = embedding("xla")
    with pytest.raises((tf.errors.UnimplementedError, tf.errors.InvalidArgumentError), match="XLA cannot compile"):
        tf.function(lambda ids: user(ids), jit_compile=True)(tf.constant([1]))


def check_lookups_without_an_update_are_forgotten():
    user, optimizer = embedding("forgotten", init=E.Zeros()), E.SGD(1.0)
    variable, = user.trainable_variables
    grads = []
    for _ in range(65):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user([1]))
        grads.append(tape.gradient(loss, variable))
    with pytest.raises(tf.errors.FailedPreconditionError, match="64 training lookups"):
        optimizer.apply_gradients([(grads[0], variable)])
    optimizer.apply_gradients([(grads[1], variable)])
    assert (read(user, [1]) == -1).all()


def check_wrong_gradients():
    user, optimizer = embedding("wrong gradients"), E.SGD(1.0)
    variable, = user.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(user([1, 2]))
    grad = tape.gradient(loss, variable)
    with pytest.raises(ValueError, match="IndexedSlices"):
        optimizer.apply_gradients([(tf.zeros([0, DIM], tf.float64), variable)])
    with pytest.raises(ValueError, match="give it to another optimizer"):
        optimizer.apply_gradients([(None, tf.Variable(1.0))])
    with pytest.raises(tf.errors.InvalidArgumentError, match="part of a lookup"):
        optimizer.apply_gradients([(tf.IndexedSlices(grad.values[:1], grad.indices[:1]), variable)])
    optimizer.apply_gradients([(grad, variable)])
    with pytest.raises(tf.errors.FailedPreconditionError, match="updated already"):
        optimizer.apply_gradients([(grad, variable)])
    with pytest.raises(ValueError, match="has the optimizer"):
        E.Adagrad().apply_gradients([(grad, variable)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(user([1, 2], training=False))
    with pytest.raises(tf.errors.FailedPreconditionError, match="not for training"):
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])


def check_gradients_of_other_ranks_are_refused(job):
    """A DistributedGradientTape has gathered them."""
    user = embedding("gathered")
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(user([1, 2]))
    grad = tape.gradient(loss, user.trainable_variables)[0]
    if job.size() > 1:
        with pytest.raises(tf.errors.FailedPreconditionError, match="leave tables out of DistributedGradientTape"):
            E.SGD(1.0).apply_gradients([(grad, user.trainable_variables[0])])


def check_gradients_that_are_not_finite(compiled):
    user = embedding("nan", init=E.Zeros())
    step = compiled(step_of(user, E.SGD(1.0)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="'nan'.*key 5"):
        step(tf.constant([5]), tf.fill([1, DIM], tf.constant(np.nan if hvd.rank() == 0 else 1.0, tf.float64)))
    assert rows(user) == 0
    step(tf.constant([5]), tf.ones([1, DIM], tf.float64))
    assert (read(user, [5]) == -1).all()


def check_options_that_are_wrong():
    for make in (lambda: E.SGD(-1.0), lambda: E.LazyAdam(beta_1=1.0), lambda: E.SGD(op=hvd.Max),
                 lambda: E.GroupAdagrad(initial_accumulator_value=0.0)):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(TypeError, match="evict='oldest'"):
        embedding("wrong", evict="oldest")


def check_a_strategy_is_refused():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        with pytest.raises(ValueError, match="OneDeviceStrategy"):
            embedding("strategy")

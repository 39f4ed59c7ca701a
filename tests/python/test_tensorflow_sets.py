"""The allreduces of one set of gradients say so, and training goes on as in one process whatever part of them comes.

A set is what one call of a tape's or optimizer's reduction puts into a graph (core/request.py). From the fourth
step on the core may hold each until others of the set have come, so checks train for longer.
"""
import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc.core import lib
from lightcc.core.request import new_set
from lightcc.tensorflow import gradient_reducer
from lightcc.tensorflow.mpi_ops import MPI_LIB

pytestmark = pytest.mark.usefixtures("job")
v1 = tf.compat.v1
LAYERS, WIDTH, SAMPLES, STEPS = 8, 4, 6, 9
KINDS = ("HorovodAllreduce", "HorovodGroupedAllreduce")


@pytest.mark.parametrize("np", (2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_keras_checks_with_tf_keras(monkeypatch):
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
        ranks.run_checks(__file__, 2, only="keras")


@pytest.fixture(autouse=True)
def other_numbers_on_each_rank(job):
    for _ in range(job.rank()):
        new_set()


def sets(graph):
    """The numbers of all allreduces of a graph and of the functions in it."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [node.attr["set"].i for node in nodes if node.op in KINDS]


def sets_of(function, *arguments):
    return sets(tf.function(function).get_concrete_function(*arguments).graph)


def expect_one(numbers, count):
    assert len(numbers) == count and len(set(numbers)) == 1 and numbers[0] > 0, numbers


# Which have a number

def reduced(variables, **options):
    with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
        loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
    return tape.gradient(loss, variables)


def check_gradients_of_a_call_are_a_set():
    variables = [tf.Variable(tf.ones(i + 1)) for i in range(12)]
    first = sets_of(lambda: reduced(variables))
    expect_one(first, 12)
    second = sets_of(lambda: reduced(variables))
    expect_one(second, 12)
    assert first[0] != second[0]
    expect_one(sets_of(lambda: reduced(variables, groups=3)), 3)
    expect_one(sets_of(lambda: reduced(variables, groups=[variables[:5]], compression=hvd.Compression.fp16)), 8)
    both = sets_of(lambda: (reduced(variables), reduced(variables)))
    assert len(both) == 24 and sorted(map(both.count, set(both))) == [12, 12] and 0 not in both


def check_what_travels_alone_or_sparse_is_in_none():
    table, *others = [tf.Variable(tf.ones((3, 2))) for _ in range(3)]

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table, [1])) + tf.add_n([tf.reduce_sum(other) for other in others])
        return tape.gradient(loss, [table, *others])

    expect_one(sets_of(step), 2)
    assert sets_of(lambda: reduced([table])) == [0]
    assert sets_of(lambda: reduced(others, groups=1)) == [0]
    assert sets_of(lambda: [hvd.allreduce(tf.ones(2)), *hvd.grouped_allreduce([tf.ones(2), tf.ones(3)])]) == [0, 0]
    normalize = hvd.SyncBatchNormalization()
    normalize.build((None, 2))
    assert set(sets_of(lambda: normalize(tf.ones((4, 2)), training=True))) == {0}


def check_eagerly_there_are_none(monkeypatch):
    monkeypatch.setattr(gradient_reducer, "new_set", lambda: pytest.fail("a set"))
    reduced([tf.Variable(tf.ones(i + 1)) for i in range(12)])


def check_optimizers():
    with tf.Graph().as_default() as graph:
        variables = [v1.Variable(tf.ones(i + 1), use_resource=True) for i in range(12)]
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        optimizer.minimize(tf.add_n([tf.reduce_sum(variable) for variable in variables]))
    expect_one(sets(graph), 12)


def check_optimizers_of_keras(kit, family):
    variables = [kit.variable(np.ones(i + 1)) for i in range(12)]
    optimizer = kit.hvd.DistributedOptimizer(family.SGD(1.0))
    kit.build(optimizer, variables)
    step = kit.function_of(optimizer, variables)
    expect_one(sets(step.get_concrete_function(*(kit.tensor(np.ones(i + 1)) for i in range(12))).graph), 12)


@pytest.mark.parametrize("number", (-1, 1 << 27, 1 << 40))
def check_numbers_that_are_refused(number):
    with pytest.raises(tf.errors.InvalidArgumentError, match="set is .*not 0 to 134217727"):
        MPI_LIB.horovod_allreduce(tf.ones(3), tf.constant(0), tensor_name="x", reduce_op=hvd.Sum, set=number)


# Training

def make_variables(**options):
    """Of a chain of layers, whose gradients come one after the other."""
    random = np.random.RandomState(3)
    return [tf.Variable(random.standard_normal(shape).astype(np.float32), **options)
            for _ in range(LAYERS) for shape in ((WIDTH, WIDTH), (WIDTH,))]


def loss_of(variables, x):
    for weight, bias in zip(variables[::2], variables[1::2]):
        x = tf.tanh(x @ weight + bias)
    return tf.reduce_mean(x * x)


def data(step, everything=False):
    of_all = np.random.RandomState(step).standard_normal((hvd.size(), SAMPLES, WIDTH)).astype(np.float32)
    return tf.constant(of_all.reshape(-1, WIDTH) if everything else of_all[hvd.rank()])


def update(variables, grads):
    for variable, grad in zip(variables, grads):
        if grad is not None:
            variable.assign_sub(0.1 * grad)


def step_of(variables, x, wrap=hvd.DistributedGradientTape, sources=None):
    """A step of gradient descent for the sources, which are all variables unless given."""
    with wrap(tf.GradientTape()) as tape:
        loss = loss_of(variables, x)
    sources = variables if sources is None else sources
    update(sources, tape.gradient(loss, sources))


def expect_trained_alone(variables, sources_of=lambda variables, step: variables, steps=STEPS):
    """As one process trains with the data of all, whichever variables are trained in which step; and alike to the last
    bit on all ranks."""
    reference = make_variables()
    for step in range(steps):
        step_of(reference, data(step, True), lambda tape: tape, sources_of(reference, step))
    values = [variable if isinstance(variable, np.ndarray) else variable.numpy() for variable in variables]
    for mine, expected in zip(values, reference):
        np.testing.assert_allclose(mine, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert len(set(hvd.allgather_object(b"".join(value.tobytes() for value in values)))) == 1


@pytest.mark.parametrize("groups", (None, 5))
def check_training(groups):
    variables = make_variables()

    @tf.function
    def train(x):
        step_of(variables, x, lambda tape: hvd.DistributedGradientTape(tape, groups=groups))

    for step in range(STEPS):
        train(data(step))
    expect_trained_alone(variables)


def check_a_function_that_is_traced_again():
    variables = make_variables()
    for step in range(2 * STEPS):
        if step % STEPS == 0:
            train = tf.function(lambda x: step_of(variables, x))
        train(data(step))
    expect_trained_alone(variables, steps=2 * STEPS)


def check_two_tapes():
    """Each sends gradients of all variables, at the same time."""
    variables = make_variables()

    @tf.function
    def train(x):
        grads = []
        for part in (x[::2], x[1::2]):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = loss_of(variables, part) / 2
            grads.append(tape.gradient(loss, variables))
        update(variables, [a + b for a, b in zip(*grads)])

    for step in range(STEPS):
        train(data(step))
    expect_trained_alone(variables)


@pytest.mark.parametrize("turns", (2, 40))
def check_steps_in_a_loop(turns):
    variables = make_variables()
    mine = tf.stack([data(step) for step in range(turns)])

    @tf.function
    def train():
        for step in tf.range(turns):
            step_of(variables, mine[step])

    for _ in range(2):
        train()
    reference = make_variables()
    for step in range(2 * turns):
        step_of(reference, data(step % turns, True), lambda tape: tape)
    for trained, expected in zip(variables, reference):
        np.testing.assert_allclose(trained.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


def check_a_function_that_is_called_twice():
    """So a set comes twice in each run of a graph."""
    variables = make_variables()
    inner = tf.function(lambda x: step_of(variables, x), autograph=False)

    @tf.function
    def train(x, y):
        inner(x)
        inner(y)

    for step in range(0, 2 * STEPS, 2):
        train(data(step), data(step + 1))
    expect_trained_alone(variables, steps=2 * STEPS)


@pytest.mark.parametrize("options", ({}, {"steps_per_execution": 3}), ids=("steps", "steps_per_execution"))
def check_keras_fit(kit, family, options):
    plain = kit.model(family.SGD(0.1), depth=6)
    kit.fit_all(plain, epochs=4)
    model = kit.model(kit.hvd.DistributedOptimizer(family.SGD(0.1)), depth=6, **options)
    kit.fit_mine(model, epochs=4)
    kit.expect_equal_weights(model, plain)


# Where not all of a set come in each step

def some(variables, step):
    """All but one in the middle, in every third step from the fifth on."""
    return [v for i, v in enumerate(variables) if not skips(step) or i != len(variables) // 2]


def skips(step):
    return step >= 5 and step % 3 == 2


def check_a_branch_without_one_gradient():
    """Each branch is a set; the names are the same."""
    variables = make_variables()

    @tf.function
    def train(x, skip):
        if skip:
            step_of(variables, x, sources=some(variables, 5))
        else:
            step_of(variables, x)

    for step in range(2 * STEPS):
        train(data(step), tf.constant(skips(step)))
    expect_trained_alone(variables, some, 2 * STEPS)


class Session:
    """A v1 session that is fed the variables and fetches gradients. reduce: from those in the graph, and what is true
    in steps that skip one."""

    def __init__(self, reduce=lambda grads, skip: reduced_in_graph(grads)):
        self.variables = make_variables()
        with tf.Graph().as_default() as graph:
            self.x = v1.placeholder(tf.float32, [None, WIDTH])
            self.skip = v1.placeholder(tf.bool, [])
            self.values = [v1.placeholder(tf.float32, variable.shape) for variable in self.variables]
            grads = v1.gradients(loss_of(self.values, self.x), self.values)
            self.grads = reduce(grads, self.skip)
        expect_one(sets(graph), len(self.grads))
        self.session = v1.Session(graph=graph)

    def run(self, step, places):
        """Trains the variables at these places; returns how many requests that took."""
        before = lib.counters()["requests"]
        feeds = dict(zip(self.values, [variable.numpy() for variable in self.variables]))
        feeds.update({self.x: data(step).numpy(), self.skip: skips(step)})
        update([self.variables[i] for i in places], self.session.run([self.grads[i] for i in places], feeds))
        return lib.counters()["requests"] - before


def reduced_in_graph(grads):
    return gradient_reducer._make_allreduce_grads_fn("Session")(grads)


def check_a_session_that_fetches_some():
    training, everything = Session(), list(range(2 * LAYERS))
    for step in range(2 * STEPS):
        assert training.run(step, some(everything, step)) == 2 * LAYERS - skips(step)
    expect_trained_alone(training.variables, some, 2 * STEPS)


def check_a_session_that_fetches_one():
    """In the end it fetches one after the other."""
    training = Session()
    for step in range(STEPS):
        training.run(step, range(2 * LAYERS))
    for step in range(STEPS, STEPS + 2 * LAYERS):
        training.run(step, [step - STEPS])
    expect_trained_alone(training.variables, lambda variables, step: variables if step < STEPS else
                         variables[step - STEPS:step - STEPS + 1], STEPS + 2 * LAYERS)


def check_an_operation_that_does_not_run():
    """As in the branch of a tf.cond that is not taken: what is made of a switch's other output is dead."""
    place = LAYERS

    def reduce(grads, skip):
        off, on = tf.raw_ops.Switch(data=grads[place], pred=skip)
        results = reduced_in_graph([off if i == place else grad for i, grad in enumerate(grads)])
        results[place] = tf.raw_ops.Merge(inputs=[results[place], v1.zeros_like(on, optimize=False)])[0]
        return results

    training = Session(reduce)
    for step in range(2 * STEPS):
        assert training.run(step, range(2 * LAYERS)) == 2 * LAYERS - skips(step)
    expect_trained_alone(training.variables, some, 2 * STEPS)

"""DistributedGradientTape, eagerly and in a tf.function."""
import functools
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_training import (
    MODES,
    SAMPLES,
    average,
    data,
    expect_close,
    factor,
    gradient,
    gradients_of,
    loss_of,
    make_variables,
    mine,
)

import lightcc.tensorflow as hvd
import ranks
from lightcc.core import lib

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request):
    return request.param


def counted(name, action):
    """How much the action adds to a counter."""
    before = lib.counters()[name]
    action()
    return lib.counters()[name] - before


# What it returns

def check_gradients_are_those_of_the_global_batch(mode):
    variables = make_variables()
    for options in ({}, {"sparse_as_dense": True}, {"groups": 2}, {"groups": [variables[1:]]},
                    {"gradient_predivide_factor": 3.0}, {"gradient_predivide_factor": float(hvd.size())}):
        for step in range(2):
            got = gradient(mode, lambda step=step: loss_of(variables, *mine(step)), variables, **options)
            expect_close(got, gradients_of(step, variables))
            assert isinstance(got[0], tf.IndexedSlices) != options.get("sparse_as_dense", False)


def check_training_equals_one_process(mode):
    variables, reference = make_variables(), make_variables()

    @mode
    def train(words, targets):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, words, targets)
        for reduced, variable in zip(tape.gradient(loss, variables), variables):
            variable.assign_sub(0.1 * tf.convert_to_tensor(reduced))

    for step in range(5):
        train(*map(tf.constant, mine(step)))
        for expected, variable in zip(gradients_of(step, reference), reference):
            variable.assign_sub(0.1 * expected)
    expect_close(variables, [variable.numpy() for variable in reference])
    assert hvd.allgather_object([v.numpy().tobytes() for v in variables]).count(
        [v.numpy().tobytes() for v in variables]) == hvd.size()


def check_structures_of_sources(mode):
    x, y = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    got = gradient(mode, lambda: factor() * (tf.reduce_sum(x * x) + y), {"b": [y], "a": (x,)})
    assert set(got) == {"a", "b"} and isinstance(got["a"], tuple) and isinstance(got["b"], list)
    expect_close([got["a"][0], got["b"][0]], [average() * np.array([2, 4]), average()])
    assert not isinstance(gradient(mode, lambda: x * x, x), list)


def check_sources_without_gradient(mode):
    x, unused = tf.Variable(1.0), tf.Variable([1.0, 1.0])
    for options in ({}, {"groups": 1}, {"groups": [[unused, x]]}):
        got = gradient(mode, lambda: factor() * x, [unused, x], **options)
        assert got[0] is None
        expect_close(got[1:], [average()])
    assert gradient(mode, lambda: factor() * x, [unused]) == [None]

    @mode
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = factor() * x
        return tape.gradient(loss, [unused, x], output_gradients=tf.constant(2.0),
                             unconnected_gradients=tf.UnconnectedGradients.ZERO)
    expect_close(step(), [np.zeros(2), 2 * average()])


def check_arguments_of_gradient(mode):
    """Horovod's, by name and by place, and the tape's own fourth one."""
    x, unused = tf.Variable(1.0), tf.Variable(1.0)

    def step(*args, **kwargs):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = factor() * x
        return tape.gradient(loss, [x, unused], *args, **kwargs)

    for args, kwargs in (((), {"use_generic_names": True}), ((None, True), {}), ((None, False), {})):
        got = mode(functools.partial(step, *args, **kwargs))()
        assert got.pop() is None
        expect_close(got, [average()])
    expect_close(mode(lambda: step(None, tf.UnconnectedGradients.ZERO))(), [average(), 0.0])


def check_sources_that_are_no_variables(mode):
    x = tf.constant([1.0, 2.0])

    @mode
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = factor() * x * x
        return tape.gradient(loss, x)
    expect_close([step()], [average() * np.array([2, 4])])


@pytest.mark.parametrize("op, expected", [
    (hvd.Sum, lambda n: n * (n + 1) / 2), (hvd.Min, lambda n: 1.0), (hvd.Max, lambda n: n),
    (hvd.Product, lambda n: np.prod(np.arange(1.0, n + 1))), (hvd.Average, lambda n: (n + 1) / 2)],
    ids=["sum", "min", "max", "product", "average"])
def check_ops(mode, op, expected):
    x, y = tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    for options in ({}, {"groups": 1}):
        got = gradient(mode, lambda: factor() * (tf.reduce_sum(x) + y), [x, y], op=op, **options)
        expect_close(got, [[expected(hvd.size())] * 2, expected(hvd.size())])


def check_adasum(mode):
    """Of each gradient for itself: what all ranks have alike stays, what is orthogonal is added up."""
    alike, apart = tf.Variable([2.0, 2.0]), tf.Variable(tf.ones(hvd.size()))
    for options in ({}, {"groups": 1}):
        got = gradient(mode, lambda: tf.reduce_sum(alike) + factor() * apart[hvd.rank()], [alike, apart], op=hvd.Adasum,
                       sparse_as_dense=True, **options)
        expect_close(got, [[1, 1], np.arange(1.0, hvd.size() + 1)])


def check_compression(mode):
    x = tf.Variable(1.0)
    exact, rounded = (gradient(mode, lambda: x / 3, x, compression=compression).numpy()
                      for compression in (hvd.Compression.none, hvd.Compression.fp16))
    assert rounded.dtype == np.float32 and exact == np.float32(1 / 3)
    assert rounded == np.float16(1 / 3) or hvd.size() == 1  # alone nothing travels


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def check_dtypes(mode, dtype):
    x, y = tf.Variable(tf.ones(3, dtype)), tf.Variable(1.0)
    got = gradient(mode, lambda: tf.cast(tf.reduce_sum(factor() * x), tf.float32) + y, [x, y])
    assert got[0].dtype == dtype
    expect_close([tf.cast(got[0], tf.float64), got[1]], [[average()] * 3, 1], 1e-2)


def check_process_set(mode):
    x = tf.Variable(1.0)
    some = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 1 else hvd.global_process_set
    try:
        got = gradient(mode, lambda: factor() * x, x, process_set=some).numpy()
        assert got == (np.mean([rank + 1 for rank in some.ranks]) if some.included() else factor())
    finally:
        hvd.remove_process_set(some)


# How it is made

def check_wrapped_before_while_and_after_it_records(mode):
    x = tf.Variable(3.0)

    @mode
    def step():
        before = hvd.DistributedGradientTape(tf.GradientTape())
        with before:
            loss = factor() * x * x
        with tf.GradientTape() as plain:
            during = hvd.DistributedGradientTape(plain)
            loss_during = factor() * x * x
        with tf.GradientTape() as after:
            loss_after = factor() * x * x
        after = hvd.DistributedGradientTape(after)
        return before.gradient(loss, x), during.gradient(loss_during, x), after.gradient(loss_after, x)
    expect_close(step(), [6 * average()] * 3)


def check_it_is_a_tape():
    class Tape(tf.GradientTape):
        """A script's own."""

    plain = Tape(persistent=True, watch_accessed_variables=False)
    tape = hvd.DistributedGradientTape(plain)
    assert isinstance(tape, Tape) and type(tape).__bases__ == (Tape,)
    assert (type(tape).__module__, type(tape).__name__) == ("lightcc.tensorflow", "Tape")
    x, y = tf.Variable(2.0), tf.Variable(2.0)
    with tape:
        tape.watch(x)
        loss = factor() * x ** 3 * y
    assert tape.watched_variables() == (x,)
    for _ in range(2):  # persistent
        expect_close([tape.gradient(loss, x)], [24 * average()])
    assert tape.gradient(loss, y) is None
    expect_close([plain.gradient(loss, x)], [24 * factor()])
    assert type(hvd.DistributedGradientTape(tf.GradientTape())).__name__ == "GradientTape"
    with pytest.raises(RuntimeError, match="non-persistent"):
        once = hvd.DistributedGradientTape(tf.GradientTape())
        with once:
            loss = x * x
        for _ in range(2):
            once.gradient(loss, x)


def check_second_derivatives(mode):
    x = tf.Variable(2.0)

    @mode
    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = factor() * x ** 3
            first = hvd.DistributedGradientTape(inner).gradient(loss, x)
        return first, outer.gradient(first, x)
    expect_close(step(), [12 * average(), 12 * factor()])  # of the average by this rank's x, summed over the ranks


def check_a_tape_is_gone_when_dropped():
    x = tf.Variable(2.0)
    gc.collect()
    gc.disable()
    try:
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        with tape:
            loss = x * x
        tape.gradient(loss, x)
        gone = weakref.ref(tape)
        del tape
        assert gone() is None
    finally:
        gc.enable()


def check_one_class_for_all_tapes():
    """Scripts wrap a tape in each step; classes would pile up."""
    assert len({type(hvd.DistributedGradientTape(tf.GradientTape())) for _ in range(3)}) == 1


def check_two_tapes_in_one_function():
    """As in adversarial training. Their gradients have equal places but other shapes."""
    x, y = tf.Variable([1.0, 2.0]), tf.Variable(3.0)

    @tf.function
    def step():
        results = []
        for variable in (x, y):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = factor() * tf.reduce_sum(variable * variable)
            results.append(tape.gradient(loss, variable))
        return results
    for _ in range(3):
        expect_close(step(), [average() * np.array([2, 4]), 6 * average()])


def check_ranks_whose_graphs_differ_beside_the_exchange():
    """Rank 0 writes summaries, for example. In a branch the graph that runs has names with numbers."""
    x, steps = tf.Variable(1.0), tf.Variable(0)

    @tf.function
    def step():
        if hvd.rank() == 0:
            for _ in range(2):
                tf.cond(steps > 100, lambda: steps.assign_add(1), lambda: steps.assign(0))
        for _ in tf.range(2):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = factor() * x * x
            x.assign(x + tape.gradient(loss, x))
    step()
    expect_close([x], [(1 + 2 * average()) ** 2])


# How it travels

def check_eager_gradients_travel_in_one_call():
    variables = [tf.Variable(tf.ones(i + 1)) for i in range(20)]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = factor() * sum(map(tf.reduce_sum, variables))
    assert counted("collectives", lambda: tape.gradient(loss, variables)) == (hvd.size() > 1)


def check_groups_are_units():
    """In the graph: one operation a group, one for each gradient that is in none."""
    variables = [tf.Variable(tf.ones(i + 1)) for i in range(5)]

    def operations(groups):
        @tf.function
        def step():
            with hvd.DistributedGradientTape(tf.GradientTape(), groups=groups) as tape:
                loss = sum(map(tf.reduce_sum, variables))
            return tape.gradient(loss, variables)
        nodes = step.get_concrete_function().graph.get_operations()
        return sorted(len(node.outputs) for node in nodes if node.type in ("HorovodAllreduce",
                                                                           "HorovodGroupedAllreduce"))

    alone = hvd.size() == 1
    for groups, units in ((None, [1] * 5), (1, [5]), (2, [2, 3]), (9, [1] * 5), ([], [1] * 5),
                          ([variables[:2], variables[3:]], [1, 2, 2]), ([tuple(variables[1:])], [1, 4])):
        assert operations(groups) == ([] if alone else units)


def check_a_world_of_one_that_may_grow_exchanges(monkeypatch):
    variable = tf.Variable(1.0)

    def exchanged():
        return counted("requests", lambda: gradient(lambda step: step, lambda: 1.0 * variable, variable))

    assert exchanged() == (hvd.size() > 1)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert exchanged() == 1


# Errors

def check_wrong_arguments():
    x, tape = tf.Variable(1.0), tf.GradientTape()
    for wrong in (0, -1, 1.5, "2", (x,), [x], [[1]], {0: []}, [[x], [x]]):
        with pytest.raises(ValueError, match="groups|variable"):
            hvd.DistributedGradientTape(tape, groups=wrong)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tape, num_groups=2)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="not Variable|not ResourceVariable"):
        hvd.DistributedGradientTape(x)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))


def check_sparse_needs_sum_or_average(mode):
    table = tf.Variable(tf.ones((4, 2)))
    if hvd.size() == 1:
        return
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        gradient(mode, lambda: tf.reduce_sum(tf.gather(table, [1])), table, op=hvd.Max)


def check_disagreement_reaches_every_rank_and_the_next_step_works(mode):
    if hvd.size() == 1:
        return
    x = tf.Variable(tf.ones(2 + hvd.rank() % 2))
    with pytest.raises(tf.errors.FailedPreconditionError, match="DistributedGradientTape"):
        gradient(mode, lambda: tf.reduce_sum(x), x)
    y = tf.Variable(1.0)
    expect_close([gradient(mode, lambda: factor() * y, y)], [average()])


def check_samples():
    """The checks above compare with a global batch of this size."""
    assert len(data(0)[0]) == SAMPLES * hvd.size()

"""backward_passes_per_step: the two helpers, eagerly, in a tf.function and in v1 graphs, alone and on ranks."""
from operator import attrgetter

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_training import MODES

import lightcc.tensorflow as hvd
import ranks
from lightcc.core import lib
from lightcc.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    apply_op_to_not_none_tensors,
    get_not_none_from_list,
)
from lightcc.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from lightcc.tensorflow.gradient_reducer import _make_allreduce_grads_fn

pytestmark = pytest.mark.usefixtures("job")
v1 = tf.compat.v1
LEGACY = LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Optimizer:
    """Counts what it is asked for."""

    def __init__(self):
        self.iterations, self.applied = tf.Variable(0), tf.Variable(0)

    def apply(self):
        self.applied.assign_add(1)
        self.iterations.assign_add(1)


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request):
    return request.param


@pytest.fixture(params=["v1", "v2"])
def graph(request):
    """A v1 graph, with the control flow of TensorFlow 1 or 2."""
    if request.param == "v1":
        v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            yield graph
    finally:
        v1.enable_control_flow_v2()


def tenfold(grads, vars):
    """Stands for an exchange."""
    assert len(grads) == len(vars)
    return apply_op_to_not_none_tensors(tf.multiply, grads, 10.0)


def eager_helper(passes=2, allreduce=tenfold, sparse_as_dense=False, average=False, **options):
    return LocalGradientAggregationHelperEager(passes, allreduce, sparse_as_dense, average, **options)


def run_in_session(*fetched):
    session = v1.Session()
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    return lambda: session.run(fetched)


# Alone

def check_last_pass_reduces_sums(mode):
    helper, x, y = eager_helper(3), tf.Variable([0.0, 0.0]), tf.Variable(0.0)
    step = mode(lambda a, b: helper.compute_gradients([a, b], [x, y]))
    for first in (1.0, 5.0):
        for i in range(2):
            got = step(tf.constant([first, i]), tf.constant(2.0))
            assert got[0].numpy().tolist() == [first, i] and got[1].numpy() == 2  # this pass's own
            assert helper.counter.numpy() == i + 1
        got = step(tf.constant([first, 2.0]), tf.constant(2.0))
        assert got[0].numpy().tolist() == [30 * first, 30.0] and got[1].numpy() == 60
        assert helper.counter.numpy() == 0


def check_average(mode):
    helper, x = eager_helper(4, average=True), tf.Variable(0.0)
    step = mode(lambda grad: helper.compute_gradients([grad], [x])[0])
    assert [step(tf.constant(grad)).numpy() for grad in (1.0, 2.0, 3.0, 6.0)] == [1, 2, 3, 30]


def check_one_pass_reduces_each_time(mode):
    helper, x, optimizer = eager_helper(1), tf.Variable(0.0), Optimizer()

    @mode
    def step(grad):
        grads = helper.compute_gradients([grad, None], [x, x])
        helper.apply_gradients(optimizer.apply, optimizer, zip(grads, [x, x]))
        return grads[0]
    assert [step(tf.constant(grad)).numpy() for grad in (1.0, 2.0)] == [10, 20]
    assert optimizer.applied.numpy() == optimizer.iterations.numpy() == 2


def check_apply_waits_for_the_last_pass(mode):
    helper, x, optimizer = eager_helper(3), tf.Variable(0.0), Optimizer()

    @mode
    def step():
        grads = helper.compute_gradients([tf.constant(1.0)], [x])
        helper.apply_gradients(lambda: (optimizer.apply(), x.assign_add(grads[0])), optimizer, list(zip(grads, [x])))
    for i in range(1, 8):
        step()
        assert (optimizer.iterations.numpy(), optimizer.applied.numpy(), x.numpy()) == (i, i // 3, 30 * (i // 3))


def check_functions_and_eager_calls_share_sums():
    helper, x = eager_helper(4), tf.Variable(0.0)

    def step(grad):
        return helper.compute_gradients([grad], [x])[0]
    got = [call(tf.constant(1.0)).numpy() for call in (step, tf.function(step), tf.function(step), step)]
    assert got == [1, 1, 1, 40]


def check_gradients_that_come_and_go():
    helper, x, y, never = eager_helper(2), tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0.0)
    one = tf.constant(1.0)

    def step(*grads):
        return [grad if grad is None else grad.numpy() for grad in helper.compute_gradients(grads, [x, y, never])]
    assert step(one, None, None) == [1, None, None]
    assert step(None, one, None) == [10, 10, None]
    assert step(None, one, None) == [0, 1, None]
    assert step(one, one, None) == [10, 20, None]
    assert eager_helper(2).compute_gradients([None], [x]) == [None]


def check_sparse_gradients(mode):
    x = tf.Variable(tf.zeros((3, 1)))

    def step(helper):
        slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
        return helper.compute_gradients([slices], [x])[0]
    helper = eager_helper(sparse_as_dense=True)
    step = mode(step)
    assert step(helper).numpy().tolist() == [[0], [0], [3]] and step(helper).numpy().tolist() == [[0], [0], [60]]
    with pytest.raises(ValueError, match="sparse_as_dense"):
        step(eager_helper())


def check_local_variables(mode):
    """They are not there for the exchange, and are divided by the size."""
    for scale in (True, False):
        helper = eager_helper(2, scale_local_gradients=scale)
        x, own = tf.Variable(0.0), tf.Variable(0.0)
        helper.register_local_var(own)
        step = mode(lambda a, b: helper.compute_gradients([a, b], [own, x]))
        got = [[grad.numpy() for grad in step(tf.constant(4.0), tf.constant(1.0))] for _ in range(2)]
        assert got == [[4, 1], [pytest.approx(8 / (hvd.size() if scale else 1)), 20]]


def check_dtypes_and_unknown_shapes():
    helper, x, y = eager_helper(2, lambda grads, vars: grads, average=True), *(
        tf.Variable(tf.zeros(2, dtype)) for dtype in (tf.float16, tf.float64))

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float16), tf.TensorSpec(None, tf.float64)])
    def step(a, b):
        return helper.compute_gradients([a, b], [x, y])
    for _ in range(2):
        got = step(tf.ones(2, tf.float16), tf.ones(2, tf.float64))
        assert [(grad.dtype, grad.numpy().tolist()) for grad in got] == [(tf.float16, [1, 1]), (tf.float64, [1, 1])]


def check_wrong_arguments():
    for passes in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            eager_helper(passes)
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            LocalGradientAggregationHelper(passes, tenfold, False, False, 0, LEGACY)


def check_list_helpers():
    assert get_not_none_from_list([None, 0, 1, None]) == [0, 1]
    assert apply_op_to_not_none_tensors(lambda a, b, c: a + b + c, [1, None], 10, 100) == [111, None]


# In v1 graphs

def check_v1_graph(graph):
    helper = LocalGradientAggregationHelper(3, tenfold, False, False, hvd.rank(), LEGACY, name="mine")
    x, grad = v1.Variable(0.0, use_resource=True), v1.Variable(1.0, use_resource=True)
    step = v1.train.get_or_create_global_step()
    grads = helper.compute_gradients([grad * 2.0, None], [x, grad])
    assert grads[1] is None
    pairs = list(zip(grads, [x, grad]))
    train = helper.apply_gradients(lambda: tf.group(x.assign_add(pairs[0][0]), step.assign_add(1)), None, pairs,
                                   global_step=step)
    assert isinstance(train, tf.Operation)
    run = run_in_session(train, grads[0])
    assert [run()[1] for _ in range(6)] == [2, 2, 60, 2, 2, 60]


def check_v1_graph_counts_every_pass(graph):
    helper = LocalGradientAggregationHelper(2, tenfold, False, True, hvd.rank(), LEGACY)
    x, step = v1.Variable(0.0, use_resource=True), v1.train.get_or_create_global_step()
    pairs = list(zip(helper.compute_gradients([tf.constant(1.0)], [x]), [x]))
    train = helper.apply_gradients(lambda: tf.group(x.assign_add(pairs[0][0]), step.assign_add(1)), None, pairs, step)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for i in range(1, 6):
            session.run(train)
            assert session.run([x, step, helper.counter]) == [10 * (i // 2), i, i % 2]


def check_sums_are_not_saved_nor_broadcast(graph):
    helper = LocalGradientAggregationHelper(2, tenfold, False, False, hvd.rank(), LEGACY)
    x = v1.Variable(0.0, use_resource=True)
    helper.compute_gradients([tf.constant(1.0)], [x])
    assert v1.global_variables() == [x] and v1.trainable_variables() == [x]
    assert len(v1.local_variables()) == 2


# On ranks

def check_ranks_exchange_sums_once(mode):
    helper = eager_helper(4, _make_allreduce_grads_fn("Summed"), average=True)
    xs = [tf.Variable(tf.zeros(20 + i)) for i in range(3)]
    step = mode(lambda scale: helper.compute_gradients([scale * tf.ones_like(x) for x in xs], xs))
    mine = hvd.rank() + 1.0
    for _ in range(2):
        before = lib.counters()["requests"]
        for i in range(3):
            assert step(tf.constant(mine * i))[0].numpy() == pytest.approx(mine * i)
        assert lib.counters()["requests"] == before
        got = step(tf.constant(mine * 3))
        assert lib.counters()["requests"] == before + (0 if hvd.size() == 1 else 3 if mode is tf.function else 1)
        for grad, x in zip(got, xs):
            np.testing.assert_allclose(grad.numpy(), np.full(x.shape, (hvd.size() + 1) / 2 * 1.5), rtol=1e-6)


def check_two_helpers_in_one_graph():
    """As in adversarial training: their exchanges may be under way together, and need different names."""
    helpers = [eager_helper(2, _make_allreduce_grads_fn("Same")) for _ in range(2)]
    xs = [tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(3))]

    @tf.function
    def step(mine):
        return [helper.compute_gradients([mine * tf.ones_like(x)], [x])[0] for helper, x in zip(helpers, xs)]
    for i in range(1, 7):
        got = step(tf.constant(hvd.rank() + 1.0))
        for grad in got:
            assert grad.numpy() == pytest.approx(hvd.rank() + 1 if i % 2 else hvd.size() + 1)
    branches = attrgetter("library.function")(step.get_concrete_function(tf.constant(1.0)).graph.as_graph_def())
    names = [node.name for branch in branches for node in branch.node_def if node.op == "HorovodAllreduce"]
    assert len(set(names)) == len(names) == (2 if hvd.size() > 1 else 0)

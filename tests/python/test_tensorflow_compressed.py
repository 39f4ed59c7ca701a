"""Compression.topk, int8 and int4 under TensorFlow: tapes, optimizers and allreduces lose nothing, at once and in
graphs."""
import gc

import numpy as np
import pytest
import tensorflow as tf
from nodes import COMPRESSED, SHAPES, begin, dense, end, gradient, left
from tensorflow_training import MODES

import lightcc.tensorflow as hvd
import ranks
from lightcc.compress import variable_compression
from lightcc.tensorflow.mpi_ops import MPI_LIB

COMPRESSIONS = {"topk": lambda: hvd.Compression.topk(0.01), "fp16": lambda: hvd.Compression.topk(0.05, fp16=True),
                "warmup": lambda: hvd.Compression.topk(0.01, warmup_steps=5), "int8": hvd.Compression.int8,
                "int4": hvd.Compression.int4}
pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(autouse=True)
def nodes(job):
    variable_compression._tapes.clear()  # as in a new process
    begin()
    yield
    end()
    hvd.init()


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


class Training:
    """Variables whose gradients are known, reduced by `reduce(tape, loss, variables)`, and their sums so far."""

    def __init__(self, reduce, mode, names=tuple(SHAPES)):
        self.variables = {name: tf.Variable(tf.zeros(SHAPES[name]), name=name) for name in names}
        self.reduce, self.step_number = reduce, 0
        self.delivered = {name: np.zeros(SHAPES[name]) for name in names}
        self._run = mode(self._gradients)

    def _gradients(self, gradients):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(self.variables[name] * gradients[name]) for name in self.variables])
        return self.reduce(tape, loss, list(self.variables.values()))

    def steps(self, count, scale=1.0):
        for _ in range(count):
            mine = {name: tf.constant(scale * gradient(name, self.step_number)) for name in self.variables}
            self.last = [np.asarray(reduced) for reduced in self._run(mine)]
            for name, reduced in zip(self.variables, self.last):
                self.delivered[name] += reduced.astype(np.float64) / scale
            self.step_number += 1
        return self

    def expect_equal_bits(self):
        mine = np.concatenate([reduced.ravel() for reduced in self.last]).view(np.uint8)
        every = hvd.allgather(tf.constant(mine[None])).numpy()
        assert (every == every[0]).all()

    def expect_total(self, owner, tolerance=0.0):
        saved = hvd.gather_residuals(owner)
        for name, found in self.delivered.items():
            behind = left(saved, name, SHAPES[name])
            np.testing.assert_allclose(found + behind, dense(name, range(self.step_number)), tolerance, tolerance, name)
            assert (np.count_nonzero(behind) > 100) == (name in COMPRESSED)


def tapes(compression, **options):
    def reduce(tape, loss, variables):
        return hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=compression, **options).gradient(
            loss, variables)
    return reduce


@pytest.mark.parametrize("kind", COMPRESSIONS)
def check_tapes_lose_nothing(kind, mode):
    compression = COMPRESSIONS[kind]()
    training = Training(tapes(compression), mode)
    for _ in range(4):
        training.steps(1).expect_equal_bits()
    training.expect_total(compression, 1e-3 if kind in ("int8", "int4") else 0)


@pytest.mark.parametrize("groups", (1, 3))
def check_groups_are_cut(groups, mode):
    compression = hvd.Compression.topk(0.01)
    Training(tapes(compression, groups=groups), mode).steps(3).expect_total(compression)


@pytest.mark.parametrize("groups, requests", ((None, len(SHAPES)), (1, 2)))
def check_they_are_one_set(groups, requests):
    """What the core compresses and what it does not."""
    training = Training(tapes(hvd.Compression.topk(0.01), groups=groups), tf.function)
    given = {name: tf.constant(gradient(name, 0)) for name in SHAPES}
    graph = training._run.get_concrete_function(given).graph
    nodes = [node for node in graph.get_operations() if node.type in ("HorovodAllreduce", "HorovodGroupedAllreduce")]
    assert len(nodes) == requests and any(node.get_attr("codec") for node in nodes)
    assert len({node.get_attr("set") for node in nodes}) == 1
    assert (nodes[0].get_attr("set") > 0) == (groups is None)  # one unit is no set


def check_what_is_sent(mode):
    compression = hvd.Compression.topk(0.01)
    Training(tapes(compression), mode).steps(4)
    stats = hvd.compression_stats(compression)
    assert stats["gradient_bytes"] == 4 * 4 * sum(np.prod(SHAPES[name]) for name in COMPRESSED)
    assert stats["dense"] == "" and 0.01 <= stats["density"] < 0.02 and stats["residual_norm"] > 1
    assert 0 < stats["sent_bytes"] < 0.1 * stats["dense_sent_bytes"]


def check_a_v1_optimizer(mode):
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum,
                                         compression=hvd.Compression.topk(0.01))
    training = Training(None, mode)

    def gradients(given):
        def loss():
            return tf.add_n([tf.reduce_sum(variable * given[name]) for name, variable in training.variables.items()])
        return [grad for grad, _ in optimizer.compute_gradients(loss, list(training.variables.values()))]

    training._run = mode(gradients)
    training.steps(3).expect_total(optimizer)


def check_iterations_of_a_loop_share_what_is_left_behind():
    compression, steps = hvd.Compression.topk(0.01), 20  # more iterations than have names of their own otherwise
    variable = tf.Variable(tf.zeros(SHAPES["a"]), name="a")
    mine = tf.constant(np.stack([gradient("a", step) for step in range(steps)]))

    @tf.function
    def train():
        for step in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * mine[step])
            grad = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=compression).gradient(loss, variable)
            variable.assign_add(grad)

    train()
    saved = hvd.gather_residuals(compression)
    assert saved["tensors"]["a"]["steps"] == steps
    np.testing.assert_array_equal(variable.numpy() + left(saved, "a", SHAPES["a"]), dense("a", range(steps)))


def check_a_function_that_is_traced_again_goes_on():
    compression = hvd.Compression.topk(0.01)
    training = Training(tapes(compression), tf.function).steps(2)
    training._run = tf.function(training._gradients)
    training.steps(2).expect_total(compression)


@pytest.mark.parametrize("kind", ("number", "function", "variable"))
def check_loss_scales(kind, mode):
    compression, scale = hvd.Compression.topk(0.01), [1024.0]
    variable = tf.Variable(1024.0)
    compression.loss_scale = {"number": 1024.0, "function": lambda: scale[0], "variable": lambda: variable}[kind]
    training = Training(tapes(compression), mode)
    for scale[0] in (1024.0,) if kind == "number" else (1024.0, 65536.0, 1.0):
        variable.assign(scale[0])
        training.steps(1, scale[0])
    training.expect_total(compression)


def check_state_goes_on_elsewhere(mode):
    compression = hvd.Compression.topk(0.01)
    training = Training(tapes(compression), mode).steps(3)
    saved = hvd.gather_residuals(compression)
    assert saved["ranks"] == list(range(hvd.size())) and set(saved["tensors"]) == set(COMPRESSED)
    assert hvd.compression_state(compression)["ranks"] == [hvd.rank()]
    expected = [grad.copy() for grad in training.steps(1).last]

    hvd.load_compression_state(compression, saved)  # a step back, in the functions that there are
    training.step_number -= 1
    assert all(np.array_equal(a, b) for a, b in zip(training.steps(1).last, expected))

    begin()  # another epoch
    other = Training(tapes(hvd.Compression.topk(0.02)), mode)
    hvd.load_compression_state(hvd.Compression.topk(0.02), saved)
    other.step_number = 3
    for name, found in zip(SHAPES, other.steps(1).last):
        behind = left(hvd.gather_residuals(hvd.Compression.topk(0.02)), name, SHAPES[name])
        np.testing.assert_array_equal(found + behind, dense(name, [3]) + left(saved, name, SHAPES[name]))


def check_what_is_wrong_with_state():
    for wrong in (None, 3, tf.compat.v1.train.GradientDescentOptimizer(1.0)):
        with pytest.raises(ValueError, match="give a DistributedOptimizer"):
            hvd.compression_state(wrong)
    with pytest.raises(ValueError, match="compression_state or gather_residuals"):
        hvd.load_compression_state(hvd.Compression.int8(), {"a": 1})
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    assert hvd.compression_stats(tape)["dense"] and hvd.compression_state(tape) is None


def check_two_variables_of_a_name(mode):
    compression = hvd.Compression.topk(0.01)
    one, two = Training(tapes(compression), mode, ["a"]), Training(tapes(compression), mode, ["a"])
    for training in (one, two, one, two, two):
        training.steps(1)
    saved = hvd.gather_residuals(compression)
    for name, training in (("a", one), ("a#2", two)):
        np.testing.assert_array_equal(training.delivered["a"] + left(saved, name, SHAPES["a"]),
                                      dense("a", range(training.step_number)))


def check_what_tapes_leave_behind_goes_with_the_variables():
    compression = hvd.Compression.topk(0.01)
    training = Training(tapes(compression), MODES["eager"]).steps(1)
    norm = hvd.compression_stats(compression)["residual_norm"]
    del training
    gc.collect()
    assert norm > 1 and hvd.compression_stats(compression)["residual_norm"] == 0
    assert hvd.compression_state(compression) is None


def check_ranks_that_disagree(mode):
    training = Training(tapes(hvd.Compression.topk(0.01 if hvd.rank() == 0 else 0.02)), mode, ["a"])
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"DistributedGradientTape_Allreduce\.a"):
        training.steps(1)
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum) == hvd.size()


def check_few_bytes_travel_dense(mode):
    begin(LIGHT_TOPK_THRESHOLD=str(1 << 20))
    compression = hvd.Compression.topk(0.01)
    training = Training(tapes(compression), mode).steps(2)
    assert all(np.array_equal(training.delivered[name], dense(name, range(2))) for name in SHAPES)
    assert hvd.compression_state(compression) is None


def check_the_switch(mode):
    begin(LIGHT_TOPK_ALLREDUCE="1", LIGHT_TOPK_RATIO="0.05")
    training = Training(tapes(hvd.Compression.none), mode).steps(2)
    training.expect_total(hvd.Compression.topk(0.05))
    sent = hvd.compression_stats()["gradient_bytes"]
    casts = Training(tapes(hvd.Compression.fp16), mode).steps(1)
    assert casts.last[0].any() and hvd.compression_stats()["gradient_bytes"] == sent


def check_named_allreduces(mode):
    compression, values = hvd.Compression.topk(0.05), tf.constant(gradient("a", 0))
    exact = dense("a", [0])
    one = mode(lambda x: hvd.allreduce(x, name="one", op=hvd.Sum, compression=compression))
    seen = [one(values).numpy() for _ in range(60)]
    assert all(0 < np.count_nonzero(each) < exact.size / 5 for each in seen)
    error = [np.linalg.norm(sum(seen[:n]) / n - exact) for n in (1, 60)]
    assert error[0] > 2 * error[1]
    two = mode(lambda x: hvd.grouped_allreduce([x, 2 * x], name="two", op=hvd.Sum, compression=compression))
    assert all(0 < np.count_nonzero(each) < exact.size / 5 for each in two(values))
    mixed = mode(lambda x: hvd.grouped_allreduce([x, x[0]], name="mixed", op=hvd.Sum, compression=compression))
    assert np.array_equal(mixed(values)[0], exact)

    def derivative(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, name="three", op=hvd.Sum, compression=compression)
        return tape.gradient(y, x)
    assert (mode(derivative)(values).numpy() == hvd.size()).all()


def check_errors():
    values, compression = tf.zeros((64, 80)), hvd.Compression.topk(0.01)
    with pytest.raises(ValueError, match="needs a name"):
        hvd.allreduce(values, compression=compression)
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.grouped_allreduce([values], name="x", op=hvd.Max, compression=compression)
    for call in (hvd.reducescatter, lambda x, **options: hvd.grouped_reducescatter([x], **options)):
        with pytest.raises(ValueError, match="cannot use"):
            call(values, compression=compression)
    with pytest.raises(ValueError, match="op=Average and op=Sum"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum, compression=compression)
    with pytest.raises(ValueError, match="op=Average and op=Sum"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum,
                                 compression=compression)


@pytest.mark.parametrize("text", ("zip name=x", "topk ratio=0.1", "topk ratio=much name=x", "topk ratio=2 name=x",
                                  "int8 ratio=0.1 name=x", "topk name=", "topk warmup=1.5 name=x"))
def check_texts_that_are_no_codec(text):
    with pytest.raises(tf.errors.InvalidArgumentError):
        MPI_LIB.horovod_allreduce(tf.ones(3), tf.constant(0), tensor_name="x", reduce_op=hvd.Sum, codec=text)


def check_a_graph_from_before():
    """A graph in a file has no attribute that its lightcc did not know."""
    with tf.Graph().as_default() as graph:
        tf.identity(hvd.allreduce(tf.compat.v1.placeholder(tf.float32, [3], "x"), op=hvd.Sum), "y")
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.op == "HorovodAllreduce"]
    for node in nodes:
        del node.attr["codec"], node.attr["set"]
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(definition, name="")
        assert len(nodes) == 1 and (session.run("y:0", {"x:0": [1.0, 2.0, 3.0]})[2] == 3 * hvd.size())

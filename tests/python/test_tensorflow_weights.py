"""Weights that differ between the ranks are found: hvd.check_weights and HOROVOD_CHECK_WEIGHTS, with TensorFlow."""
import functools

import numpy as np
import pytest
import tensorflow as tf

import lightcc.tensorflow as hvd
import ranks
from lightcc.core import weights

EVERY = 3
v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setattr(weights, "knob", lambda name: {"HOROVOD_CHECK_WEIGHTS": str(EVERY)}[name])


def off(rank, variable):
    if hvd.rank() == rank:
        variable.assign_add(tf.ones_like(variable))


def check_what_is_compared():
    mine = [tf.Variable([1.0, float("nan")]), tf.Variable(tf.ones((2, 3), tf.bfloat16), name="wide"),
            tf.Variable(np.int64(3)), tf.Variable([True, False]), tf.Variable(tf.zeros((0, 2)))]
    hvd.check_weights(mine)
    hvd.check_weights([*mine, np.ones((3, 4))[:, ::2], tf.constant(1.0)])
    off(1, mine[1])
    with pytest.raises(RuntimeError, match=r"1 of 5 parameters:\n  wide:0: rank 0 has [0-9a-f]{16}; rank 1 ") as error:
        hvd.check_weights(mine)
    assert len(set(hvd.allgather_object(str(error.value)))) == 1, "all ranks say the same"
    first = hvd.add_process_set([0])
    if hvd.rank() == 0:
        hvd.check_weights([tf.constant(hvd.rank())], first)
    hvd.remove_process_set(first)
    with v1.Graph().as_default(), pytest.raises(RuntimeError, match="call it between steps"):
        hvd.check_weights([v1.get_variable("x", initializer=1.0)])


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def check_a_tape_finds_it(traced):
    """A tape that is made in each step, whose function is traced anew by one rank alone."""
    x, own, table = tf.Variable([1.0, 2.0], name="x"), tf.Variable(float(hvd.rank())), tf.Variable(tf.ones((4, 2)))

    def step(scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(scale) * tf.reduce_sum(x * own * tf.gather(table, [1]))
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        for variable, grad in zip((x, own, table), tape.gradient(loss, [x, own, table])):
            if isinstance(grad, tf.IndexedSlices):
                grad = tf.convert_to_tensor(grad)
            variable.assign_sub(1e-2 * grad)

    run = tf.function(step) if traced else step
    for turn in range(2 * EVERY):
        run(tf.ones((1 + (turn % 2 and hvd.rank()),)))
    off(0, x)
    expected = rf"exchange {3 * EVERY} of gradients: .* 1 of 2 parameters:\n  x:0: rank 0 has"
    with pytest.raises((RuntimeError, tf.errors.UnknownError), match=expected):
        for _ in range(EVERY):
            run(tf.ones((1,)))


def check_a_graph_of_tensorflow_1_says_that_it_does_not():
    with v1.Graph().as_default():
        x = v1.get_variable("x", initializer=1.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        warned = functools.partial(pytest.warns, UserWarning, match="in a graph of TensorFlow 1")
        if hvd.rank() == 0:
            with warned():
                optimizer.compute_gradients(x * x, [x])
        else:
            optimizer.compute_gradients(x * x, [x])

"""Local sources of DistributedGradientTape, whose gradients stay on their rank, and PartialDistributedGradientTape."""
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_training import MODES, average, expect_close, factor, gradient

import lightcc.tensorflow as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request):
    return request.param


@pytest.mark.parametrize("scale", [True, False])
def check_local_sources(mode, scale):
    x, own, more = tf.Variable(1.0), tf.Variable([1.0, 1.0]), tf.Variable(1.0)

    def wrap(tape, **options):
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale, **options)
        for variable in (own, more):
            tape.register_local_source(variable)
        return tape

    mine = factor() / (hvd.size() if scale else 1)
    for options in ({}, {"groups": 1}, {"groups": [[x, own]]}, {"op": hvd.Average, "gradient_predivide_factor": 2.0}):
        got = gradient(mode, lambda: factor() * (x + tf.reduce_sum(own)), [own, x, more], wrap, **options)
        expect_close(got[:2], [[mine, mine], average()])
        assert got[2] is None


def check_local_slices_are_scaled(mode):
    own = tf.Variable(tf.ones((4, 2)))

    def wrap(tape):
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        return tape

    got = gradient(mode, lambda: factor() * tf.reduce_sum(tf.gather(own, [1, 3, 1])), own, wrap)
    assert isinstance(got, tf.IndexedSlices) and len(got.indices) == 3
    expect_close([got], [factor() / hvd.size() * np.array([[0, 0], [2, 2], [0, 0], [1, 1]])])


def check_a_variable_that_only_one_rank_has(mode):
    x, y, own = tf.Variable(1.0), tf.Variable([1.0, 1.0]), tf.Variable(1.0)
    sources = [x, own, y] if hvd.rank() == 0 else [x, y]

    def wrap(tape):
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        return tape

    got = gradient(mode, lambda: factor() * (x + tf.reduce_sum(y) + own), sources, wrap)
    expect_close([got[0], got[-1]], [average(), [average()] * 2])
    if hvd.rank() == 0:
        expect_close([got[1]], [1 / hvd.size()])


def check_local_and_global_gradients(mode):
    """Pairs of a source and what gradient() returns for it; those of local ones first."""
    x, own, unused, y = tf.Variable(1.0), tf.Variable([1.0, 1.0]), tf.Variable(1.0), tf.Variable(1.0)
    sources = {"a": x, "b": [own, unused], "c": y}

    @mode
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.register_local_source(own)
            loss = factor() * (x + tf.reduce_sum(own) + 2 * y)
        local, rest = tape.get_local_and_global_gradients(loss, sources, tf.constant(3.0), use_generic_names=True)
        for pairs, expected in ((local, [own]), (rest, [x, unused, y])):
            assert [source.ref() for source, _ in pairs] == [source.ref() for source in expected]
        return [[grad for _, grad in pairs] for pairs in (local, rest)]

    local, rest = step()
    expect_close(local, [[3 * factor() / hvd.size()] * 2])
    assert rest.pop(1) is None
    expect_close(rest, [3 * average(), 6 * average()])


def check_local_layers(mode):
    """Of Keras, whichever it is."""
    local, frozen, shared = (tf.keras.layers.Dense(2) for _ in range(3))
    for layer in (local, frozen, shared):
        layer.build((None, 3))
    frozen.trainable = False
    inputs = tf.ones((1, 3))
    weights = [*shared.trainable_weights, *local.trainable_weights]
    for layers in (local, [local, frozen], (local,), None):
        got = gradient(mode, lambda: factor() * tf.reduce_sum(local(inputs) + shared(inputs)), weights,
                       hvd.PartialDistributedGradientTape, local_layers=layers)
        own = average() if layers is None else factor() / hvd.size()
        expect_close(got, [np.full((3, 2), average()), [average()] * 2, np.full((3, 2), own), [own] * 2])
    for wrong in (3, [local, tf.Variable(1.0)], local.trainable_weights):
        with pytest.raises(ValueError, match="local_layers must be Keras layers"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=wrong)


def check_keras_weights_in_groups(mode):
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 3))
    got = gradient(mode, lambda: factor() * tf.reduce_sum(layer(tf.ones((1, 3)))), layer.trainable_weights,
                   groups=[list(layer.trainable_weights)])
    expect_close(got, [np.full((3, 2), average()), [average()] * 2])

"""lightcc.tensorflow.amp on ranks: an own loop whose tf.function is traced once a level; bfloat16 on the wire."""
import numpy as np
import pytest
import tensorflow as tf

import lightcc.tensorflow as hvd
import ranks
from lightcc.core import objects

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Alternate(hvd.amp.Policy):
    levels = ("float32", "low")

    def decide(self, state):
        return "low" if (state.step // 2 + hvd.rank()) % 2 else "float32"


def training(policy, **options):
    """A function that makes a step, the weight, the levels that were traced, and the MixedPrecision."""
    weight = tf.Variable([[1.0], [2.0]])
    precision = hvd.amp.MixedPrecision(lambda: 0.1, policy, **options)
    traced = []

    @tf.function
    def step(level, x):
        traced.append(level)
        with tf.GradientTape() as tape:
            dtype = precision.dtype(level)
            loss = tf.reduce_mean(tf.cast(tf.matmul(tf.cast(x, dtype), tf.cast(weight, dtype)), tf.float32))
        gradient, = hvd.DistributedGradientTape(tape, compression=hvd.Compression.bf16).gradient(loss, [weight])
        weight.assign_sub(0.1 * gradient)
        return loss, gradient
    return (lambda: precision(step, tf.ones((3, 2)) * (1 + hvd.rank()))), weight, traced, precision


def check_each_level_is_traced_once():
    step, weight, traced, precision = training(hvd.amp.Warmup(2))
    losses = [step() for _ in range(6)]
    assert traced == ["float32", "bfloat16"]
    assert precision.history().levels() == ["float32"] * 2 + ["bfloat16"] * 4
    assert {gradient.dtype for _, gradient in losses} == {tf.float32}
    every = objects.allgather_object(weight.numpy().tobytes())
    assert set(every) == {every[0]}
    assert abs(weight.numpy()[0, 0] - (1 - 6 * 0.1 * 1.5)) < 0.01


def check_ranks_that_disagree_have_one_level():
    step, _, _, precision = training(Alternate())
    for _ in range(12):
        step()
    assert precision.history().steps == ({"float32": 12})


def check_state_goes_on_in_an_elastic_state():
    step, weight, _, precision = training(hvd.amp.HoldAfterLearningRateChange(3))
    state = hvd.elastic.TensorFlowState([weight], precision=precision, batch=0)
    for _ in range(3):
        step()
    state.commit()
    before, kept = precision.history(), weight.numpy()
    step()
    state.restore()
    assert state.precision is precision and precision.history() == before
    np.testing.assert_array_equal(weight.numpy(), kept)
    state.sync()
    step()
    assert sum(precision.history().steps.values()) == 4
    assert {"precision", "variables"} <= state.own_saved().keys()


def check_wrong_calls():
    step, _, _, precision = training(hvd.amp.Always("float32"))
    with pytest.raises(ValueError, match="not inside a tf.function"):
        tf.function(lambda: step())()
    with pytest.raises(ValueError, match=r"the loss is of shape \(2,\)"):
        precision(lambda level: tf.ones(2))
    with pytest.raises(ValueError, match="must be tf.bfloat16 or tf.float16"):
        training(hvd.amp.Always("float32"), dtype=tf.float32)
    with pytest.raises(ValueError, match="may choose fp8, but TensorFlow does not compute in it"):
        training(hvd.amp.Always("fp8"))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="graphs with sessions of TensorFlow 1"):
        hvd.amp.MixedPrecision(0.1, hvd.amp.Always("float32"))

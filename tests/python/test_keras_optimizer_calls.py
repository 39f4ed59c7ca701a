"""What else Keras's DistributedOptimizer is: an optimizer like any to Keras, one that computes gradients, one that
trains in a session of TensorFlow 1; and its errors."""
import numpy as np
import pytest
from kerases import HAS_TENSORFLOW, HAS_TF_KERAS

import ranks
from lightcc._keras.optimizer import variables_of

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


V1 = """
import numpy as np, tensorflow as tf
tf.compat.v1.disable_v2_behavior()
from tensorflow import keras
import lightcc.tensorflow.keras as hvd
hvd.init()
try:
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
except ValueError as error:
    assert "tf.keras.optimizers.legacy" in str(error)
else:
    raise AssertionError("Keras would train with a plain optimizer")
model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))])
model.compile(hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.5, momentum=0.9)), "mse")
x = np.random.RandomState(hvd.rank()).standard_normal((8, 2)).astype("float32")
model.fit(x, x.sum(1), batch_size=4, epochs=3, verbose=0, shuffle=False)
every = hvd.allgather(model.get_weights()[0].reshape(1, -1))
assert (every == every[0]).all() and every.any() and len(every) == hvd.size(), every
"""


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="of TensorFlow 1")
def test_fit_in_a_v1_session(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # Keras 3 has no sessions
    ranks.run_script(V1, 2)


# To Keras it is an optimizer like any

def check_class_and_config(kit, family):
    plain = family.Adam(0.25, beta_1=0.5)
    optimizer = kit.hvd.DistributedOptimizer(plain, op=kit.hvd.Sum)
    assert isinstance(optimizer, family.Adam) and type(optimizer).__bases__ == (type(plain),)
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("Adam", "lightcc._keras")
    assert optimizer.get_config() == plain.get_config()
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == plain.get_config()
    if kit.on_tensorflow:  # on torch Keras itself saves names that only torch knows
        for wrapped in plain, kit.keras.mixed_precision.LossScaleOptimizer(plain):
            mine, theirs = map(kit.keras.optimizers.serialize, (kit.hvd.DistributedOptimizer(wrapped), wrapped))
            assert [mine[key] for key in ("module", "class_name")] == [theirs[key] for key in ("module", "class_name")]
    x = kit.variable([0.0])
    sums = type(kit.hvd.DistributedOptimizer(family.SGD(1.0), op=kit.hvd.Sum)).from_config(family.SGD(1.0).get_config())
    kit.apply(sums, [([1.0], x)])
    assert kit.value(x) == -kit.hvd.size()


def check_learning_rate(kit, family):
    optimizer, x = kit.hvd.DistributedOptimizer(family.SGD(1.0)), kit.variable([0.0])
    optimizer.learning_rate = 0.5
    kit.apply(optimizer, [([1.0], x)])
    assert kit.value(x) == -0.5 and float(kit.value(optimizer.learning_rate)) == 0.5
    if not kit.is_3:
        optimizer.lr = 0.25
        assert float(kit.value(optimizer.learning_rate)) == 0.25


def check_schedule(kit, family):
    schedule = kit.keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    optimizer, x = kit.hvd.DistributedOptimizer(family.SGD(schedule)), kit.variable([0.0])
    kit.apply(optimizer, [([1.0], x)])
    kit.apply(optimizer, [([1.0], x)])
    assert kit.value(x) == -1.5


def check_variables_can_be_called(kit, family):
    optimizer = kit.hvd.DistributedOptimizer(family.SGD(1.0, momentum=0.5))
    kit.build(optimizer, [kit.variable([0.0])])
    assert len(optimizer.variables) == len(optimizer.variables()) >= 2


def check_state_of_a_used_optimizer_is_taken_over(kit, family):
    plain, x = family.SGD(1.0, momentum=0.5), kit.variable([0.0])
    kit.apply(plain, [([2.0], x)])
    optimizer = kit.hvd.DistributedOptimizer(plain)
    kit.apply(optimizer, [([0.0], x)])
    assert kit.value(x) == -3.0 and int(optimizer.iterations) == 2


@pytest.mark.parametrize("used", [False, True])
def check_it_is_one_optimizer_with_the_given(kit, family, used):
    """The same variables, by name too, and the same number of steps. The given one stays plain."""
    plain, x = family.SGD(1.0, momentum=0.5), kit.variable([0.0])
    cls = type(plain)
    if used:
        kit.apply(plain, [([0.0], x)])
    plain.iterations.assign(7)  # as for a learning rate that goes on from there
    before = variables_of(plain)
    optimizer = kit.hvd.DistributedOptimizer(plain)
    kit.apply(optimizer, [([1.0 + kit.hvd.rank()], x)])
    np.testing.assert_allclose(kit.value(x), [-1.0 - kit.mean_rank()])
    assert optimizer is not plain and type(plain) is cls and optimizer.iterations is plain.iterations
    kept, now = variables_of(optimizer), variables_of(plain)
    assert [id(v) for v in kept] == [id(v) for v in now] and {id(v) for v in before} <= {id(v) for v in kept}
    assert len({v.name for v in kept}) == len(kept) >= 2 and int(plain.iterations) == 8
    kit.apply(plain, [([1.0 * kit.hvd.rank()], x)])
    np.testing.assert_allclose(kit.value(x), [-1.5 * (1.0 + kit.mean_rank()) - kit.hvd.rank()])
    assert int(optimizer.iterations) == 9


def check_a_loss_scale_optimizer_keeps_its_inner_one(kit):
    inner = kit.keras.optimizers.SGD(1.0)
    assert kit.hvd.DistributedOptimizer(kit.keras.mixed_precision.LossScaleOptimizer(inner)).inner_optimizer is inner


def check_two_wrappers_of_one_optimizer(kit, family):
    """Each has its own options."""
    plain, x = family.SGD(1.0), kit.variable([0.0])
    mean, total = kit.hvd.DistributedOptimizer(plain), kit.hvd.DistributedOptimizer(plain, op=kit.hvd.Sum)
    kit.apply(mean, [([1.0], x)])
    kit.apply(total, [([1.0], x)])
    assert kit.value(x) == -1.0 - kit.hvd.size() and int(plain.iterations) == 2


def check_weights_without_decay_stay_so(kit):
    x, y = kit.variable([1.0]), kit.variable([1.0])
    plain = kit.keras.optimizers.AdamW(0.5, weight_decay=0.5)
    plain.exclude_from_weight_decay([y])
    kit.apply(kit.hvd.DistributedOptimizer(plain), [([0.0], x), ([0.0], y)])
    assert kit.value(x) == 0.75 and kit.value(y) == 1.0


def check_two_optimizers(kit):
    first, second = (kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1.0)) for _ in range(2))
    x = kit.variable([0.0])
    kit.apply(first, [([1.0], x)])
    y = kit.variable([0.0])
    kit.apply(second, [([1.0 + kit.hvd.rank()], y)])
    assert kit.value(x) == -1.0 and kit.value(y) == -1.0 - kit.mean_rank()


# Gradients that the optimizer computes

def check_compute_gradients(kit, family):
    """They come reduced, and apply_gradients does not reduce them again."""
    if not kit.on_tensorflow:
        pytest.skip("a tf.GradientTape computes them")
    size, x = kit.hvd.size(), kit.variable([1.0])
    optimizer = kit.hvd.DistributedOptimizer(family.SGD(1.0), op=kit.hvd.Sum)
    for _ in range(2):  # and then it is as before
        x.assign([1.0])
        pairs = optimizer._compute_gradients(lambda: (1.0 + kit.hvd.rank()) * x[0], [x])
        assert kit.value(pairs[0][0]) == size * (size + 1) / 2
        optimizer.apply_gradients(pairs)
        assert kit.value(x) == 1 - size * (size + 1) / 2
    kit.apply(optimizer, [([1.0], x)])
    assert kit.value(x) == 1 - size * (size + 1) / 2 - size


def check_minimize(kit, family):
    if kit.is_3:
        pytest.skip("Keras 3's optimizers compute no gradients")
    x = kit.variable([0.0])
    kit.hvd.DistributedOptimizer(family.SGD(1.0), op=kit.hvd.Sum).minimize(lambda: x * (1.0 + kit.hvd.rank()), [x])
    assert kit.value(x) == -kit.hvd.size() * (kit.hvd.size() + 1) / 2


def check_aggregated_elsewhere(kit, family):
    """What Keras is told not to aggregate stays as it is."""
    if kit.is_3:
        pytest.skip("Keras 3 has no such option")
    x, mine = kit.variable([0.0]), 1.0 + kit.hvd.rank()
    kit.hvd.DistributedOptimizer(family.SGD(1.0)).apply_gradients([(kit.tensor([mine]), x)],
                                                                   experimental_aggregate_gradients=False)
    assert kit.value(x) == -mine


def check_v1_graph(kit):
    """get_gradients, which Keras 2 trains by where eager execution is off."""
    if kit.is_3:
        pytest.skip("Keras 3 has no v1 graphs")
    import tensorflow as tf
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.get_variable("x", initializer=[1.0])
        optimizer = kit.hvd.DistributedOptimizer(kit.keras.optimizers.legacy.SGD(1.0), op=kit.hvd.Sum)
        grads = optimizer.get_gradients(x * (1.0 + kit.hvd.rank()), [x])
        step = optimizer.apply_gradients(zip(grads, [x]))
        session.run(v1.global_variables_initializer())
        total = kit.hvd.size() * (kit.hvd.size() + 1) / 2
        assert session.run(grads[0]) == total
        session.run(step)
        assert session.run(x) == 1 - total


# Errors

@pytest.mark.parametrize("options, message", [
    ({"op": 2}, "op must be hvd.Average or hvd.Sum"), ({"op": 3}, "op must be hvd.Average or hvd.Sum"),
    ({"op": 1, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor not supported with op != Average"),
    ({"groups": -1}, "groups should be a positive integer"), ({"groups": [1]}, "groups should be"),
    ({"groups": [["x"]]}, "groups must consist of lists of variables"),
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0")])
def check_wrong_arguments(kit, options, message):
    with pytest.raises(ValueError, match=message):
        kit.distributed(**options)


def check_wrong_optimizers(kit, family):
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        kit.hvd.DistributedOptimizer(kit.hvd.DistributedOptimizer(family.SGD(1.0)))
    with pytest.raises(ValueError, match="is no optimizer of Keras 3 or of Keras 2.11 and later"):
        kit.hvd.DistributedOptimizer("sgd")

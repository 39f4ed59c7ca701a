"""Keras's DistributedOptimizer on ranks: training and steps by hand, with every family of optimizers that is there."""
import numpy as np
import pytest
from kerases import BATCH, BEYOND_CONFIG, HAS_TF_KERAS

import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(params=["apply", "apply_in_function"])
def apply(request, kit):
    """A step by hand, at once and in a tf.function."""
    if not kit.on_tensorflow and request.param == "apply_in_function":
        pytest.skip("torch has no tf.function")

    def step(optimizer, pairs):
        kit.build(optimizer, [variable for _, variable in pairs])
        getattr(kit, request.param)(optimizer, pairs)
    return step


# Training

@pytest.mark.parametrize("name, options", [
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}), ("Adam", {"learning_rate": 0.05}),
    ("RMSprop", {"learning_rate": 0.01}), ("SGD", {"learning_rate": 0.1, "clipnorm": 0.05}),
    ("Adam", {"learning_rate": 0.05, "global_clipnorm": 0.05})])
def check_fit_equals_training_in_one_process(kit, family, name, options):
    """Clipping, too: it sees the reduced gradients."""
    plain = kit.model(getattr(family, name)(**options))
    kit.fit_all(plain, epochs=2)
    model = kit.model(kit.hvd.DistributedOptimizer(getattr(family, name)(**options)))
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain)


@pytest.mark.parametrize("kind", BEYOND_CONFIG)
def check_fit_with_what_no_config_tells(kit, family, kind):
    """Whatever plain Keras trains with."""
    make = kit.beyond_config(family)[kind]
    plain, model = kit.model(make()), kit.model(kit.hvd.DistributedOptimizer(make()))
    kit.fit_all(plain, epochs=2)
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain, rtol=0, atol=1e-6)


def check_fit_in_eager_mode(kit):
    plain, model = (kit.model(wrap(kit.keras.optimizers.SGD(0.1)), run_eagerly=True)
                    for wrap in (lambda optimizer: optimizer, kit.hvd.DistributedOptimizer))
    kit.fit_all(plain)
    kit.fit_mine(model)
    kit.expect_equal_weights(model, plain)


def check_fit_with_several_steps_at_once(kit):
    if not kit.on_tensorflow:
        pytest.skip("torch runs one step at a time")
    plain = kit.model(kit.keras.optimizers.SGD(0.1))
    kit.fit_all(plain, epochs=2)
    model = kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)), steps_per_execution=3)
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain)


def check_stand_alone_package(kit):
    """lightcc.keras, for the package keras, which is Keras 3 also where tf.keras is tf_keras."""
    import keras

    import lightcc.keras as hvd
    model, plain = (kit.model(kit.keras.optimizers.SGD(0.1)) for _ in range(2))
    if keras.Model is kit.keras.Model or not kit.is_3:
        model.compile(hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)), "mse")
        kit.fit_all(plain)
        kit.fit_mine(model)
        kit.expect_equal_weights(model, plain)
    assert float(hvd.allreduce(hvd.rank())) == int(kit.mean_rank())  # of integers


def check_keras_own_accumulation_of_gradients(kit):
    if not kit.is_3:
        pytest.skip("Keras 2 has no gradient_accumulation_steps")
    plain, model = (kit.model(wrap(kit.keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)))
                    for wrap in (lambda optimizer: optimizer, kit.hvd.DistributedOptimizer))
    kit.fit_all(plain, epochs=2)
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain)


# Steps by hand

def check_step(kit, family, apply):
    x, y = kit.variable([10.0, 20.0]), kit.variable([1.0])
    optimizer = kit.hvd.DistributedOptimizer(family.SGD(1.0))
    apply(optimizer, [([1.0 + kit.hvd.rank(), 2.0], x), ([4.0], y)])
    np.testing.assert_allclose(kit.value(x), [9.0 - kit.mean_rank(), 18.0])
    np.testing.assert_allclose(kit.value(y), [-3.0])
    assert int(optimizer.iterations) == 1


def check_no_gradient_stays_none(kit):
    x, y = kit.variable([1.0]), kit.variable([1.0])
    optimizer = kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning) if kit.is_3 else pytest.MonkeyPatch().context():
        optimizer.apply_gradients([(kit.tensor([0.5]), x), (None, y)])
    assert kit.value(x) == 0.5 and kit.value(y) == 1.0


@pytest.mark.parametrize("options, gradient", [
    ({"op": 1}, lambda rank, size: size * (size + 1) / 2), ({"gradient_predivide_factor": 4.0}, None),
    ({"compression": "fp16"}, None), ({"groups": 2}, None), ({"groups": 7}, None), ({"name": "mine"}, None)])
def check_options(kit, apply, options, gradient):
    if "compression" in options:
        options = {"compression": getattr(kit.hvd.Compression, options["compression"])}
    optimizer = kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1.0), **options)
    variables = [kit.variable([0.0]) for _ in range(3)]
    mine, size = 1.0 + kit.hvd.rank(), kit.hvd.size()
    apply(optimizer, [([mine * 2 ** i], variable) for i, variable in enumerate(variables)])
    expected = gradient(mine, size) if gradient else (size + 1) / 2
    np.testing.assert_allclose([kit.value(x)[0] for x in variables], [-expected, -2 * expected, -4 * expected])


def check_groups_of_variables(kit, apply):
    variables = [kit.variable([0.0]) for _ in range(4)]
    optimizer = kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1.0), groups=[[variables[2], variables[0]]])
    apply(optimizer, [([i + kit.hvd.rank()], variable) for i, variable in enumerate(variables)])
    np.testing.assert_allclose([kit.value(x)[0] for x in variables], [-i - kit.mean_rank() for i in range(4)])


def check_num_groups_is_deprecated(kit):
    with pytest.warns(DeprecationWarning, match="num_groups"):
        kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1.0), num_groups=1)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def check_sparse_gradients(kit, family, sparse_as_dense):
    if not kit.on_tensorflow:
        pytest.skip("Keras's gradients are dense on torch")
    import tensorflow as tf
    x = kit.variable(np.zeros((3, 2)))
    optimizer = kit.hvd.DistributedOptimizer(family.SGD(1.0), sparse_as_dense=sparse_as_dense)
    rank = kit.hvd.rank()
    grad = tf.IndexedSlices(tf.fill([1, 2], 1.0 + rank), tf.constant([rank % 3]), tf.constant([3, 2]))
    optimizer.apply_gradients([(grad, x)])
    expected = np.zeros((3, 2))
    for rank in range(kit.hvd.size()):
        expected[rank % 3] -= (1.0 + rank) / kit.hvd.size()
    np.testing.assert_allclose(kit.value(x), expected, rtol=1e-6)


def check_process_set(kit, apply):
    """On ranks outside the set it is a plain optimizer."""
    if kit.hvd.size() == 1:
        pytest.skip("the set would be all ranks")
    only = kit.hvd.add_process_set([0])
    x = kit.variable([0.0])
    optimizer = kit.distributed(process_set=only)
    apply(optimizer, [([1.0 + kit.hvd.rank()], x)])
    assert kit.value(x) == -1.0 - kit.hvd.rank()
    kit.hvd.remove_process_set(only)


# Local variables

@pytest.mark.parametrize("scaled", [True, False])
def check_local_variables(kit, family, apply, scaled):
    x, own = kit.variable([0.0]), kit.variable([0.0])
    optimizer = kit.distributed(family.SGD(1.0), scale_local_gradients=scaled)
    optimizer.register_local_var(own)
    mine = 1.0 + kit.hvd.rank()
    apply(optimizer, [([mine], x), ([mine], own)])
    np.testing.assert_allclose(kit.value(x), [-1.0 - kit.mean_rank()])
    np.testing.assert_allclose(kit.value(own), [-mine / (kit.hvd.size() if scaled else 1)], rtol=1e-6)


def check_local_layers(kit):
    """A layer's variables may be made after the optimizer."""
    layer = kit.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    optimizer = kit.hvd.PartialDistributedOptimizer(kit.keras.optimizers.SGD(1.0), local_layers=layer,
                                                    scale_local_gradients=False)
    layer.build((None, 1))
    x, own = kit.variable([0.0]), layer.trainable_weights[0]
    kit.apply(optimizer, [([1.0 * kit.hvd.rank()], x), ([[1.0 * kit.hvd.rank()]], own)])
    np.testing.assert_allclose(kit.value(x), [-kit.mean_rank()])
    np.testing.assert_allclose(kit.value(own), [[-kit.hvd.rank()]])
    with pytest.raises(ValueError, match="local_layers must be Keras layers"):
        kit.hvd.PartialDistributedOptimizer(kit.keras.optimizers.SGD(1.0), local_layers=[x])


# backward_passes_per_step

@pytest.mark.parametrize("average", [False, True])
def check_aggregation(kit, family, apply, average):
    """The first pass changes nothing but the count of iterations."""
    x = kit.variable([0.0])
    optimizer = kit.distributed(family.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average)
    expected = 0.0
    for step in range(4):
        apply(optimizer, [([step + 1.0 + kit.hvd.rank()], x)])
        expected -= (step + 1 + kit.mean_rank()) / (2 if average else 1)
        if step % 2:
            np.testing.assert_allclose(kit.value(x), [expected])
        assert int(optimizer._agg_helper.counter) == (step + 1) % 2
        assert int(optimizer.iterations) == step + 1
    np.testing.assert_allclose(kit.value(x), [expected])


def check_aggregation_waits(kit, family, apply):
    x = kit.variable([0.0])
    apply(kit.distributed(family.SGD(1.0), backward_passes_per_step=2), [([1.0], x)])
    assert kit.value(x) == 0.0


def check_aggregation_with_momentum_made_in_a_function(kit, family):
    """Variables cannot be made in the branch that applies gradients."""
    if not kit.on_tensorflow:
        pytest.skip("torch has no tf.function")
    x = kit.variable([0.0])
    plain = family.SGD(1.0, momentum=0.5)
    step = kit.function_of(kit.distributed(plain, backward_passes_per_step=2), [x])
    for _ in range(4):
        step(kit.tensor([1.0]))
    np.testing.assert_allclose(kit.value(x), [-5.0])


def check_aggregation_in_fit(kit):
    """Three batches a step: as one batch of three times the size."""
    plain = kit.model(kit.keras.optimizers.SGD(0.1))
    plain.fit(*kit.data(), batch_size=3 * BATCH, epochs=2, shuffle=False, verbose=0)
    model = kit.model(kit.distributed(kit.keras.optimizers.SGD(0.1), backward_passes_per_step=3,
                                      average_aggregated_gradients=True))
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain)

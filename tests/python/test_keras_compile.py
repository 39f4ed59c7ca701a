"""Where Keras must know that an optimizer is distributed: loss scales (mixed precision) and compilation by XLA."""
import numpy as np
import pytest
from kerases import HAS_TF_KERAS

import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(params=["outside", "inside"])
def scaled(request, kit):
    """Makes an optimizer with a loss scale of 4 and a DistributedOptimizer outside or inside of it."""
    def make(optimizer):
        scaled = kit.keras.mixed_precision.LossScaleOptimizer
        if request.param == "outside":
            return kit.hvd.DistributedOptimizer(scaled(optimizer, initial_scale=4.0), op=kit.hvd.Sum)
        return scaled(kit.hvd.DistributedOptimizer(optimizer, op=kit.hvd.Sum), initial_scale=4.0)
    return make


@pytest.fixture
def half(kit):
    """Layers that compute in float16."""
    mixed = kit.keras.config if hasattr(kit.keras, "config") else kit.keras.mixed_precision
    set_policy = getattr(mixed, "set_dtype_policy", None) or mixed.set_global_policy
    set_policy("mixed_float16")
    yield
    set_policy("float32")


def scale_of(optimizer):
    return float(optimizer.dynamic_scale if hasattr(optimizer, "dynamic_scale") else optimizer.loss_scale)


def with_scale(kit, optimizer, grad):
    """What the optimizer is given for a gradient: Keras 3 divides by the scale itself."""
    return grad * scale_of(optimizer) if kit.is_3 else grad


@pytest.mark.parametrize("family", [0, -1])
@pytest.mark.parametrize("traced", [False, True])
def check_all_ranks_skip_a_step(kit, scaled, family, traced):
    """One rank alone has a gradient that is not finite."""
    if traced and not kit.on_tensorflow:
        pytest.skip("torch has no tf.function")
    rank, size, x = kit.hvd.rank(), kit.hvd.size(), kit.variable([0.0])
    optimizer = scaled(kit.families[family].SGD(1.0))
    kit.build(optimizer, [x])
    step = kit.apply_in_function if traced else kit.apply
    step(optimizer, [([np.inf if rank == size - 1 else 1.0], x)])
    assert kit.value(x) == 0.0 and scale_of(optimizer) == 2.0
    step(optimizer, [([with_scale(kit, optimizer, 1.0 + rank)], x)])
    np.testing.assert_allclose(kit.value(x), [-size * (size + 1) / 2])
    assert scale_of(optimizer) == 2.0


def check_fit_in_mixed_precision(kit, half):
    """model.compile puts the loss scale around the distributed optimizer."""
    plain = kit.model(kit.keras.optimizers.SGD(0.1))
    model = kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)))
    assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
    assert type(model.optimizer.inner_optimizer).__module__ == "lightcc._keras"
    kit.fit_all(plain, epochs=2)
    kit.fit_mine(model, epochs=2)
    kit.expect_equal_weights(model, plain, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(kit.hvd.allgather(model.get_weights()[0][None])[0],
                                  kit.hvd.allgather(model.get_weights()[0][None])[-1])


@pytest.mark.parametrize("family", [0, -1])
def check_gradients_are_not_added_up_inside_a_loss_scale(kit, family):
    scale, sgd, x = kit.keras.mixed_precision.LossScaleOptimizer, kit.families[family].SGD, kit.variable([0.0])
    inside = scale(kit.distributed(sgd(1.0), backward_passes_per_step=2))
    kit.build(inside, [x])
    with pytest.raises(ValueError, match="Wrap it the other way round"):
        kit.apply(inside, [([1.0], x)])
    outside = kit.distributed(scale(sgd(1.0), initial_scale=4.0), backward_passes_per_step=2)
    kit.build(outside, [x])
    for _ in range(2):
        kit.apply(outside, [([with_scale(kit, outside, 1.0 + kit.hvd.rank())], x)])
    np.testing.assert_allclose(kit.value(x), [-(kit.hvd.size() + 1)])


@pytest.fixture
def gpu(kit, monkeypatch):
    """A GPU that is in the list of devices, and nowhere else."""
    if not kit.on_tensorflow:
        pytest.skip("Keras does not ask for devices on torch")
    import tensorflow as tf
    plain = tf.config.list_physical_devices
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]

    def with_gpu(device_type=None):
        return gpus if device_type == "GPU" else plain(device_type) + (gpus if device_type is None else [])

    for config in (tf.config, tf.compat.v2.config):  # Keras 2 uses the second
        monkeypatch.setattr(config, "list_physical_devices", with_gpu)


def check_nothing_is_compiled_by_xla_where_a_gpu_is(kit, gpu):
    if not kit.is_3:
        pytest.skip('Keras 2 has no jit_compile="auto"')
    assert kit.model(kit.keras.optimizers.SGD(0.1)).jit_compile is True  # so Keras has seen the GPU
    for model in (kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1))),
                  kit.model(kit.keras.mixed_precision.LossScaleOptimizer(
                      kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1))))):
        assert model.jit_compile is False
        kit.fit_mine(model)


def check_the_update_of_keras_2_may_be_compiled(kit, gpu):
    """The gradients have been exchanged by then."""
    if kit.is_3:
        pytest.skip("Keras 3 has no jit_compile of optimizers")
    optimizer = kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1))
    assert optimizer.jit_compile is True
    model, plain = kit.model(optimizer), kit.model(kit.keras.optimizers.legacy.SGD(0.1))
    kit.fit_mine(model)
    kit.fit_all(plain)
    kit.expect_equal_weights(model, plain)


def check_jit_compile_is_an_error(kit):
    if not kit.on_tensorflow:
        pytest.skip("XLA is TensorFlow's")
    with pytest.raises(ValueError, match="XLA cannot compile the exchange of gradients. Leave jit_compile out"):
        kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)), jit_compile=True)
    assert kit.model(kit.keras.optimizers.SGD(0.1), jit_compile=True).jit_compile is True


def check_compile_of_a_subclass(kit):
    """A model with a compile method of its own."""
    class Model(kit.keras.Model):
        def compile(self, optimizer, **options):
            super().compile(optimizer=optimizer, loss="mse", **options)

        def call(self, x):
            return x

    model = Model()
    model.compile(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)))
    assert not model.jit_compile
    if kit.on_tensorflow:
        with pytest.raises(ValueError, match="Leave jit_compile out"):
            model.compile(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(0.1)), jit_compile=True)

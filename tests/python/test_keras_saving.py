"""Models with distributed optimizers in files of every format: Keras alone reads them, and load_model makes their
optimizer, with its state, distributed again."""
import numpy as np
import pytest
from kerases import BEYOND_CONFIG, HAS_TENSORFLOW, HAS_TF_KERAS

import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture
def family(request, family, kit):
    if family is not kit.families[0] and "model.keras" in request.node.name and kit.keras_is_213:
        pytest.skip("Keras 2.13 cannot read a legacy optimizer from a .keras file")
    return family


@pytest.fixture(params=["model.keras", "model.h5", "folder"])
def path(request, kit, tmp_path):
    """Where a model is saved, in each format; every rank has its own file."""
    if request.param == "folder" and kit.is_3:
        pytest.skip("Keras 3 does not write SavedModels that it could train")
    return str(tmp_path / request.param)


def has_state(kit, path, optimizer):
    """Whether Keras itself reads back the state of an optimizer; where not, it starts with a new state."""
    legacy, scaled = not hasattr(optimizer, "build"), hasattr(optimizer, "inner_optimizer")
    if kit.is_3:
        return not path.endswith(".h5")
    return not (path.endswith("folder") or legacy and path.endswith(".keras")
                            or scaled and path.endswith(".h5"))


def trained(kit, family):
    model = kit.model(kit.hvd.DistributedOptimizer(family.Adam(0.05)))
    kit.fit_mine(model)
    return model


def state_of(kit, optimizer):
    """The values of its variables: velocities and the number of iterations among them."""
    variables = optimizer.variables if isinstance(optimizer.variables, list) else optimizer.variables()
    return [kit.value(variable) for variable in variables]


def expect_equal(states, others):
    assert len(states) == len(others) > 4
    for mine, theirs in zip(states, others):
        np.testing.assert_array_equal(mine, theirs)


def check_keras_alone_reads_it(kit, path):
    model = trained(kit, kit.keras.optimizers)
    model.save(path)
    loaded = kit.keras.models.load_model(path)
    assert isinstance(loaded.optimizer, kit.keras.optimizers.Adam)
    assert "lightcc" not in " ".join(base.__module__ for base in type(loaded.optimizer).__mro__)
    kit.expect_equal_weights(loaded, model, rtol=0, atol=0)
    if has_state(kit, path, model.optimizer):
        expect_equal(state_of(kit, loaded.optimizer), state_of(kit, model.optimizer))


def check_load_model(kit, family, path):
    """Training goes on as if nothing had happened."""
    model = trained(kit, family)
    model.save(path)
    loaded = kit.hvd.load_model(path)
    assert (type(loaded.optimizer).__name__, type(loaded.optimizer).__module__) == ("Adam", "lightcc._keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    if not has_state(kit, path, model.optimizer):
        return
    expect_equal(state_of(kit, loaded.optimizer), state_of(kit, model.optimizer))
    for each in (model, loaded):
        kit.fit_mine(each)
    kit.expect_equal_weights(loaded, model, rtol=1e-6, atol=1e-6)
    plain = kit.model(family.Adam(0.05))
    kit.fit_all(plain, epochs=2)
    kit.expect_equal_weights(loaded, plain)


def check_a_model_saved_by_keras_alone(kit, path):
    model = kit.model(kit.keras.optimizers.SGD(0.1))
    kit.fit_all(model)
    model.save(path)
    loaded = kit.hvd.load_model(path, compression=kit.hvd.Compression.fp16)
    kit.fit_all(model)
    kit.fit_mine(loaded)
    kit.expect_equal_weights(loaded, model, rtol=1e-2, atol=1e-2)


def check_not_compiled(kit, path):
    kit.uncompiled().save(path)
    assert getattr(kit.hvd.load_model(path), "optimizer", None) is None


def check_custom_optimizers(kit, path):
    class Mine(kit.keras.optimizers.SGD):
        pass

    model = kit.model(kit.hvd.DistributedOptimizer(Mine(0.1)))
    kit.fit_mine(model)
    model.save(path)
    for given in {"custom_optimizers": [Mine]}, {"custom_objects": {"Mine": Mine}}:
        loaded = kit.hvd.load_model(path, **given)
        assert isinstance(loaded.optimizer, Mine) and type(loaded.optimizer).__module__ == "lightcc._keras"
    assert type(kit.keras.models.load_model(path, custom_objects={"Mine": Mine}).optimizer) is Mine


@pytest.mark.parametrize("kind", BEYOND_CONFIG)
def check_what_no_config_tells_is_saved_where_keras_saves_it(kit, family, path, kind):
    """Else the error is Keras's own."""
    def outcome(optimizer):
        model = kit.model(optimizer)
        kit.fit_mine(model)
        try:
            return model.save(path)
        except Exception as error:
            return type(error), "get_config" in str(error)

    make = kit.beyond_config(family)[kind]
    expected = outcome(make())
    assert outcome(kit.hvd.DistributedOptimizer(make())) == expected
    assert not kit.is_3 or (expected is None) == (kind != "schedule without get_config")


def check_a_schedule_of_the_users(kit, path):
    make = kit.beyond_config(kit.keras.optimizers)["schedule that is not registered"]
    schedule = {"Unregistered": type(make()._learning_rate)}
    model = kit.model(kit.hvd.DistributedOptimizer(make()))
    kit.fit_mine(model)
    model.save(path)
    loaded = kit.hvd.load_model(path, custom_objects=schedule)
    assert type(loaded.optimizer._learning_rate) is schedule["Unregistered"]
    kit.fit_mine(loaded)


def check_a_registered_optimizer(kit, tmp_path):
    register = getattr(kit.keras, "saving", kit.keras.utils).register_keras_serializable

    @register(package="ours")
    class Registered(kit.keras.optimizers.SGD):
        pass

    model = kit.model(kit.hvd.DistributedOptimizer(Registered(0.1)))
    kit.fit_mine(model)
    model.save(str(tmp_path / "model.keras"))
    assert type(kit.keras.models.load_model(str(tmp_path / "model.keras")).optimizer) is Registered


def check_loss_scale(kit, path):
    scaled = kit.keras.mixed_precision.LossScaleOptimizer
    model = kit.model(kit.hvd.DistributedOptimizer(scaled(kit.keras.optimizers.SGD(0.1, momentum=0.9))))
    kit.fit_mine(model)
    model.save(path)
    loaded = kit.hvd.load_model(path)
    assert isinstance(loaded.optimizer, scaled) and type(loaded.optimizer).__module__ == "lightcc._keras"
    if has_state(kit, path, model.optimizer):
        for each in (model, loaded):
            kit.fit_mine(each)
        kit.expect_equal_weights(loaded, model, rtol=1e-6, atol=1e-6)
    assert isinstance(kit.keras.models.load_model(path).optimizer, scaled)


def check_weights_alone(kit, tmp_path):
    model, path = trained(kit, kit.keras.optimizers), str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    again = kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.Adam(0.05)))
    kit.build(again.optimizer, again.trainable_variables)
    again.load_weights(path)
    kit.expect_equal_weights(again, model, rtol=0, atol=0)


def check_checkpoint(kit, tmp_path):
    """tf.train.Checkpoint, between a distributed and a plain optimizer."""
    if not kit.on_tensorflow:
        pytest.skip("TensorFlow's")
    import tensorflow as tf
    model = trained(kit, kit.keras.optimizers)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    for optimizer in (kit.keras.optimizers.Adam(0.05), kit.hvd.DistributedOptimizer(kit.keras.optimizers.Adam(0.05))):
        again = kit.model(optimizer)
        kit.build(again.optimizer, again.trainable_variables)
        status = tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(path)
        status.assert_existing_objects_matched()
        expect_equal(state_of(kit, again.optimizer), state_of(kit, model.optimizer))


def check_xla_stays_off_after_loading(kit, tmp_path):
    """A file may say jit_compile=True."""
    if not HAS_TENSORFLOW or not kit.is_3:
        pytest.skip("Keras 3 on TensorFlow compiles by XLA")
    model = kit.model(kit.keras.optimizers.SGD(0.1), jit_compile=True)
    model.save(tmp_path / "model.keras")
    assert kit.keras.models.load_model(tmp_path / "model.keras").jit_compile is True
    loaded = kit.hvd.load_model(tmp_path / "model.keras")
    assert loaded.jit_compile is False
    kit.fit_mine(loaded)

"""LocalSGD and DiLoCo in Keras's fit, and where there is TensorFlow in a loop of its own, against models of all ranks
in this process."""
import numpy as np
import pytest
from kerases import HAS_TENSORFLOW, HAS_TF_KERAS, Kit

import lightcc.numpy
import ranks

pytestmark = pytest.mark.usefixtures("job")
STEPS, BATCH = 7, 4


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_with_tf_keras():
    ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


def data(rank):
    generator = np.random.default_rng(rank)
    return generator.standard_normal((STEPS * BATCH, 3)).astype("float32"), \
        generator.standard_normal((STEPS * BATCH, 2)).astype("float32")


def model_of(kit):
    layers = kit.keras.layers
    model = kit.keras.Sequential([layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])
    generator = np.random.default_rng(5)
    model.set_weights([generator.standard_normal(w.shape).astype("float32") for w in model.get_weights()])
    model.compile(optimizer=kit.keras.optimizers.SGD(0.1), loss="mse")
    return model


def expected(kit, sync_every, rate, momentum):
    """The weights of all ranks at the end: their average, with outer steps after every sync_every steps."""
    models = [model_of(kit) for _ in range(kit.hvd.size())]
    outer = models[0].get_weights()
    buffers = [np.zeros_like(w) for w in outer]

    def averages():
        return [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*[model.get_weights() for model in models])]

    def exchange():
        for i, average in enumerate(averages()):
            moved = outer[i] - average
            buffers[i] = momentum * buffers[i] + moved
            outer[i] = outer[i] - rate * (moved + momentum * buffers[i])
        for model in models:
            model.set_weights(outer)
    for step in range(1, STEPS + 1):
        part = slice((step - 1) * BATCH, step * BATCH)
        for rank, model in enumerate(models):
            x, y = data(rank)
            model.train_on_batch(x[part], y[part])
        for model in models[1:] if step == 1 else ():  # BroadcastGlobalVariablesCallback sends them again
            model.set_weights(models[0].get_weights())
        if step % sync_every == 0:
            exchange()
    return averages()


def telling(kit, tell):
    """A callback that tells of each batch."""
    class Telling(kit.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            tell(batch)
    return Telling()


def callback_of(kit, kind):
    """A callback, and what expected() is to know of it."""
    if kind == "LocalSGD":
        return kit.hvd.LocalSGD(3), (1.0, 0.0)
    return kit.hvd.DiLoCo(3, outer_learning_rate=0.5, outer_momentum=0.8), (0.5, 0.8)


def fit(kit, model, *callbacks):
    x, y = data(kit.hvd.rank())
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0,
              callbacks=[kit.hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks])


@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def check_fit_and_that_of_another_model(kind):
    kit = Kit()
    callback, outer = callback_of(kit, kind)
    for _ in range(2):
        model = model_of(kit)
        fit(kit, model, callback)
        for mine, theirs in zip(model.get_weights(), expected(kit, 3, *outer)):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        kit.hvd.check_weights(model)


@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def check_a_layer_that_is_trained_in_some_fits(kind):
    kit = Kit()
    model, (callback, _) = model_of(kit), callback_of(kit, kind)
    layer = model.layers[0]
    for trainable in (False, True, False):
        before = layer.get_weights()
        layer.trainable = trainable
        model.compile(optimizer=kit.keras.optimizers.SGD(0.1), loss="mse")
        fit(kit, model, callback)
        kit.hvd.check_weights(model)
        assert (layer.get_weights()[0] == before[0]).all() != trainable


@pytest.mark.filterwarnings("ignore:.*trainable")
def check_a_layer_is_frozen_when_the_model_is_compiled():
    kit = Kit()
    model, (callback, _) = model_of(kit), callback_of(kit, "LocalSGD")
    for trainable in (True, False):
        model.layers[0].trainable = trainable
        fit(kit, model, callback)
    model.layers[0].trainable = True
    kit.hvd.check_weights(model)


def check_a_fit_after_one_that_has_failed():
    kit = Kit()
    callback = kit.hvd.LocalSGD(3, delay=2)

    def fail(batch):
        if batch == 3:  # what was sent a batch before is on its way
            raise KeyError("a failure")
    with pytest.raises(KeyError):
        fit(kit, model_of(kit), callback, telling(kit, fail))
    model = model_of(kit)
    fit(kit, model, callback)
    kit.hvd.check_weights(model)
    lightcc.numpy.join()


def check_a_join_waits_for_the_end_of_fit():
    kit = Kit()
    said = []

    def join(batch):
        if batch == 0:  # once a fit: a refusal collects garbage before, which takes a second
            with pytest.raises(ValueError, match="hvd.LocalSGD averages over all ranks.*In Keras, join after fit"):
                lightcc.numpy.join()
            said.append(batch)
    x, y = data(0)
    callback = kit.hvd.LocalSGD(3)
    for fits in (1, 2):
        model_of(kit).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback, telling(kit, join)])
        lightcc.numpy.join()
        assert len(said) == fits


def check_a_new_rank_and_those_that_stay():
    """In another world of an elastic job, which goes on from an earlier commit; the program has further collectives."""
    kit = Kit()
    x, y = data(kit.hvd.rank())
    model, callback = model_of(kit), kit.hvd.DiLoCo(3, outer_learning_rate=0.5, outer_momentum=0.8)
    model.fit(x[:6 * BATCH], y[:6 * BATCH], batch_size=BATCH, verbose=0, callbacks=[callback])
    kit.hvd.shutdown()
    kit.hvd.init()
    new = model_of(kit), kit.hvd.DiLoCo(3, outer_learning_rate=0.5, outer_momentum=0.8)  # Keras numbers models: on all
    if kit.hvd.rank() == 1:
        model, callback = new
    model.set_weights(model_of(kit).get_weights())
    commit = telling(kit, lambda batch: lightcc.numpy.broadcast_object(batch, 0, name="commit"))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[
        kit.hvd.callbacks.BroadcastGlobalVariablesCallback(0), commit, callback])
    for mine, theirs in zip(model.get_weights(), expected(kit, 3, 0.5, 0.8)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def check_several_steps_an_execution_are_refused():
    kit = Kit()
    if not kit.on_tensorflow:
        pytest.skip("Keras on torch makes single steps")
    model = model_of(kit)
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=2)
    x, y = data(0)
    with pytest.raises(ValueError, match="steps_per_execution"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[kit.hvd.LocalSGD(3)])


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="a loop of TensorFlow")
def check_a_loop_of_tensorflow():
    import tensorflow as tf

    import lightcc.tensorflow as hvd
    weight, scale = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    with pytest.raises(ValueError, match="no variables"):
        hvd.LocalSGD([], 2)
    outer = hvd.DiLoCo([weight, scale], 2, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)
    with pytest.raises(RuntimeError, match="before_step"):
        outer.step()
    outer.before_step()
    for step in range(4):
        weight.assign_sub([float(hvd.rank() + step), 1.0])
        scale.assign_sub(float(hvd.rank()))
        outer.step()
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(weight.numpy(), [1 - 4 * mean - 6, 2 - 4], rtol=1e-5)
    np.testing.assert_allclose(scale.numpy(), 3 - 4 * mean, rtol=1e-5)
    with pytest.raises(ValueError, match="hvd.join: hvd.DiLoCo averages over all ranks"):
        hvd.join()
    with pytest.raises(ValueError, match="eager"):
        tf.function(lambda: outer.step())()

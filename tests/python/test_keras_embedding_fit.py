"""What a Keras model with tables shares with any other in fit: callbacks of learning rates, a metric over all ranks,
and XLA for the dense part."""

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc import embedding

pytestmark = pytest.mark.usefixtures("job")
BATCHES, BATCH = 6, 12  # BATCH: of all ranks


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


def model_of(keras, E, name, *behind):
    return keras.Sequential([keras.layers.Input((2,), dtype="int64"),
                             E.Embedding(3, name=name, combiner="sum", init=E.Normal(0, 1)), *behind])


def data():
    rng = np.random.default_rng(3)
    return rng.integers(20, size=(BATCHES * BATCH, 2)), rng.integers(2, size=(BATCHES * BATCH, 1)).astype(np.float32)


def mine(samples):
    """Of each batch."""
    return np.concatenate([batch[hvd.rank()::hvd.size()] for batch in np.split(samples, BATCHES)])


def fit(model, **options):
    ids, labels = data()
    return model.fit(mine(ids), mine(labels), batch_size=BATCH // hvd.size(), shuffle=False, verbose=0, **options)


# Learning rates

class Rates:
    def __init__(self, keras):
        class Recorder(keras.callbacks.Callback):
            seen = []

            def on_batch_end(self, batch, logs=None):
                optimizer = self.model.optimizer
                self.seen.append((float(optimizer.learning_rate), float(optimizer.sparse.learning_rate)))

        self.recorder = Recorder()

    def dense_and_sparse(self):
        return np.array(self.recorder.seen).T


def check_callbacks_set_both_rates(kit, keras, E):
    model, rates = model_of(keras, E, "rates", keras.layers.Dense(1)), Rates(keras)
    model.compile(E.Optimizer(kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), E.SGD(0.25)), "mse")
    callbacks, steps = kit.hvd.callbacks, 2 * BATCHES
    fit(model, epochs=4, callbacks=[
        callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch, start_epoch=3), rates.recorder])
    dense, sparse = rates.dense_and_sparse()
    warmup = (1 + (hvd.size() - 1) * np.minimum(np.arange(1, 3 * BATCHES + 1) / steps, 1)) / hvd.size()
    factors = np.concatenate([warmup, np.full(BATCHES, 0.125)])
    np.testing.assert_allclose(dense, 0.1 * factors, rtol=1e-6)
    np.testing.assert_allclose(sparse, 0.25 * factors, rtol=1e-6)


def check_a_schedule_of_the_rows_stays(kit, keras, E):
    model, rates = model_of(keras, E, "own_schedule", keras.layers.Dense(1)), Rates(keras)
    decay = keras.optimizers.schedules.PolynomialDecay(0.5, BATCHES, 0.1)
    model.compile(E.Optimizer(keras.optimizers.SGD(0.5), E.SGD(decay)), "mse")
    fit(model, callbacks=[kit.hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5), rates.recorder])
    dense, sparse = rates.dense_and_sparse()
    np.testing.assert_allclose(dense, 0.05, rtol=1e-6)
    np.testing.assert_allclose(sparse, [float(decay(step + 1)) for step in range(BATCHES)], rtol=1e-6)


# The metric

def check_decayed_auc_in_fit_and_evaluate(keras, E):
    """Of rows that do not change, against what one process counts of all ranks' samples."""
    model = model_of(keras, E, "auc", keras.layers.Dense(1, activation="sigmoid"))
    model.layers[-1].set_weights([np.ones((3, 1)), np.zeros(1)])
    model.compile(E.Optimizer(keras.optimizers.SGD(0.0), E.SGD(0.0)), "mse", metrics=[E.DecayedAUC(40, bins=64)])
    history = fit(model, epochs=2).history["decayed_auc"]
    ids, labels = data()
    scores, alone = model.predict(ids, verbose=0), embedding.DecayedAUC(40, bins=64)
    for some, of_them in zip(np.split(scores, BATCHES), np.split(labels, BATCHES)):
        alone.update(some, of_them, of_all=BATCH)
    negatives, positives = alone.state_dict()["counts"]
    pairs = positives * (np.cumsum(negatives) - negatives / 2)
    expected = pairs.sum() / (positives.sum() * negatives.sum())
    np.testing.assert_allclose(history, expected, rtol=1e-6)
    assert 0.2 < expected < 0.8 and expected != 0.5
    evaluated = model.evaluate(mine(ids), mine(labels), batch_size=BATCH // hvd.size(), verbose=0, return_dict=True)
    assert evaluated["decayed_auc"] == pytest.approx(expected, rel=1e-6)


def check_decayed_auc_refuses(keras, E):
    auc = E.DecayedAUC(10)
    with pytest.raises(ValueError, match="weighted_metrics"):
        auc.update_state([1.0], [0.5], sample_weight=[1.0])
    with pytest.raises((ValueError, tf.errors.OpError), match="scores are from 0 to 1"):
        auc.update_state([1.0], [1.5])
    assert type(auc).from_config(auc.get_config()).decayed.half_life == 10


# XLA

def check_a_dense_part_by_xla(kit, keras, E):
    """The same training, with the dense layers in a function that XLA compiles."""
    class Tower(keras.layers.Layer):
        def __init__(self, compiled):
            super().__init__()
            self.parts = [keras.layers.Dense(4, "tanh", kernel_initializer="ones"),
                          keras.layers.Dense(1, kernel_initializer="ones")]
            self.function = tf.function(self.plain, jit_compile=compiled)

        def build(self, shape):
            self.parts[0].build(shape)
            self.parts[1].build((None, 4))
            self.built = True

        def plain(self, rows):
            for part in self.parts:
                rows = part(rows)
            return rows

        def call(self, rows):
            return self.function(rows)

    losses = []
    for compiled in (True, False):
        model = model_of(keras, E, "xla", Tower(compiled))
        dense = kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(E.Optimizer(dense, E.SparseAdam(0.01)), "mse")
        losses.append(fit(model, epochs=2).history["loss"])
        model.layers[0].table.close()
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][1] < losses[0][0]


def check_jit_compile_is_refused(keras, E):
    model = model_of(keras, E, "jit", keras.layers.Dense(1))
    optimizer = E.Optimizer(keras.optimizers.SGD(0.1), E.SGD(0.1))
    with pytest.raises(ValueError, match=r"jit_compile=True\) with an E\.Optimizer: (.*)function\(jit_compile=True\)"):
        model.compile(optimizer, "mse", jit_compile=True)
    model.compile(optimizer, "mse")
    assert not model.jit_compile

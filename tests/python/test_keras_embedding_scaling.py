"""mixed_float16: the ranks have one loss scale, and a step is applied on all of them or on none."""
import gc

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc._keras.optimizer import hidden_variables_of

pytestmark = pytest.mark.usefixtures("job")
DIM, IDS, SAMPLES, BATCH = 4, 20, 240, 12  # SAMPLES and BATCH: of all ranks
SMALL = 0.1  # targets times this: with Keras's first scale, 2^15, no gradient leaves float16's range by itself


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(autouse=True)
def half(keras):
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def scaling(kit, optimizer, **options):
    cls = kit.keras.optimizers.LossScaleOptimizer if kit.is_3 else kit.keras.mixed_precision.LossScaleOptimizer
    return cls(optimizer, **options)


def scale_of(kit, optimizer):
    return float(optimizer.dynamic_scale.numpy() if kit.is_3 else optimizer.loss_scale)


def model_of(keras, E, name):
    """With the output in float32, as Keras's guide has it."""
    layer = E.Embedding(DIM, combiner="sum", name=name, init=E.Normal(0, 0.5))
    ids = keras.layers.Input((2,), dtype="int64")
    hidden = keras.layers.Dense(8, activation="relu")(layer(ids))
    model = keras.Model(ids, keras.layers.Dense(1, dtype="float32")(hidden))
    rng = np.random.default_rng(3)
    model.set_weights([weight if not weight.size else 0.5 * rng.normal(size=weight.shape)
                       for weight in model.get_weights()])
    return model, layer


def optimizer_of(kit, E, rate=0.02):
    return E.Optimizer(kit.hvd.DistributedOptimizer(kit.keras.optimizers.Adam(rate)), E.SparseAdam(rate))


def data():
    """Of all ranks, and planted: each id has a weight."""
    rng = np.random.default_rng(4)
    ids, weights = rng.integers(IDS, size=(SAMPLES, 2)), rng.normal(size=IDS)
    return ids, weights[ids].sum(1, keepdims=True).astype(np.float32)


def mine(samples):
    """This rank's of each batch."""
    batches = samples.reshape(-1, BATCH, samples.shape[-1])
    return batches[:, hvd.rank()::hvd.size()].reshape(-1, samples.shape[-1])


def fit(model, x, y, **options):
    return model.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0, **options)


def state(model, layer):
    """All that a step changes: rows and steps of the table, and dense weights."""
    rows = layer(tf.constant([[key, key] for key in range(IDS)])).numpy()
    return [rows, np.array(layer.table.stats()["steps"]), *model.get_weights()]


def is_same(ours, others):
    return all(np.array_equal(one, other) for one, other in zip(ours, others))


def last():
    return hvd.rank() == hvd.size() - 1


# fit

@pytest.mark.parametrize("eagerly", [False, True])
def check_an_overflow_of_one_rank_skips_the_step_of_all(kit, keras, E, eagerly):
    model, layer = model_of(keras, E, f"overflow.{eagerly}")
    model.compile(optimizer_of(kit, E), "mse", run_eagerly=eagerly)
    assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
    assert layer(tf.constant([[1, 2]])).dtype == tf.float16 and layer.table.dtype == "float32"
    x, y = mine(data()[0]), SMALL * mine(data()[1])
    one = BATCH // hvd.size()
    fit(model, x[:one], y[:one])
    before, scale = state(model, layer), scale_of(kit, model.optimizer)
    assert scale == 2.0 ** 15
    targets = y[:one].copy()
    targets[0] = np.inf if last() else targets[0]
    fit(model, x[:one], targets)
    assert is_same(state(model, layer), before) and scale_of(kit, model.optimizer) == scale / 2
    assert int(model.optimizer.inner_optimizer.sparse.iterations) == 1
    fit(model, x[:one], y[:one])
    after = state(model, layer)
    assert not is_same(after[:1], before[:1]) and not is_same(after[2:], before[2:])
    assert after[1] == before[1] + 1 == 2 and scale_of(kit, model.optimizer) == scale / 2
    assert len({str(hvd.broadcast_object([weight.tolist() for weight in model.get_weights()], root))
                for root in range(hvd.size())}) == 1


def check_it_trains_as_float32_does(kit, keras, E):
    def losses(policy):
        keras.mixed_precision.set_global_policy(policy)
        model, layer = model_of(keras, E, f"planted.{policy}")
        model.compile(optimizer_of(kit, E), "mse")
        fit(model, *map(mine, data()), epochs=12)
        return float(hvd.allreduce(model.evaluate(*map(mine, data()), verbose=0)))

    half, single = losses("mixed_float16"), losses("float32")
    assert single < 0.1 and abs(half - single) < 0.02, (half, single)


def check_the_scale_grows(kit, keras, E):
    model, layer = model_of(keras, E, "grows")
    model.compile(scaling(kit, optimizer_of(kit, E), initial_scale=4.0, dynamic_growth_steps=3), "mse")
    x, y = mine(data()[0]), mine(data()[1])
    scales = []
    for step in range(8):
        targets = np.full_like(y[:4], np.inf) if step == 4 and last() else y[:4]
        model.train_on_batch(x[:4], targets)
        scales.append(scale_of(kit, model.optimizer))
    assert scales == [4, 4, 8, 8, 4, 4, 4, 8] and layer.table.stats()["steps"] == 7


def check_callbacks_set_the_rate_of_the_rows(kit, keras, E):
    model, _ = model_of(keras, E, "rates")
    model.compile(optimizer_of(kit, E), "mse")
    fit(model, *map(mine, data()),
        callbacks=[kit.hvd.callbacks.LearningRateScheduleCallback(0.02, lambda epoch: 0.5)])
    sparse = model.optimizer.inner_optimizer.sparse
    assert float(sparse.learning_rate.numpy()) == 0.01
    assert {id(one) for one in sparse.variables} <= {id(one) for one in hidden_variables_of(model.optimizer)}


# A tape

def stepper(kit, model, optimizer, compiled):
    """step(ids, targets, wrong): where wrong, the gradient of the table alone is not finite."""
    def step(ids, targets, wrong):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - targets) ** 2)
            scaled = optimizer.scale_loss(loss) if kit.is_3 else optimizer.get_scaled_loss(loss)
        variables = model.trainable_variables
        grads = tape.gradient(scaled, variables)
        grads = grads if kit.is_3 else optimizer.get_unscaled_gradients(grads)
        grads = [tf.IndexedSlices(tf.where(wrong, np.nan, one.values), one.indices, one.dense_shape)
                 if isinstance(one, tf.IndexedSlices) else one for one in grads]
        optimizer.apply_gradients(list(zip(grads, variables)))
        return loss
    return tf.function(step) if compiled else step


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def check_gradients_of_tables_are_looked_at(kit, keras, E, compiled, distributed):
    model, layer = model_of(keras, E, f"tape.{compiled}.{distributed}")
    dense = keras.optimizers.Adam(0.02)
    both = E.Optimizer(kit.hvd.DistributedOptimizer(dense) if distributed else dense, E.SparseAdam(0.02))
    optimizer = scaling(kit, both, initial_scale=64.0)
    optimizer.build(model.trainable_variables)
    step = stepper(kit, model, optimizer, compiled)
    x, y = tf.constant(mine(data()[0])[:4]), tf.constant(mine(data()[1])[:4])
    step(x, y, False)
    before = state(model, layer)
    step(x, y, last())
    assert is_same(state(model, layer), before) and scale_of(kit, optimizer) == 32
    step(x, y * np.inf if last() else y, False)  # and dense ones
    assert is_same(state(model, layer), before) and scale_of(kit, optimizer) == 16
    step(x, y, False)
    assert not is_same(state(model, layer)[:1], before[:1]) and layer.table.stats()["steps"] == 2


def check_a_model_of_tables_alone_and_a_rank_without_ids(kit, keras, E):
    layer = E.Embedding(1, combiner="sum", name="alone", init=E.Zeros())
    both = E.Optimizer(keras.optimizers.SGD(0.1), E.SGD(0.5))
    optimizer = scaling(kit, both, initial_scale=8.0)
    layer.build((None, 2))
    optimizer.build(layer.trainable_variables)
    for wrong in (False, True, False):
        ids = tf.ragged.constant([[1, 2], [3]] if last() else [[], []], dtype=tf.int64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True)) * (np.inf if wrong and last() else 1.0)
            scaled = optimizer.scale_loss(loss) if kit.is_3 else optimizer.get_scaled_loss(loss)
        grads = tape.gradient(scaled, layer.trainable_variables)
        grads = grads if kit.is_3 else optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, layer.trainable_variables)))
    assert scale_of(kit, optimizer) == 4 and layer.table.stats()["steps"] == 2
    np.testing.assert_allclose(layer(tf.constant([[1]])), [[-1 / hvd.size()]], rtol=1e-3)


# Files

def check_files(kit, keras, E, folder):
    """Of load_model and tf.train.Checkpoint; the loss scale comes back where Keras saves it."""
    model, layer = model_of(keras, E, "files")
    model.compile(optimizer_of(kit, E), "mse")
    x, y = mine(data()[0]), SMALL * mine(data()[1])
    model.train_on_batch(x[:4], y[:4] * np.inf)
    model.train_on_batch(x[:4], y[:4])
    model.save(f"{folder}/x.keras")
    path = tf.train.Checkpoint(model=model).write(f"{folder}/y")
    model.train_on_batch(x[4:8], y[4:8])
    expected = state(model, layer)
    tf.train.Checkpoint(model=model).read(path)
    model.train_on_batch(x[4:8], y[4:8])
    assert is_same(state(model, layer), expected)
    del model, layer
    gc.collect()
    loaded = keras.models.load_model(f"{folder}/x.keras")
    assert int(loaded.optimizer.inner_optimizer.sparse.iterations) == 1
    assert scale_of(kit, loaded.optimizer) == 2.0 ** 14 or not kit.is_3
    loaded.train_on_batch(x[4:8], y[4:8])
    assert is_same(state(loaded, loaded.get_layer("files")), expected)


# Refusals

def check_what_is_refused(kit, keras, E):
    with pytest.raises(ValueError, match=r"LossScaleOptimizer\(E\.Optimizer"):
        E.Optimizer(scaling(kit, keras.optimizers.Adam()), E.SGD())
    model, _ = model_of(keras, E, "refused")
    model.compile(optimizer_of(kit, E), "mse")
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        fit(model, *map(mine, data()), callbacks=[E.ServeCallback()])
    plain, _ = model_of(keras, E, "plain_scaled")
    plain.compile(keras.optimizers.Adam(), "mse")
    with pytest.raises(ValueError, match=r"E\.Optimizer\(dense=keras\.optimizers\.Adam"):
        fit(plain, *map(mine, data()))

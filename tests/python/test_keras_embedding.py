"""The Embedding layer and E.Optimizer on ranks, in Keras 3 and in Keras 2: training, inputs, combiners, refusals."""

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc.tensorflow import embedding as of_tensorflow

pytestmark = pytest.mark.usefixtures("job")
DIM, ROWS, FEATURES = 4, 60, 3
BATCH, STEPS = 12, 200  # BATCH: of all ranks


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


def data():
    """Ids, none twice in a batch, and targets: Keras 3's Adam squares the gradients of an id one by one."""
    rng = np.random.default_rng(5)
    ids = np.concatenate([rng.permutation(ROWS)[:BATCH * FEATURES].reshape(BATCH, FEATURES) for _ in range(STEPS)])
    return ids.astype(np.int64), rng.normal(size=(len(ids), 1)).astype(np.float32)


def model_around(keras, layer):
    """A functional model of a layer with one row an id."""
    ids = keras.layers.Input((FEATURES,), dtype="int64")
    hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Flatten()(layer(ids)))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    rng = np.random.default_rng(6)
    for dense in model.layers[-2:]:
        dense.set_weights([0.3 * rng.normal(size=weight.shape) for weight in dense.get_weights()])
    return model


def optimizer_of(kit, E, rate=0.01):
    return E.Optimizer(dense=kit.hvd.DistributedOptimizer(kit.keras.optimizers.Adam(rate)),
                       sparse=E.SparseAdam(rate, epsilon=1e-7))


def rows_of(layer, ids=range(ROWS)):
    return layer(tf.constant(list(ids), tf.int64)).numpy()


def mine(samples):
    count = BATCH // hvd.size()
    batches = samples.reshape(STEPS, BATCH, *samples.shape[1:])
    return batches[:, hvd.rank() * count:(hvd.rank() + 1) * count].reshape(-1, *samples.shape[1:])


def fit(model, parts, batch=None):
    return model.fit(*parts, batch_size=batch or BATCH // hvd.size(), shuffle=False, verbose=0)


def fit_at_two_rates(model, parts, batch):
    for rate, half in zip((0.01, 0.003), (slice(None, len(parts[0]) // 2), slice(len(parts[0]) // 2, None))):
        model.optimizer.learning_rate = rate
        if hasattr(model.optimizer, "sparse"):
            model.optimizer.sparse.learning_rate = rate
        fit(model, [part[half] for part in parts], batch)


# Training

@pytest.mark.parametrize("eagerly", [False, True])
def check_fit_equals_keras_own_embedding_with_adam(kit, keras, E, eagerly):
    """Of all ranks' data together, in one process."""
    if eagerly and hvd.size() != 2:
        pytest.skip("two ranks will do")
    steps, mine_of_step = 50 if eagerly else STEPS, BATCH // hvd.size()
    layer, own = E.Embedding(DIM, name=f"fit.{eagerly}"), keras.layers.Embedding(ROWS, DIM)
    model, plain = model_around(keras, layer), model_around(keras, own)
    own.set_weights([rows_of(layer)])
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    fit_at_two_rates(plain, [part[:steps * BATCH] for part in data()], BATCH)
    model.compile(optimizer_of(kit, E), "mse", run_eagerly=eagerly)
    fit_at_two_rates(model, [mine(part)[:steps * mine_of_step] for part in data()], mine_of_step)
    np.testing.assert_allclose(rows_of(layer), own.get_weights()[0], rtol=0, atol=1e-5)
    for ours, theirs in zip(model.layers[-1].get_weights(), plain.layers[-1].get_weights()):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert layer.table.stats()["steps"] == steps == int(model.optimizer.iterations)
    assert int(hvd.allreduce(tf.constant(len(layer.table)), op=hvd.Sum)) == ROWS


def check_a_model_of_its_own_class_in_a_function(kit, keras, E):
    """With a tape, and the same rows as HashEmbedding has."""
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.user = E.Embedding(DIM, name="own_class", init=E.Zeros())
            self.head = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, ids, training=None):
            return self.head(self.user(ids, training=training))

    model = Model()
    optimizer = E.Optimizer(dense=keras.optimizers.SGD(0.0), sparse=E.SGD(1.0))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    model(tf.constant([1]))
    kit.build(optimizer, model.trainable_variables)
    for _ in range(2):
        step(tf.constant([1, 1, 2 + hvd.rank()]))
    expected = [-4, -2 / hvd.size() if hvd.size() > 1 else -2]
    np.testing.assert_allclose(rows_of(model.user, [1, 2])[:, 0], expected, rtol=1e-6)


def check_a_model_of_tables_alone(keras, E):
    layer = E.Embedding(1, name="alone", init=E.Zeros())
    model = keras.Sequential([keras.layers.Input((1,), dtype="int64"), layer, keras.layers.Flatten()])
    model.compile(E.Optimizer(dense=keras.optimizers.SGD(0.1), sparse=E.SGD(0.5)), "mse")
    model.fit(np.array([[7], [8]]), np.array([[1.0], [2.0]]), batch_size=2, verbose=0, epochs=2)
    assert int(model.optimizer.iterations) == 2 and layer.table.stats()["steps"] == 2
    np.testing.assert_allclose(rows_of(layer, [7, 8])[:, 0], [0.75, 1.5], rtol=1e-6)
    before = of_tensorflow.calls()
    model.evaluate(np.array([[9]]), np.array([[0.0]]), verbose=0)
    assert len(layer.table) <= 2 and of_tensorflow.calls() == before + 1


def check_several_steps_in_one_function(kit, keras, E):
    """A loop of TensorFlow's around the steps, with an update for each lookup."""
    layer = E.Embedding(1, name="in_a_loop", init=E.Zeros())
    model = keras.Sequential([keras.layers.Input((1,), dtype="int64"), layer, keras.layers.Flatten()])
    model.compile(E.Optimizer(keras.optimizers.SGD(0.1), E.SGD(0.5)), "mse", steps_per_execution=3)
    model.fit(np.array([[7]] * 6), np.ones((6, 1), np.float32), batch_size=1, verbose=0)
    assert layer.table.stats()["steps"] == 6
    np.testing.assert_allclose(rows_of(layer, [7]), [[1.0]], rtol=1e-6)


def check_learning_rates_are_each_their_own(keras, E):
    dense, sparse = keras.optimizers.SGD(0.1), E.SGD(0.5)
    both = E.Optimizer(dense=dense, sparse=sparse)
    both.learning_rate = 0.2
    both.sparse.learning_rate = 0.25
    assert float(dense.learning_rate) == pytest.approx(0.2) and float(sparse.learning_rate) == 0.25
    assert type(both).__name__ == "Optimizer" and isinstance(both, keras.optimizers.SGD)


def check_stand_alone_keras(kit):
    """lightcc.keras.embedding, for the package keras, which is Keras 3 also where tf.keras is tf_keras."""
    import keras

    from lightcc.keras import embedding as E
    assert issubclass(E.Embedding, keras.layers.Layer)
    assert E.Embedding(2, name="stand alone")(tf.constant([[1, 2]])).shape == (1, 2, 2)


# Inputs

WORDS = [["a", "b", "a"], ["c", "", "b"]]


def numbers():
    return tf.constant([[3, 4, 3], [5, 0, 4]], tf.int32)


def pooled(rows, combiner):
    total = rows.sum(0)
    return total / {"sum": 1, "mean": max(len(rows), 1), "sqrtn": np.sqrt(max(len(rows), 1))}[combiner]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["dense", "masked", "ragged", "sparse"])
def check_combiners(E, kind, combiner):
    bags = [[3, 4, 3], [], [5]]
    layer = E.Embedding(DIM, combiner=combiner, name=f"{kind} {combiner}", init=E.Normal(0, 1))
    mask = tf.constant([[True, True, True], [False] * 3, [False, True, False]])
    if kind == "dense":
        bags[1:] = [[6, 6, 6], [5, 7, 5]]
        output = layer(tf.constant(bags))
    elif kind == "masked":
        output = layer(tf.constant([[3, 4, 3], [8, 8, 8], [9, 5, 9]]), mask=mask)
    else:
        ragged = tf.ragged.constant(bags, dtype=tf.int64)
        sparse = tf.SparseTensor([[0, 0], [0, 1], [0, 2], [2, 1]], tf.constant([3, 4, 3, 5], tf.int64), [3, 3])
        output = layer(ragged if kind == "ragged" else sparse)
    one_by_one = {i: layer(tf.constant([[i]], tf.int64)).numpy()[0] for i in range(10)}  # a bag of one
    expected = [pooled(np.array([one_by_one[i] for i in bag]).reshape(-1, DIM), combiner) for bag in bags]
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-6)
    assert output.shape == (3, DIM)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def check_sparse_and_ragged_inputs_in_fit(keras, E, kind):
    bags = tf.ragged.constant([[1, 2], [5]], dtype=tf.int64)
    x = bags if kind == "ragged" else tf.SparseTensor([[0, 0], [0, 1], [1, 2]], bags.flat_values, [2, 3])
    try:
        ids = keras.Input((None,) if kind == "ragged" else (3,), dtype="int64", **{kind: True})
    except (TypeError, ValueError):
        pytest.skip("missing: ragged inputs in this Keras")
    layer = E.Embedding(DIM, combiner="mean", name=f"input_{kind}", init=E.Constant(1.0))
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(layer(ids)))
    model.compile(E.Optimizer(keras.optimizers.SGD(0.0), E.SGD(1.0)), "mse")
    model.fit(tf.data.Dataset.from_tensors((x, np.zeros((2, 1), np.float32))), verbose=0)
    np.testing.assert_allclose(layer(tf.constant([[1], [2], [5], [6]]))[:, 0], [-1, -1, -3, 1], rtol=1e-6)


def check_shapes_without_a_combiner(keras, E):
    layer = E.Embedding(DIM, name="shapes", init=E.Normal(0, 1))
    flat = rows_of(layer)
    np.testing.assert_array_equal(layer(numbers()), flat[numbers()])
    ragged = layer(tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64))
    assert isinstance(ragged, tf.RaggedTensor) and ragged.row_lengths().numpy().tolist() == [2, 0, 1]
    np.testing.assert_array_equal(ragged.flat_values, flat[1:4])
    mask = tf.constant([[True, False, True], [False, False, True]])
    np.testing.assert_array_equal(layer(numbers(), mask=mask), flat[numbers()] * mask[..., tf.newaxis].numpy())
    assert layer.compute_output_shape((None, 7)) == (None, 7, DIM)


def check_several_layers_in_one_exchange(kit, keras, E):
    """The same training as with an exchange each."""
    def model(name, together):
        layers = [E.Embedding(DIM, name=f"{name}.a", init=E.Constant(0.5)),
                  E.Embedding(2, "string", "sum", name=f"{name}.b", init=E.Constant(0.25))]
        layers.append(layers[0])  # two features with the same ids
        inputs = [keras.Input((2,), dtype="int64"), keras.Input((3,), dtype="string"), keras.Input((1,), dtype="int64")]
        rows = E.Together(layers)(inputs) if together else [layer(one) for layer, one in zip(layers, inputs)]
        flat = keras.layers.Concatenate()([keras.layers.Flatten()(one) for one in rows])
        made = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(flat))
        made.compile(E.Optimizer(keras.optimizers.SGD(0.1), E.SparseAdam(0.1)), "mse")
        return made, layers

    (one, layers), (other, others) = model("together", True), model("apart", False)
    data = [numbers()[:, :2], tf.constant(WORDS), numbers()[:, 2:]], np.zeros((2, 1), np.float32)
    before = of_tensorflow.calls()
    for made in (one, other):
        for _ in range(3):
            made.train_on_batch(*data)
    assert of_tensorflow.calls() == before + 3 * (1 + 1) + 3 * (3 + 1)
    for mine, theirs in zip(layers, others):
        assert mine.table.stats()["rows"] == theirs.table.stats()["rows"]
    np.testing.assert_allclose(one.predict_on_batch(data[0]), other.predict_on_batch(data[0]), rtol=1e-5)
    with pytest.raises(ValueError, match="1 inputs for 3 layers"):
        E.Together(layers)([tf.constant([[1]], tf.int64)])
    with pytest.raises(ValueError, match="give a list"):
        E.Together([keras.layers.Dense(1)])


def check_strings(keras, E):
    words = E.Embedding(DIM, "string", "sum", name="strings", init=E.Constant(1.0))
    ids = keras.layers.Input((3,), dtype="string")
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(words(ids)))
    model.compile(E.Optimizer(dense=keras.optimizers.SGD(0.0), sparse=E.SGD(1.0)), "mse")
    model.fit(tf.constant(WORDS), np.zeros((2, 1), np.float32), batch_size=2, verbose=0)
    counts = np.array([[2, 1, 0], [0, 1, 1]])  # of a, b and c; the gradient of a bag's sum is 3 * DIM * 2 / 2
    expected = 1 - 3 * DIM * counts.sum(0)
    for word, row in zip("abc", expected):
        bag = words(tf.constant([[word]]))
        np.testing.assert_allclose(bag.numpy(), np.full((1, DIM), row), rtol=1e-6)


def check_masks_travel_on(keras, E):
    ids = tf.constant([[3, 4, 0], [5, 0, 0]], tf.int64)
    layer, plain = E.Embedding(DIM, name="masks", init=E.Constant(1.0)), E.Embedding(DIM, combiner="sum", name="none")
    mask = tf.not_equal(ids, 0)
    assert layer.compute_mask(ids, mask) is mask and plain.compute_mask(ids, mask) is None
    assert layer(ids, mask=mask).numpy()[:, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]


def check_half_precision_of_the_layer(E):
    layer = E.Embedding(DIM, name="bfloat16", dtype="mixed_bfloat16")
    assert layer(tf.constant([1])).dtype == tf.bfloat16 and layer.table.dtype == "float32"


# Refusals

def check_a_plain_optimizer_is_refused(kit, keras, E):
    for optimizer in (keras.optimizers.Adam(0.01), kit.hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))):
        model = model_around(keras, E.Embedding(DIM, name="plain"))
        model.compile(optimizer, "mse")
        with pytest.raises(ValueError, match=r"'plain'(.|\n)*E\.Optimizer\(dense=keras\.optimizers\.Adam"):
            fit(model, [part[:BATCH] for part in data()])
        del model


@pytest.mark.parametrize("options, text", [
    ({"key_dtype": "float32"}, "key_dtype"), ({"combiner": "max"}, "combiner"), ({"dtype": "float16"}, "float16")])
def check_wrong_arguments(E, options, text):
    with pytest.raises(ValueError, match=text):
        E.Embedding(DIM, name="wrong", **options)(tf.constant([[1]]))


@pytest.mark.parametrize("options, ids, text", [
    ({}, tf.constant([[1.5]]), r"keras\.Input\(shape, dtype='int64'\)"), ({}, tf.constant([["a"]]), "for integers"),
    ({"key_dtype": "string"}, tf.constant([[1]]), "for strings"),
    ({}, tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1]), "need a combiner"),
    ({"combiner": "sum"}, tf.constant([1]), "two dimensions"), ({}, [[1.5]], "float"),
    ({"combiner": "sum"}, tf.ragged.constant([[[1]]], dtype=tf.int64), "two dimensions")])
def check_wrong_inputs(E, options, ids, text):
    with pytest.raises(ValueError, match=text):
        E.Embedding(DIM, name="wrong inputs", **options)(ids)


def check_ragged_rows_where_dense_ones_are_due(keras, E):
    """Without a combiner they are ragged, which Keras says; a combiner makes dense ones."""
    ids, dense = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64), tf.ones([2, 2, DIM])
    layer, bags = E.Embedding(DIM, name="ragged rows"), E.Embedding(DIM, combiner="sum", name="dense rows")
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="ragged"):
        keras.layers.Concatenate()([layer(ids), dense])
    with pytest.raises(ValueError, match="a mask goes with dense ids"):
        layer(ids, mask=tf.ones([2, 2], tf.bool))
    assert keras.layers.Concatenate()([bags(ids), dense[:, 0]]).shape == (2, 2 * DIM)


def check_one_layer_in_two_models(keras, E):
    """Their optimizers' rules for a row must be the same."""
    layer, data = E.Embedding(1, name="shared", init=E.Zeros()), (np.array([[7]]), np.ones((1, 1), np.float32))
    models = [keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Flatten()]) for _ in range(3)]
    for model, sparse in zip(models, (E.SGD(0.5), E.Adagrad(0.5), E.SGD(0.25))):
        model.compile(E.Optimizer(keras.optimizers.SGD(0.1), sparse), "mse")
    models[0].train_on_batch(*data)
    with pytest.raises(ValueError, match="table 'shared' has the optimizer"):
        models[1].train_on_batch(*data)
    np.testing.assert_allclose(rows_of(layer, [7]), [[1.0]], rtol=1e-6)


def check_wrong_optimizers(kit, keras, E):
    adam = keras.optimizers.Adam
    for dense, sparse in ((adam(), adam()), (E.SGD(), E.SGD()), (E.Optimizer(adam(), E.SGD()), E.SGD()),
                          *([(adam(gradient_accumulation_steps=2), E.SGD())] if kit.is_3 else
                            [(keras.optimizers.legacy.Adam(), E.SGD())])):
        with pytest.raises(ValueError):
            E.Optimizer(dense=dense, sparse=sparse)
    scaling = keras.optimizers.LossScaleOptimizer if kit.is_3 else keras.mixed_precision.LossScaleOptimizer
    for around in (lambda both: both, scaling):
        with pytest.raises(ValueError, match=r"dense=hvd\.DistributedOptimizer"):
            kit.hvd.DistributedOptimizer(around(E.Optimizer(adam(), E.SGD())))


def check_a_strategy_is_refused(keras, E):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        with pytest.raises(ValueError, match="OneDeviceStrategy"):
            E.Embedding(DIM, name="strategy")(tf.constant([[1]]))

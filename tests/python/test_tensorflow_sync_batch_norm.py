"""SyncBatchNormalization: on ranks it is Keras' BatchNormalization on the batches of all ranks, one after the other."""
import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow.mpi_ops as hvd
import ranks
from lightcc.tensorflow.sync_batch_norm import SyncBatchNormalization

IS_KERAS_3 = hasattr(tf.keras, "ops")
pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_with_tf_keras():
    ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


CHANNELS = 3
SHAPES = {"2D": (CHANNELS,), "3D": (5, CHANNELS), "4D": (2, 3, CHANNELS), "channels first": (CHANNELS, 2, 2)}
ROWS = {"even": lambda rank: 4, "uneven": lambda rank: 2 + 3 * rank, "none on rank 0": lambda rank: 4 if rank else 0,
        "only on the last": lambda rank: 5 if rank == hvd.size() - 1 else 0, "one each": lambda rank: 1,
        "one in all": lambda rank: int(rank == 0)}
OPTIONS = {"default": {}, "plain": {"center": False, "scale": False},
           "epsilon and momentum": {"epsilon": 0.1, "momentum": 0.7}}


def batch(rank, step, form, rows, dtype="float64"):
    random = np.random.default_rng(97 * rank + step)
    channel = np.arange(CHANNELS).reshape([-1] + [1] * (2 if form == "channels first" else 0))
    x = random.standard_normal((rows(rank), *SHAPES[form]))
    return ((1.0 + rank) * x + channel - rank).astype(dtype)


def mine_of(whole, rows):
    first = sum(rows(rank) for rank in range(hvd.rank()))
    return whole[first:first + rows(hvd.rank())]


def plain(**options):
    """Keras' own; Keras 2's fused kernel would track another variance."""
    return tf.keras.layers.BatchNormalization(**options, **({} if IS_KERAS_3 else {"fused": False}))


def make(form, dtype="float64", **options):
    """The layer and its reference, with weights that are not just ones and zeros."""
    options = {"axis": 1 if form == "channels first" else -1, "dtype": dtype, **options}
    reference = plain(**options)
    layer = SyncBatchNormalization(**options)
    for one in (reference, layer):
        one.build((None, *SHAPES[form]))
        for i, weight in enumerate(one.trainable_weights):
            weight.assign(np.linspace(0.5 + i, 2.0, CHANNELS))
    return layer, reference


def expect_close(value, expected, rtol=1e-9, atol=1e-9):
    np.testing.assert_allclose(np.asarray(value, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol)


def differentiate(layer, x, weight, **options):
    """Forward and backward of sum(y^2 * weight): y, the gradient of x and those of the layer's weights."""
    variables = [getattr(v, "value", v) if IS_KERAS_3 else v for v in layer.trainable_weights]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, **options)
        loss = tf.reduce_sum(tf.square(y) * weight)
    return y, *tape.gradient(loss, [x, *variables])


def one_step(layer, reference, every, rows, run=lambda function: function, masks=None, **tolerance):
    """The layer on this rank's batch, the reference on all of them, compared."""
    whole, x = np.concatenate(every), every[hvd.rank()]
    weight = np.random.default_rng(5).standard_normal(whole.shape).astype(whole.dtype)
    mask = {} if masks is None else {"mask": tf.constant(masks[hvd.rank()])}
    whole_mask = {} if masks is None else {"mask": tf.constant(np.concatenate(masks))}
    y, dx, *own = run(lambda x, weight: differentiate(layer, x, weight, **mask))(
        tf.constant(x), tf.constant(mine_of(weight, rows)))
    expected, expected_dx, *expected_own = differentiate(reference, tf.constant(whole), tf.constant(weight),
                                                         **whole_mask)
    assert y.dtype == x.dtype and y.shape == x.shape
    expect_close(y, mine_of(expected, rows), **tolerance)
    expect_close(dx, mine_of(expected_dx, rows), **tolerance)
    for gradient, other in zip(own, expected_own):
        expect_close(hvd._allreduce(gradient, op=hvd.Sum), other, **tolerance)
    expect_same_statistics(layer, reference, **tolerance)


def expect_same_statistics(layer, reference, **tolerance):
    for moving, other in zip(layer.non_trainable_weights, reference.non_trainable_weights):
        expect_close(moving.numpy(), other.numpy(), **tolerance)
        every = hvd.allgather(moving.numpy()[np.newaxis]).numpy()
        assert (every == every[0]).all(), f"{moving.name} differs between the ranks"


@pytest.mark.parametrize("form, rows, options", [(form, rows, "default") for form in SHAPES for rows in ROWS] + [
    ("4D", "uneven", options) for options in OPTIONS if options != "default"])
def check_equals_the_whole_batch(form, rows, options):
    if hvd.size() == 1 and rows == "none on rank 0":
        return
    layer, reference = make(form, **OPTIONS[options])
    for step in range(2):
        every = [batch(rank, step, form, ROWS[rows]) for rank in range(hvd.size())]
        one_step(layer, reference, every, ROWS[rows])
    x = batch(hvd.rank(), 9, form, ROWS["even"])
    expect_close(layer(x), reference(x))


@pytest.mark.parametrize("rows, shape", [("uneven", "static"), ("uneven", "any"), ("none on rank 0", "any")])
def check_in_a_function(rows, shape):
    if hvd.size() == 1 and rows == "none on rank 0":
        return
    layer, reference = make("4D")
    signature = None if shape == "static" else [tf.TensorSpec([None] * 4, tf.float64)] * 2
    for step in range(2):
        one_step(layer, reference, [batch(rank, step, "4D", ROWS[rows]) for rank in range(hvd.size())], ROWS[rows],
                 lambda function: tf.function(function, input_signature=signature))


@pytest.mark.parametrize("rows", ["uneven", "none on rank 0"])
def check_masks(rows):
    if hvd.size() == 1 and rows == "none on rank 0":
        return
    layer, reference = make("3D")
    every = [batch(rank, 0, "3D", ROWS[rows]) for rank in range(hvd.size())]
    masks = [np.random.default_rng(rank).random(x.shape[:2]) < 0.6 for rank, x in enumerate(every)]
    # Keras adds 1e-7 to the number of values that it divides by
    one_step(layer, reference, every, ROWS[rows], masks=masks, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", ["even", "uneven"])
def check_float32(rows):
    for form in SHAPES:
        layer, reference = make(form, "float32")
        every = [batch(rank, 0, form, ROWS[rows], "float32") for rank in range(hvd.size())]
        one_step(layer, reference, every, ROWS[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def check_mixed_precision(dtype):
    """Half precision is only of inputs and outputs, not of what is computed between."""
    layer, reference = make("4D", f"mixed_{dtype}")
    reference = make("4D", "float32")[1]
    every = [batch(rank, 0, "4D", ROWS["uneven"], "float32") for rank in range(hvd.size())]
    y = layer(tf.cast(every[hvd.rank()], dtype), training=True)
    assert y.dtype == dtype and layer.moving_mean.dtype == "float32"
    expected = reference(tf.cast(tf.cast(np.concatenate(every), dtype), "float32"), training=True)
    expect_close(tf.cast(y, "float32"), mine_of(expected, ROWS["uneven"]), rtol=2e-2, atol=2e-2)
    expect_same_statistics(layer, reference, rtol=1e-5, atol=1e-5)


def check_a_mean_far_from_zero():
    """The square of the mean is a million times the variance: in float32 a tenth of the variance would be left."""
    x = (np.random.default_rng(hvd.rank()).standard_normal((64, CHANNELS)) + 1000).astype("float32")
    layer = SyncBatchNormalization(momentum=0.0)
    layer(x, training=True)
    whole = hvd.allgather(tf.constant(x)).numpy().astype("float64")
    expect_close(layer.moving_mean.numpy(), whole.mean(0), rtol=1e-6, atol=0)
    expect_close(layer.moving_variance.numpy(), whole.var(0), rtol=2e-4, atol=0)


def check_a_constant_channel():
    layer = SyncBatchNormalization()
    x = tf.fill((4, CHANNELS), 0.1)
    y, dx, *_ = differentiate(layer, x, tf.ones_like(x)) if layer.build(x.shape) is None else ()
    assert abs(y.numpy()).max() < 1e-3 and np.isfinite(dx.numpy()).all()


def check_training_equals_one_model_on_the_whole_batch():
    """A small network, in a compiled step, with averaged gradients."""
    def make_model(norm):
        tf.keras.utils.set_random_seed(8)
        return tf.keras.Sequential([tf.keras.layers.Input((5, 5, 2)), tf.keras.layers.Conv2D(CHANNELS, 3), norm(),
                                    tf.keras.layers.ReLU(), tf.keras.layers.Conv2D(2, 2), norm(),
                                    tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])

    def step_of(model, average):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            for v, gradient in zip(model.trainable_variables, average(gradients)):
                v.assign_sub(0.1 * gradient)
        return step

    mine, reference = make_model(SyncBatchNormalization), make_model(plain)
    my_step = step_of(mine, lambda gradients: hvd._grouped_allreduce(gradients, op=hvd.Average))
    reference_step = step_of(reference, lambda gradients: gradients)
    for step in range(4):
        x = np.random.default_rng(step).standard_normal((hvd.size() * 4, 5, 5, 2)).astype("float32")
        reference_step(x)
        my_step(x[hvd.rank() * 4:hvd.rank() * 4 + 4])
    for weight, other in zip(mine.get_weights(), reference.get_weights()):
        expect_close(weight, other, rtol=1e-4, atol=2e-5)


def check_join(job):
    """A rank that has joined adds no values."""
    layer = SyncBatchNormalization(momentum=0.0, dtype="float64")
    for turn in range(hvd.rank() + 2):
        present = [rank for rank in range(hvd.size()) if rank + 2 > turn]
        whole = np.concatenate([batch(rank, turn, "2D", ROWS["even"]) for rank in present])
        layer(batch(hvd.rank(), turn, "2D", ROWS["even"]), training=True)
        expect_close(layer.moving_variance.numpy(), whole.var(0))
    job.join()


def check_inference_needs_no_other_rank(job):
    layer = SyncBatchNormalization()
    if hvd.rank() == 0:
        x = np.random.default_rng(0).standard_normal((2, CHANNELS)).astype("float32")
        expect_close(layer(x, training=False), x / 1.001 ** 0.5, rtol=1e-5)
        layer.trainable = False
        expect_close(layer(x, training=True), x / 1.001 ** 0.5, rtol=1e-5)
    job.barrier()


def check_one_request_a_layer():
    from lightcc.core import lib
    layer, x = SyncBatchNormalization(), tf.ones((2, CHANNELS))
    layer(x)
    before = lib.counters()["requests"]
    layer(x, training=True)
    assert lib.counters()["requests"] - before == (hvd.size() > 1)


def check_saving(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Input((CHANNELS,)), SyncBatchNormalization(momentum=0.5)])
    model(np.random.default_rng(hvd.rank()).standard_normal((4, CHANNELS)), training=True)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    assert type(loaded.layers[-1]) is SyncBatchNormalization and loaded.layers[-1].momentum == 0.5
    for weight, other in zip(loaded.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(weight, other)
    clone = tf.keras.models.clone_model(model)
    assert type(clone.layers[-1]) is SyncBatchNormalization


def check_errors():
    for fused in (True, None):
        with pytest.raises(ValueError, match="does not support fused=True"):
            SyncBatchNormalization(fused=fused)
    assert isinstance(SyncBatchNormalization(fused=False, name="n"), tf.keras.layers.BatchNormalization)
    with pytest.raises(ValueError, match="virtual_batch_size"):
        SyncBatchNormalization(virtual_batch_size=2)
    if hvd.size() > 1:
        with pytest.raises(tf.errors.FailedPreconditionError, match="disagree"):
            SyncBatchNormalization()(tf.ones((2, 2 + (hvd.rank() == 0))), training=True)


def check_a_keras_that_has_no_moments(monkeypatch):
    monkeypatch.delattr(next(cls for cls in tf.keras.layers.BatchNormalization.__mro__ if "_moments" in vars(cls)),
                        "_moments")
    with pytest.raises(NotImplementedError, match="does not know this Keras"):
        SyncBatchNormalization()


def check_xla_leaves_it_alone():
    if not IS_KERAS_3:
        pytest.skip("Keras 2 does not turn XLA on by itself")
    model = tf.keras.Sequential([tf.keras.layers.Input((CHANNELS,)), SyncBatchNormalization()])
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile(loss="mse", jit_compile=True)
    assert model.jit_compile is False


SESSION = """
import numpy as np, tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import lightcc.tensorflow.mpi_ops as hvd
from lightcc.tensorflow.sync_batch_norm import SyncBatchNormalization
from lightcc.tensorflow.util import tf_variable
hvd.init()
x = tf.compat.v1.placeholder(tf.float32, (None, 2))
layer = SyncBatchNormalization(momentum=0.0)
y = layer(x, training=True)
updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
assert len(updates) == 2, updates
layer(x, training=True)
assert len(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)) == 4
with tf.compat.v1.Session() as session:
    session.run(tf.compat.v1.global_variables_initializer())
    every = np.arange(8, dtype=np.float32).reshape(4, 2) ** 2
    for _ in range(2):
        session.run([y, updates], {x: every[hvd.rank()::2]})
    np.testing.assert_allclose(session.run(tf_variable(layer.moving_mean)), every.mean(0), rtol=1e-6)
    np.testing.assert_allclose(session.run(tf_variable(layer.moving_variance)), every.var(0), rtol=1e-6)
print("equal")
"""


@pytest.mark.parametrize("legacy", [False, True] if IS_KERAS_3 and HAS_TF_KERAS else [False])
def test_in_a_session(monkeypatch, legacy):
    """TensorFlow 1's way: the training step runs UPDATE_OPS. Keras 3 files nothing there itself."""
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1" if legacy else "0")
    assert ranks.run_script(SESSION, 2).count("equal") == 2


def check_a_graph_that_is_traced_in_a_world_that_may_grow(monkeypatch):
    """It exchanges, as the same graph does where more ranks are."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    layer = SyncBatchNormalization()
    layer.build((None, 3))
    traced = tf.function(lambda x: layer(x, training=True)).get_concrete_function(tf.TensorSpec((None, 3)))
    assert "HorovodAllreduce" in {operation.type for operation in traced.graph.get_operations()}

"""Callbacks, with Model.fit on ranks, for the Keras that is installed: Keras 3, tf_keras, Keras 2, Keras 3 on torch.

lightcc.keras and lightcc.tensorflow.keras differ in where they find Keras: one of them has all the checks, the other
one.
"""
import contextlib
import os

import numpy as np
import pytest
from kerases import HAS_TENSORFLOW, HAS_TF_KERAS, Kit

import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_with_tf_keras():
    ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


class Flavour(Kit):
    def __init__(self, stand_alone=False):
        super().__init__()
        if stand_alone:
            import keras

            import lightcc.keras as hvd
            self.keras, self.hvd = keras, hvd
        self.callbacks = self.hvd.callbacks
        self.builds_before_training = not self.on_tensorflow  # all that it needs, by a look at the first batch
        self.ending = ".h5" if self.keras_is_213 else ".keras"  # which Keras 2.13's ModelCheckpoint cannot write

    def weights_like(self, rank, *shapes):
        random = np.random.default_rng(rank)
        return [random.standard_normal(shape).astype(np.float32) for shape in shapes]

    def model(self, optimizer=None, built=True, **options):
        """A linear model of 3 inputs; its weights are this rank's own."""
        layers = self.keras.layers
        model = self.keras.Sequential(([layers.Input((3,))] if built else []) + [layers.Dense(2)])
        if built:
            model.set_weights(self.weights_like(self.hvd.rank(), (3, 2), (2,)))
        model.compile(optimizer=optimizer or self.keras.optimizers.SGD(0.0), loss="mse", **options)
        return model

    def fit(self, model, callbacks=(), epochs=1, steps=2, **options):
        x, y = self.weights_like(100 + self.hvd.rank(), (4 * steps, 3), (4 * steps, 2))
        return model.fit(x, y, batch_size=4, epochs=epochs, callbacks=list(callbacks), verbose=0, shuffle=False,
                         **options).history

    def recorder(self, read, when="begin"):
        """A callback that keeps read(model) of each batch; in .seen."""
        class Recorder(self.keras.callbacks.Callback):
            seen = []

            def on_train_batch_begin(self, batch, logs=None):
                if when == "begin":
                    self.seen.append(read(self.model))

            def on_train_batch_end(self, batch, logs=None):
                if when == "end":
                    self.seen.append(read(self.model))
        return Recorder()

    def rate(self, model):
        return float(model.optimizer.learning_rate.numpy())


@pytest.fixture
def flavour(job):
    return Flavour()


def get_weights(model):
    return [w.copy() for w in model.get_weights()] if model.built else []


def state_of(optimizer):
    variables = optimizer.variables
    return [v.numpy() for v in (variables if isinstance(variables, list) else variables())]


def expect_equal(values, expected):
    assert len(values) == len(expected)
    for value, other in zip(values, expected):
        np.testing.assert_array_equal(value, other)


def expect_same_on_ranks(job, values):
    for other in job.allgather_object(values):
        expect_equal(values, other)


@pytest.mark.skipif(os.environ.get("TF_USE_LEGACY_KERAS") == "1", reason="the Keras that stands alone is another one")
def check_stand_alone_keras(job, tmp_path):
    flavour = Flavour(stand_alone=True)
    callbacks, model = flavour.callbacks, flavour.model(flavour.keras.optimizers.SGD(0.1, momentum=0.9))
    best = callbacks.BestModelCheckpoint("loss")
    best.filepath = str(tmp_path / "best") + flavour.ending
    history = flavour.fit(model, [
        callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[model.layers[-1].bias]),
        callbacks.MetricAverageCallback(), callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
        callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1), best], epochs=2)
    assert history["lr"] == pytest.approx([0.1, 0.05])
    assert all(one == history["loss"] for one in job.allgather_object(history["loss"]))
    assert os.path.exists(best.filepath)
    with pytest.raises(TypeError):
        callbacks.BestModelCheckpoint(save_weights_only=True)  # as in horovod.keras


# The broadcast

@pytest.mark.parametrize("root", ["first", "last"])
def check_a_built_model_is_equal_before_the_first_batch(flavour, root):
    root = 0 if root == "first" else flavour.hvd.size() - 1
    model, recorder = flavour.model(), flavour.recorder(get_weights)
    flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(root), recorder])
    expected = flavour.weights_like(root, (3, 2), (2,))
    expect_equal(recorder.seen[0], expected)
    expect_equal(model.get_weights(), expected)


def check_a_model_that_is_built_by_its_first_batch(flavour, job):
    flavour.keras.utils.set_random_seed(flavour.hvd.rank())
    model = flavour.model(flavour.keras.optimizers.SGD(0.1), built=False)
    recorder = flavour.recorder(get_weights)
    flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0), recorder])
    expect_same_on_ranks(job, recorder.seen[-1])
    assert not np.allclose(recorder.seen[-1][0], 0)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def check_what_only_the_root_has_loaded(flavour, job, name, built):
    """The first step starts from its weights and slots, whether the others have a model and slots or not."""
    root = flavour.hvd.size() - 1
    for family in flavour.families:
        optimizer = getattr(family, name)(learning_rate=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
        model = flavour.model(optimizer, built=built or flavour.hvd.rank() == root)
        if flavour.hvd.rank() == root:
            flavour.fit(model, steps=5)
        weights, state = flavour.recorder(get_weights), flavour.recorder(lambda model: state_of(model.optimizer))
        flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(root), weights, state], steps=1)
        expect_same_on_ranks(job, weights.seen[0])
        expect_same_on_ranks(job, state.seen[0])
        assert any(value.size == 1 and value == 5 for value in state.seen[0])
        assert any(value.shape == (3, 2) and value.any() for value in state.seen[0])
        expect_same_on_ranks(job, get_weights(model))


def check_a_model_that_only_the_root_can_build(flavour, job):
    class Mine(flavour.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = flavour.keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def get_build_config(self):
            return None

    model = Mine()
    model.compile(optimizer=flavour.keras.optimizers.SGD(0.1), loss="mse")
    if flavour.hvd.rank() == 0:
        model(flavour.tensor(np.ones((1, 3))))
    expected = contextlib.nullcontext() if flavour.hvd.rank() == 0 or flavour.builds_before_training else pytest.warns(
        UserWarning, match="Call the model on a batch before fit")
    with expected:
        flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0)], steps=1)
    expect_same_on_ranks(job, get_weights(model))


def check_each_fit_begins_with_a_broadcast(flavour, job):
    model, callback = flavour.model(), flavour.callbacks.BroadcastGlobalVariablesCallback(0)
    for turn in range(2):
        model.set_weights(flavour.weights_like(flavour.hvd.rank() + 10 * turn, (3, 2), (2,)))
        flavour.fit(model, [callback])
        expect_equal(model.get_weights(), flavour.weights_like(10 * turn, (3, 2), (2,)))
    flavour.keras.utils.set_random_seed(flavour.hvd.rank())
    model = flavour.model(built=False)
    flavour.fit(model, [callback])
    expect_same_on_ranks(job, model.get_weights())


@pytest.mark.parametrize("how", ["argument", "method"])
def check_local_variables_stay(flavour, how):
    model = flavour.model(flavour.keras.optimizers.SGD(0.0, momentum=0.9))
    bias = model.layers[-1].bias
    callback = flavour.callbacks.BroadcastGlobalVariablesCallback(0, "", [bias] if how == "argument" else None)
    if how == "method":
        callback.register_local_var(bias)
    flavour.fit(model, [callback])
    expect_equal(model.get_weights(), [flavour.weights_like(0, (3, 2), (2,))[0],
                                       flavour.weights_like(flavour.hvd.rank(), (3, 2), (2,))[1]])


def check_local_variables_of_another_kind(flavour):
    for wrong in (["kernel"], [flavour.model().layers[-1]], [np.zeros(2)]):
        with pytest.raises(ValueError, match="must be a tf.Variable or a keras.Variable"):
            flavour.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=wrong)


def check_other_state_stays(flavour, job):
    """Metrics and seeds: dropout is to differ between the ranks."""
    if not flavour.is_3:
        pytest.skip("Keras 2 does not list them with the variables")
    keras = flavour.keras
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dropout(0.5, seed=flavour.hvd.rank()),
                              keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    losses = flavour.recorder(lambda model: model.metrics[0].result(), "end")
    flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0), losses])
    seeds = job.allgather_object(model.layers[0].seed_generator.state.numpy().tolist())
    assert len({tuple(seed) for seed in seeds}) == flavour.hvd.size()
    assert len(set(job.allgather_object(float(losses.seen[0])))) == flavour.hvd.size()


def check_accumulated_gradients_stay(flavour, job):
    if not flavour.is_3:
        pytest.skip("Keras 2's optimizers do not accumulate")
    optimizer = flavour.keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    seen = flavour.recorder(lambda model: optimizer._accumulated_gradients[0].numpy())
    model = flavour.model(optimizer)
    optimizer.build(model.trainable_variables)
    flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0), seen])
    every = job.allgather_object(seen.seen[1].tolist())
    assert seen.seen[1].any() and all(every.count(one) == 1 for one in every)


def check_models_that_differ(flavour):
    """Every rank is told, and none waits for another."""
    if flavour.hvd.size() == 1:
        return
    keras, last = flavour.keras, flavour.hvd.size() - 1
    units = 3 if flavour.hvd.rank() == last else 2
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    found = rf"number 0 is float32 of shape \(3, 2\) on rank 0 and float32 of shape \(3, 3\) on rank {last}"
    with pytest.raises(ValueError, match=found):
        flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0)])
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, use_bias=units == 2)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(ValueError, match=rf"rank 0 has \d+ and rank {last} has \d+\. Build the same model"):
        flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint32", "complex64"])
def check_variables_of_other_dtypes(flavour, dtype):
    from lightcc._keras import values
    if dtype == "complex64" and flavour.is_3:
        pytest.skip("Keras 3 has no complex variables")
    weight = flavour.keras.layers.Dense(1).add_weight(shape=(3,), dtype=dtype, initializer="zeros", trainable=False,
                                                      name="w")
    start = values.read(None, [weight])[0]
    assert str(start.dtype) == (dtype if "uint32" != dtype or HAS_TENSORFLOW else "int64")  # torch's
    values.write(None, [weight], [(start + flavour.hvd.rank() + 1).astype(start.dtype)])
    values.broadcast(None, [weight], 0, "dtypes")
    read = values.read(None, [weight])[0]
    assert read.dtype == start.dtype and (read.astype("complex64") == 1).all()


@pytest.mark.parametrize("jit_compile", ["auto", True])
def check_xla_is_turned_off(flavour, jit_compile, monkeypatch):
    if not flavour.is_3 or not flavour.on_tensorflow:
        pytest.skip("only Keras 3 turns XLA on by itself, and torch.compile does no harm")
    import tensorflow as tf
    with monkeypatch.context() as patch:  # "auto" is True where there is a GPU
        patch.setattr(tf.config, "list_physical_devices", lambda kind=None: [tf.config.PhysicalDevice("0", "GPU")])
        model = flavour.model(jit_compile=jit_compile)
    assert model.jit_compile is True
    with pytest.warns(UserWarning, match="jit_compile is turned off"):
        flavour.fit(model, [flavour.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert model.jit_compile is False


# Metrics

def check_metrics_are_averaged_in_place(flavour):
    rank, size = flavour.hvd.rank(), flavour.hvd.size()
    logs = {"loss": float(rank), "count": rank, "accuracy": np.float32(2 * rank), "vector": np.array([rank, 1.0]),
            "text": f"rank {rank}", "nothing": None}
    if rank % 2:
        logs = dict(reversed(list(logs.items())))
    assert flavour.callbacks.MetricAverageCallback().on_epoch_end(0, logs) is None
    mean = (size - 1) / 2
    assert (logs["loss"], logs["count"], logs["accuracy"]) == (mean, mean, 2 * mean)
    assert type(logs["loss"]) is type(logs["accuracy"]) is float
    np.testing.assert_array_equal(logs["vector"], [mean, 1.0])
    assert (logs["text"], logs["nothing"]) == (f"rank {rank}", None)
    flavour.callbacks.MetricAverageCallback().on_epoch_end(1)


def check_callbacks_behind_it_see_the_averages(flavour, job):
    class Reader(flavour.keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.logs = []

        def on_epoch_end(self, epoch, logs=None):
            self.logs.append(dict(logs))
    before, after, model = Reader(), Reader(), flavour.model(flavour.keras.optimizers.SGD(0.01), metrics=["mae"])
    x, y = flavour.weights_like(7 + flavour.hvd.rank(), (4, 3), (4, 2))
    history = flavour.fit(model, [before, flavour.callbacks.MetricAverageCallback(), after], epochs=2,
                          validation_data=(x, y))
    for mine, logs in zip(before.logs, after.logs):
        assert {"loss", "mae", "val_loss", "val_mae"} <= set(logs)
        every = job.allgather_object(mine)
        for name in logs:
            assert logs[name] == pytest.approx(np.mean([one[name] for one in every]), rel=1e-12)
    assert history["val_loss"] == [logs["val_loss"] for logs in after.logs]


def check_metrics_that_differ(flavour):
    if flavour.hvd.size() == 1:
        return
    logs = {"loss": 1.0, **({"val_loss": 2.0} if flavour.hvd.rank() == 0 else {})}
    with pytest.raises(ValueError, match=r"rank 0 has \['loss', 'val_loss'\], rank 1 has \['loss'\]"):
        flavour.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs["loss"] == 1.0


# The learning rate

def rates(flavour, *callbacks, epochs=4, steps=3, **options):
    """The learning rate of each batch, and "lr" in the history."""
    model, recorder = flavour.model(flavour.keras.optimizers.SGD(1.0, momentum=0.5)), None
    recorder = flavour.recorder(flavour.rate, "end")
    history = flavour.fit(model, [*callbacks, recorder], epochs=epochs, steps=steps, **options)
    return recorder.seen, history["lr"]


def check_schedule_with_a_number(flavour):
    schedule = flavour.callbacks.LearningRateScheduleCallback
    seen, lr = rates(flavour, schedule(0.8, 0.5, end_epoch=2), schedule(0.8, 0.25, start_epoch=2, end_epoch=3),
                     schedule(0.8, 2, start_epoch=3, staircase=False))
    assert lr == pytest.approx([0.4, 0.4, 0.2, 1.6])
    assert seen == pytest.approx(np.repeat(lr, 3))


def check_schedule_outside_its_epochs(flavour):
    seen, _ = rates(flavour, flavour.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=2))
    assert seen == pytest.approx([1.0] * 3 + [0.4] * 9)


def check_schedule_with_a_function(flavour):
    schedule = flavour.callbacks.LearningRateScheduleCallback
    seen, lr = rates(flavour, schedule(2.0, lambda epoch: 0.5 ** epoch))
    assert lr == pytest.approx([2.0, 1.0, 0.5, 0.25]) and seen == pytest.approx(np.repeat(lr, 3))
    seen, _ = rates(flavour, schedule(2.0, lambda epoch: 1 + epoch, staircase=False))
    assert seen == pytest.approx([2 + 2 * batch / 3 for batch in range(12)])
    seen, _ = rates(flavour, schedule(2.0, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=6))
    assert seen == pytest.approx([2 + 2 * (epoch + batch / 6) for epoch in range(4) for batch in range(3)])


def check_schedule_from_a_later_epoch(flavour):
    """As after resuming."""
    seen, _ = rates(flavour, flavour.callbacks.LearningRateScheduleCallback(2.0, lambda epoch: 0.5 ** epoch),
                    initial_epoch=2)
    assert seen == pytest.approx([0.5] * 3 + [0.25] * 3)


def check_schedule_errors(flavour):
    schedule = flavour.callbacks.LearningRateScheduleCallback
    for make in (schedule, lambda initial_lr, _: flavour.callbacks.LearningRateWarmupCallback(initial_lr)):
        with pytest.raises(ValueError, match="initial_lr is required"):
            make(None, 0.5)
    callback = schedule(0.1, lambda epoch: epoch, staircase=False)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="Give steps_per_epoch"):
        callback.on_train_begin()
    callback = schedule(0.1, 0.5, staircase=False)  # which needs no steps
    callback.set_params({"steps": None})
    callback.on_train_begin()


def check_warmup(flavour, capsys):
    size, warmup = flavour.hvd.size(), flavour.callbacks.LearningRateWarmupCallback
    seen, lr = rates(flavour, warmup(0.6, warmup_epochs=2, verbose=1))
    expected = [0.6 * (1 + (size - 1) * min(batch + 1, 6) / 6) / size for batch in range(12)]
    assert seen == pytest.approx(expected, rel=1e-6)
    assert lr[1:] == pytest.approx([0.6] * 3)
    printed = capsys.readouterr().out
    assert printed.count("warmup") == 1 and "Epoch 2: finished gradual learning rate warmup to 0.6." in printed
    rates(flavour, warmup(0.6, warmup_epochs=2))
    assert "warmup" not in capsys.readouterr().out


RATES = [0.1, 0.1, 0.05, 0.2, 0.2]


def velocities(momentum, corrected, nesterov):
    """A weight that starts at 0 and whose gradient is always 1: what it is after each step."""
    weight, velocity, old, seen = 0.0, 0.0, 1.0, []
    for rate in RATES:
        velocity *= rate / old if corrected else 1
        velocity, old = momentum * velocity - rate, rate
        weight += momentum * velocity - rate if nesterov else velocity
        seen.append(weight)
    return seen


def optimizers(flavour):
    """SGD as each family of the flavour has it."""
    found = {"new": flavour.keras.optimizers.SGD}
    if not flavour.is_3:
        found["legacy"] = flavour.keras.optimizers.legacy.SGD
    return found


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def check_momentum_correction(flavour, nesterov, corrected, run_eagerly):
    """Also in a compiled step, which would not see a new factor."""
    keras = flavour.keras
    for family, make in optimizers(flavour).items():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros",
                                                                                use_bias=False)])
        model.compile(optimizer=make(learning_rate=1.0, momentum=0.9, nesterov=nesterov), run_eagerly=run_eagerly,
                      loss=lambda truth, y: y)  # its gradient is 1 if the input is
        schedule = flavour.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: RATES[round(epoch * 5)],
                                                                  staircase=False, momentum_correction=corrected)
        recorder = flavour.recorder(lambda model: float(model.get_weights()[0].item()), "end")
        model.fit(np.ones((5, 1)), np.ones((5, 1)), batch_size=1, epochs=1, verbose=0, callbacks=[schedule, recorder])
        assert recorder.seen == pytest.approx(velocities(0.9, corrected, nesterov), rel=1e-5), family


def check_momentum_that_holds_no_rate(flavour):
    """Adam's is of gradients alone; RMSprop's is as SGD's."""
    keras = flavour.keras
    for make, scaled in ((keras.optimizers.Adam, False), (keras.optimizers.RMSprop, True)):
        optimizer = make(learning_rate=1.0, **({"momentum": 0.9} if scaled else {}))
        model = flavour.model(optimizer)
        flavour.fit(model)
        before = state_of(optimizer)
        callback = flavour.callbacks.LearningRateScheduleCallback(0.5, 1)
        callback.set_model(model)
        callback.on_batch_begin(0)
        after = state_of(optimizer)
        changed = [i for i, (a, b) in enumerate(zip(before, after)) if a.shape in ((3, 2), (2,)) and (a != b).any()]
        assert len(changed) == (2 if scaled else 0)
        for i in changed:
            np.testing.assert_allclose(after[i], before[i] / 2, rtol=1e-6)


def check_loss_scale_optimizer(flavour):
    keras = flavour.keras
    wrap = getattr(keras.mixed_precision, "LossScaleOptimizer", None) or keras.optimizers.LossScaleOptimizer
    model = flavour.model(wrap(keras.optimizers.SGD(1.0, momentum=0.9)))
    flavour.fit(model)
    inner = model.optimizer.inner_optimizer
    before = [v.numpy() for v in inner.momentums]
    callback = flavour.callbacks.LearningRateScheduleCallback(0.5, 1)
    callback.set_model(model)
    callback.on_batch_begin(0)
    assert float(inner.learning_rate.numpy()) == 0.5
    for velocity, old in zip(inner.momentums, before):
        np.testing.assert_allclose(velocity.numpy(), old / 2, rtol=1e-6)


# The best model

def check_best_model(flavour, tmp_path):
    callback = flavour.callbacks.BestModelCheckpoint(monitor="loss")
    model = flavour.model(flavour.keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="Set its attribute filepath"):
        flavour.fit(model, [callback])
    callback.filepath = str(tmp_path / "best") + flavour.ending

    class Losses(flavour.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = [3.0, 1.0, 2.0][epoch]
    weights = []
    keep = flavour.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(get_weights(model)))
    flavour.fit(model, [Losses(), callback, keep], epochs=3)
    expect_equal(flavour.keras.models.load_model(callback.filepath).get_weights(), weights[1])
    assert not np.array_equal(weights[1][0], weights[2][0])


def check_best_weights(flavour, tmp_path):
    if not HAS_TENSORFLOW:
        pytest.skip("horovod.keras has no save_weights_only")
    callback = flavour.callbacks.BestModelCheckpoint("loss", 0, True)
    callback.filepath = str(tmp_path / "best.weights.h5")
    model = flavour.model()
    flavour.fit(model, [callback])
    other = flavour.model()
    other.load_weights(callback.filepath)
    expect_equal(other.get_weights(), model.get_weights())


SESSION = """
import numpy as np, tensorflow as tf
tf.compat.v1.disable_eager_execution()
import lightcc.tensorflow.keras as hvd
from lightcc._keras import values
from lightcc.core.objects import allgather_object
keras = tf.keras
hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(2)])
model.compile(optimizer=keras.optimizers.legacy.SGD(1.0, momentum=0.9), loss="mse")
rates, weights = [], []
begin = keras.callbacks.LambdaCallback(on_batch_begin=lambda batch, logs: weights.append(model.get_weights()))
end = keras.callbacks.LambdaCallback(
    on_batch_end=lambda batch, logs: rates.append(keras.backend.get_value(model.optimizer.lr)))
history = model.fit(np.ones((4, 1)), np.full((4, 2), hvd.rank()), batch_size=1, epochs=2, verbose=0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1), begin, end]).history
for name, value in (("first", weights[0]), ("second", weights[1]), ("loss", [history["loss"]])):
    every = allgather_object(value)
    assert all(np.array_equal(a, b) for one in every for a, b in zip(one, every[0])), (name, every)
np.testing.assert_allclose(rates, [0.125, 0.15, 0.175, 0.2] + [0.2] * 4, rtol=1e-6)
before = model.get_weights()
values.multiply(keras.backend, model.weights, 0.5)
assert all(np.array_equal(a, b / 2) for a, b in zip(model.get_weights(), before))
print("seen", len(weights))
"""


def test_in_a_session(monkeypatch):
    """TensorFlow 1's way, which Keras 3 has left."""
    if not HAS_TENSORFLOW:
        pytest.skip("needs TensorFlow")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert ranks.run_script(SESSION, 2).count("seen 8") == 2

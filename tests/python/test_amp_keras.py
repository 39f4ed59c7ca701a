"""MixedPrecisionCallback on ranks, for the Keras that is installed: Keras 3 on TensorFlow or torch, Keras 2."""
import contextlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
from kerases import HAS_TF_KERAS, Kit

import ranks
from lightcc.amp import Always, AnyOf, HoldAfterLearningRateChange, Policy, Warmup
from lightcc.core import objects

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.tensorflow]
LEVELS = ("float32", "bfloat16")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_with_tf_keras():
    ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


class Listed(Policy):
    """The levels of the steps, as they stand in a list; `seen`: the losses of all ranks."""

    def __init__(self, *levels):
        self.steps, self.levels, self.seen = levels, tuple(dict.fromkeys(levels)), []

    def decide(self, state):
        self.seen.append((state.loss_step, state.loss, state.epoch, state.overflows))
        return self.steps[min(state.step, len(self.steps) - 1)]


@pytest.fixture(autouse=True)
def plain_afterwards(kit):
    yield
    set_global(kit, "float32")


def set_global(kit, policy):
    keras = kit.keras
    keras.config.set_dtype_policy(policy) if kit.is_3 else keras.mixed_precision.set_global_policy(policy)


def built(kit, optimizer=None, dtypes=None, float16=False, **options):
    """A model that can be switched, with a nested one and one layer with a policy of its own."""
    set_global(kit, "float32" if kit.is_3 else "mixed_float16" if float16 else "mixed_bfloat16")
    layers = kit.keras.layers
    inner = kit.keras.Sequential([layers.Input((5,)), layers.Dense(5, activation="tanh"), layers.LayerNormalization()])
    own = "float64" if kit.is_3 else "float32"
    spies = [] if dtypes is None else [spying(kit, dtypes)]
    model = kit.keras.Sequential([layers.Input((4,)), layers.Dense(5, name="first"), inner, *spies,
                                  layers.Dense(2, dtype=own, name="last")])
    random = np.random.RandomState(1)
    model.set_weights([random.standard_normal(weight.shape) for weight in model.get_weights()])
    optimizer = optimizer or kit.distributed(kit.keras.optimizers.SGD(0.01))
    model.compile(optimizer, kit.keras.losses.MeanSquaredError(), **options)
    return model


def spying(kit, dtypes):
    class Spy(kit.keras.layers.Layer):
        def call(self, x):
            dtypes.append(str(getattr(x.dtype, "name", x.dtype)).split(".")[-1])
            return x
    return Spy(name="spy")


def policies(model):
    return [layer.dtype_policy.name for layer in model._flatten_layers()]


def expect_same_weights_on_all_ranks(model):
    mine = [weight.tobytes() for weight in model.get_weights()]
    assert all(theirs == mine for theirs in objects.allgather_object(mine))
    assert all(str(getattr(w.dtype, "name", w.dtype)) in ("float32", "float64") for w in model.weights)


def check_fit_switches_and_leaves_a_plain_model(kit):
    dtypes = []
    model = built(kit, dtypes=dtypes)
    before, config = policies(model), model.get_config()
    policy = Listed("float32", "bfloat16", "bfloat16", "float32", "bfloat16")
    callback = kit.hvd.callbacks.MixedPrecisionCallback(policy)
    during = []

    class Look(kit.keras.callbacks.Callback):  # what other callbacks save is the plain model
        def on_train_batch_end(self, batch, logs=None):
            during.append(policies(model))

    dtypes.clear()
    kit.fit_mine(model, 3, callbacks=[callback, Look()], validation_data=kit.data(1))
    assert callback.history().levels() == ["float32", "bfloat16", "bfloat16", "float32"] + ["bfloat16"] * 5
    assert policies(model) == before and all(its == before for its in during) and model.get_config() == config
    if kit.on_tensorflow:  # a trace of each level, and one of the validation
        runs = [dtype for i, dtype in enumerate(dtypes) if i == 0 or dtype != dtypes[i - 1]]
        assert runs in (["float32", "bfloat16", "float32"], ["float32", "bfloat16"]) and len(dtypes) <= 5
    else:
        assert [dtype for dtype in dtypes if dtype != "float32"] == ["bfloat16"] * 7
    expect_same_weights_on_all_ranks(model)
    assert not {"train_step", "compute_loss"} & {*vars(model)}
    traced = len(dtypes)
    kit.fit_mine(model, 2, callbacks=[callback])  # goes on, by the functions that there are
    assert callback.history().steps == {"float32": 2, "bfloat16": 13}
    if kit.on_tensorflow:
        assert len(dtypes) == traced
    model.compile(kit.distributed(kit.keras.optimizers.SGD(0.0)), "mse")
    frozen = model.get_weights()
    kit.fit_mine(model, callbacks=[callback])  # and not with the optimizer of before
    assert all((a == b).all() for a, b in zip(frozen, model.get_weights()))


def check_full_precision_is_that_of_a_plain_model(kit):
    plain = built(kit) if kit.is_3 else None
    switched = built(kit)
    callback = kit.hvd.callbacks.MixedPrecisionCallback(AnyOf(Warmup(100), Always("bfloat16")))
    kit.fit_mine(switched, 2, callbacks=[callback])
    assert callback.history().steps == {"float32": 6}
    if plain is not None:
        kit.fit_mine(plain, 2)
        assert all((a == b).all() for a, b in zip(plain.get_weights(), switched.get_weights()))


def check_the_policy_sees_each_batch_and_the_learning_rate(kit):
    policy = Listed(*["float32"] * 9, "bfloat16")
    model = built(kit, kit.distributed(kit.keras.optimizers.SGD(0.0)))
    callback = kit.hvd.callbacks.MixedPrecisionCallback(policy)
    logs = kit.fit_mine(model, 2, callbacks=[callback]).history["loss"]
    seen = dict(entry[:2] for entry in policy.seen if entry[1] is not None)
    means = np.mean(objects.allgather_object(logs), axis=0)
    assert [*seen] == [0, 1, 2, 3, 4]
    # The weights stay, so that a batch has the same loss in both epochs, and an epoch's is the mean of its batches.
    np.testing.assert_allclose(np.mean([seen[0], seen[1], seen[2]]), means[0], rtol=1e-5)
    np.testing.assert_allclose([seen[3], seen[4]], [seen[0], seen[1]], rtol=1e-6)
    assert [entry[2] for entry in policy.seen] == [0, 0, 0, 0, 1, 1, 1]

    hold = kit.hvd.callbacks.MixedPrecisionCallback(HoldAfterLearningRateChange(hold_step=2))
    rates = kit.hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch)
    kit.fit_mine(built(kit), 3, callbacks=[rates, hold])  # the rate is new in steps 3 and 6
    assert hold.history().levels() == [*["bfloat16"] * 4, *["float32"] * 2, "bfloat16", *["float32"] * 2]


def check_train_on_batch(kit):
    model = built(kit)
    callback = kit.hvd.callbacks.MixedPrecisionCallback(Listed("float32", "bfloat16", "float32"))
    callbacks = kit.keras.callbacks.CallbackList([callback], model=model)
    x, y = map(kit.my_part, kit.data(1))
    callbacks.on_train_begin()
    for step in range(4):
        callbacks.on_train_batch_begin(step)
        logs = model.train_on_batch(x, y, return_dict=True)
        callbacks.on_train_batch_end(step, logs)
    callbacks.on_train_end()
    assert callback.history().levels() == ["float32", "bfloat16", "float32", "float32"]
    expect_same_weights_on_all_ranks(model)


def check_executions_of_several_steps_and_layers_to_keep(kit):
    dtypes = []
    model = built(kit, dtypes=dtypes, **({"steps_per_execution": 3} if kit.on_tensorflow else {}))
    callback = kit.hvd.callbacks.MixedPrecisionCallback(Listed("float32", "bfloat16", "float32"), keep=["spy", model])
    kit.fit_mine(model, 2, callbacks=[callback])
    assert sum(callback.history().steps.values()) == (2 if kit.on_tensorflow else 6)
    if kit.is_3:
        assert {*dtypes} == {"float32"}


def check_an_overflow_on_one_rank(kit):
    keras = kit.keras
    optimizer = kit.distributed(keras.optimizers.SGD(0.01))
    scaling = (keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if kit.is_3 else
               keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0))
    model = built(kit, scaling, float16=True)
    policy = Listed(*["float16"] * 2, "float32", "float16")
    callback = kit.hvd.callbacks.MixedPrecisionCallback(policy, dtype="float16")
    x, y = kit.my_part(kit.data()[0]), kit.my_part(kit.data()[1])
    if kit.hvd.rank() == 1:
        x[len(x) // 3] = math.inf  # the first sample of the second batch
    weights = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(model.get_weights()[0])

    model.fit(x, y, len(x) // 3, epochs=2, shuffle=False, verbose=0, callbacks=[callback, Look()])
    moved = [not (a == b).all() for a, b in zip(weights, weights[1:])]
    assert moved == [False, True, True, False, True]
    assert policy.seen[-1][3] == 2
    expect_same_weights_on_all_ranks(model)


def check_an_overflow_is_told_from_another_loss_scale(kit):
    """A restored optimizer has a lower one before a step of the next fit."""
    keras, optimizer = kit.keras, kit.distributed(kit.keras.optimizers.SGD(0.01))
    scaling = (keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if kit.is_3 else
               keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0))
    model = built(kit, scaling, float16=True)
    policy = Listed("float16")
    callback = kit.hvd.callbacks.MixedPrecisionCallback(policy, dtype="float16")
    kit.fit_mine(model, callbacks=[callback])
    (scaling.dynamic_scale if kit.is_3 else scaling._loss_scale._current_loss_scale).assign(16.0)
    kit.fit_mine(model, callbacks=[callback])
    assert policy.seen[-1][3] == 0


def check_state_goes_on(kit):
    def made():
        model = built(kit)
        return model, kit.hvd.callbacks.MixedPrecisionCallback(HoldAfterLearningRateChange(hold_step=4))

    rates = kit.hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch)
    model, callback = made()
    assert callback.state_dict() == {}
    kit.fit_mine(model, 2, callbacks=[rates, callback])
    other, again = made()
    again.load_state_dict(callback.state_dict())
    kit.fit_mine(other, 4, initial_epoch=2, callbacks=[rates, again])
    kit.fit_mine(model, 4, initial_epoch=2, callbacks=[rates, callback])
    assert again.history() == callback.history()
    assert again.history().levels()[4:8] == ["float32"] * 4


def check_each_level_has_its_compression_on_the_wire(kit, monkeypatch):
    sent = []

    def noting(name):
        plain = kit.hvd.Compression.none

        class Noting(plain):
            @staticmethod
            def compress(tensor):
                sent.append(name)
                return plain.compress(tensor)
        return Noting

    model = built(kit, kit.distributed(kit.keras.optimizers.SGD(0.01), compression=noting("own")))
    make, low = kit.hvd.callbacks.MixedPrecisionCallback, {"bfloat16": noting("low")}
    kit.fit_mine(model, callbacks=[make(Listed("float32", "bfloat16"), compression=low)])
    assert {*sent} == {"own", "low"}
    sent.clear()
    kit.fit_mine(model)  # without the callback it is the model's own again
    assert {*sent} == {"own"}
    if kit.on_tensorflow:  # two levels of one dtype policy
        import tensorflow as tf
        with monkeypatch.context() as patched:
            patched.setattr("lightcc._keras.amp._available", lambda keras: dict.fromkeys(("float32", "tf32"), ""))
            kit.fit_mine(model, callbacks=[make(Listed("float32", "tf32"), compression={"tf32": noting("tf32")})])
        tf.config.experimental.enable_tensor_float_32_execution(True)
        assert {*sent} == {"own", "tf32"}
    for wrong, message in (({"float16": low}, "compression has 'float16', and the policy's levels are float32, bfl"),
                           ({"bfloat16": kit.hvd.Compression.topk()}, "keeps what it leaves behind")):
        with pytest.raises(ValueError, match=message):
            kit.fit_mine(built(kit), callbacks=[make(Listed("bfloat16", "float32"), compression=wrong)])


def check_the_program_of_the_page(kit):
    page = (Path(__file__).parents[2] / "docs" / "amp.md").read_text()
    program, = re.findall(r"```python\n(import keras .*?)```", page, re.DOTALL)
    if not kit.is_3:
        set_global(kit, "mixed_bfloat16")
    namespace = {}
    exec(program, namespace)
    assert namespace["precision"].history().steps == {"bfloat16": 16}


def check_an_elastic_state_has_it(kit):
    model = built(kit)
    callback = kit.hvd.callbacks.MixedPrecisionCallback(HoldAfterLearningRateChange(hold_step=4))
    state = kit.hvd.elastic.KerasState(model, precision=callback, batch=0)
    rates = kit.hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** epoch)
    kit.fit_mine(model, 2, callbacks=[rates, callback])
    assert callback._policy._left == 1
    state.restore()  # to before it had begun
    assert callback._policy._left == 0
    kit.fit_mine(model, callbacks=[callback])
    assert callback.history().steps == {"bfloat16": 3}
    state.commit()
    before = callback.history()
    kit.fit_mine(model, callbacks=[callback])
    state.restore()
    assert state.precision is callback and callback.history() == before
    state.sync()
    kit.fit_mine(model, callbacks=[callback])
    assert sum(callback.history().steps.values()) == 6 and "precision" in state.own_saved()
    state.precision = other = kit.hvd.callbacks.MixedPrecisionCallback(Always("float32"))
    kit.fit_mine(model, callbacks=[other])
    state.commit()
    kit.fit_mine(model, callbacks=[other])
    state.restore()
    assert state.precision is other and other.history().steps == {"float32": 3}


def check_wrong_arguments(kit):
    make = kit.hvd.callbacks.MixedPrecisionCallback
    with pytest.raises(ValueError, match="dtype='float32' must be"):
        make(Warmup(1), dtype="float32")
    with pytest.raises(ValueError, match="no history before training"):
        make(Warmup(1)).history()
    for policy, message in ((Always("fp8"), "may choose fp8, but Keras has no policy"),
                            (Always("tf32"), "may choose tf32, but it is for NVIDIA GPUs"),
                            (Always("float16"), "may choose float16, whose gradients need a loss scale")):
        with pytest.raises(ValueError, match=message):
            kit.fit_mine(built(kit), callbacks=[make(policy)])
    if not kit.is_3:
        set_global(kit, "float32")
        model = kit.model(kit.distributed())
        with pytest.raises(ValueError, match="built under the policy float32.*set_global_policy"):
            kit.fit_mine(model, callbacks=[make(Warmup(1))])


def check_a_fit_that_an_exception_ended(kit):
    model = built(kit)
    callback = kit.hvd.callbacks.MixedPrecisionCallback(Warmup(1))

    class Stop(kit.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError

    with contextlib.suppress(KeyError):
        kit.fit_mine(model, callbacks=[callback, Stop()])
    kit.fit_mine(model, callbacks=[callback])
    assert callback.history().steps == {"float32": 1, "bfloat16": 3}
    assert not {"train_step", "compute_loss"} & {*vars(model)}


def check_another_callback_after_an_exception(kit):
    dtypes, make = [], kit.hvd.callbacks.MixedPrecisionCallback
    model = built(kit, dtypes=dtypes)

    class Stop(kit.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError

    with contextlib.suppress(KeyError):
        kit.fit_mine(model, callbacks=[make(Always("bfloat16")), Stop()])
    dtypes.clear()
    kit.fit_mine(model, callbacks=[make(Always("float32"))])
    assert {*dtypes} == ({"float32"} if kit.is_3 else {"float32", "bfloat16"} & {*dtypes}) and dtypes[-1] == "float32"


def check_a_train_step_without_compute_loss(kit):
    class Own(type(built(kit))):
        def train_step(self, data):
            return {"loss": self._own_loss()}

        def _own_loss(self):
            return kit.keras.ops.sum(self.weights[0]) if kit.is_3 else kit.keras.backend.sum(self.weights[0])

    set_global(kit, "float32" if kit.is_3 else "mixed_bfloat16")
    model = Own([kit.keras.layers.Input((4,)), kit.keras.layers.Dense(2)])
    model.compile(kit.distributed(kit.keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(ValueError, match="Own.train_step does not call self.compute_loss"):
        kit.fit_mine(model, callbacks=[kit.hvd.callbacks.MixedPrecisionCallback(Warmup(1))])


def check_schedules_of_the_learning_rate(kit):
    for family in kit.families:
        rates = []

        class Look(Always):
            def decide(self, state):
                rates.append(state.learning_rates)  # noqa: B023
                return super().decide(state)

        schedule = kit.keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
        model = built(kit, kit.distributed(family.SGD(schedule)))
        kit.fit_mine(model, callbacks=[kit.hvd.callbacks.MixedPrecisionCallback(Look("bfloat16"))])
        assert [len(its) for its in rates] == [0, 1, 1, 1]
        np.testing.assert_allclose([its[0] / rates[1][0] for its in rates[1:]], [1, 0.5, 0.25], rtol=1e-5)


def test_the_kit_of_this_process():
    assert Kit().hvd.callbacks.MixedPrecisionCallback.__name__ == "MixedPrecisionCallback"

"""Compression.topk and int8 under the optimizers of Keras, on TensorFlow and on torch."""
import os
import tempfile
import warnings

import numpy as np
import pytest
from kerases import Kit
from nodes import SHAPES, begin, dense, end, gradient, left

import ranks

pytestmark = [pytest.mark.newest_tensorflow, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(autouse=True)
def nodes(job):
    begin()
    yield
    end()
    job.init()


def train(kit: Kit, optimizer, steps, apply, scale=1.0):
    """Variables that begin at zero, after so many steps of known gradients; SGD with rate 1."""
    variables = {name: kit.variable(np.zeros(SHAPES[name])) for name in SHAPES}
    kit.build(optimizer, list(variables.values()))
    for step in range(steps):
        apply(optimizer, [(scale * gradient(name, step), variable) for name, variable in variables.items()])
    return variables


def expect_total(kit, optimizer, variables, steps):
    saved = kit.hvd.gather_residuals(optimizer)
    behind = sorted(saved["tensors"].values(), key=lambda tensor: tensor["elements"])  # names are Keras's
    found = {tensor["elements"]: left({"tensors": {"": tensor}}, "", tensor["elements"]) for tensor in behind}
    for name, variable in variables.items():
        value = np.float64(kit.value(variable))
        total = found.get(value.size, np.zeros(value.size)).reshape(value.shape)
        np.testing.assert_array_equal(total - value, dense(name, range(steps)), name)
    assert len(behind) >= 2 and all(one.any() for one in found.values())


@pytest.mark.parametrize("options", ({}, {"groups": 1}), ids=("alone", "group"))
def check_nothing_is_lost(kit, options):
    optimizer = kit.distributed(op=kit.hvd.Sum, compression=kit.hvd.Compression.topk(0.01), **options)
    expect_total(kit, optimizer, train(kit, optimizer, 4, kit.apply), 4)
    stats = kit.hvd.compression_stats(optimizer)
    assert stats["dense"] == "" and 0.01 <= stats["density"] < 0.02


def check_state_goes_on_in_another_optimizer(kit):
    optimizer = kit.distributed(op=kit.hvd.Sum, compression=kit.hvd.Compression.topk(0.01))
    variables = train(kit, optimizer, 3, kit.apply)
    state = kit.hvd.gather_residuals(optimizer)
    other = kit.distributed(op=kit.hvd.Sum, compression=kit.hvd.Compression.topk(0.01))
    kit.hvd.load_compression_state(other, state)
    kit.build(other, list(variables.values()))
    kit.apply(other, [(gradient(name, 3), variable) for name, variable in variables.items()])
    expect_total(kit, other, variables, 4)


def check_two_optimizers_keep_their_own(kit):
    compression = kit.hvd.Compression.topk(0.01)
    one, two = (kit.distributed(op=kit.hvd.Sum, compression=compression) for _ in range(2))
    first, second = train(kit, one, 2, kit.apply), train(kit, two, 3, kit.apply)
    expect_total(kit, one, first, 2)
    expect_total(kit, two, second, 3)


def check_loss_scales(kit):
    compression = kit.hvd.Compression.topk(0.01)
    compression.loss_scale = lambda: 4.0
    optimizer = kit.distributed(op=kit.hvd.Sum, compression=compression)
    variables = train(kit, optimizer, 1, kit.apply, 4.0)
    saved = kit.hvd.gather_residuals(optimizer)
    for tensor in saved["tensors"].values():
        variable = next(v for v in variables.values() if kit.value(v).size == tensor["elements"])
        name = next(name for name, v in variables.items() if v is variable)
        np.testing.assert_array_equal(left({"tensors": {"": tensor}}, "", SHAPES[name]) - kit.value(variable) / 4.0,
                                      dense(name, [0]))


def check_a_model_trains(kit):
    keras, random = kit.keras, np.random.default_rng(5)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128, "tanh"), keras.layers.Dense(64)])
    model.set_weights([np.random.default_rng(i).standard_normal(weight.shape) * 0.1
                       for i, weight in enumerate(model.get_weights())])
    optimizer = kit.distributed(keras.optimizers.SGD(0.5), compression=kit.hvd.Compression.topk(0.05))
    model.compile(optimizer, "mse")
    xs = random.standard_normal((60 * kit.hvd.size(), 64)).astype(np.float32)
    ys = np.tanh(xs @ random.standard_normal((64, 64)).astype(np.float32) * 0.2)
    part = slice(kit.hvd.rank(), None, kit.hvd.size())
    history = model.fit(xs[part], ys[part], batch_size=25, epochs=25, verbose=0, shuffle=False)  # the last is smaller
    losses = history.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    stats = kit.hvd.compression_stats(optimizer)
    assert stats["gradient_bytes"] == 25 * 3 * 4 * 2 * 64 * 128 and stats["ratio"] < 0.2
    from lightcc.core import objects
    everyone = objects.allgather_object([weight.tobytes() for weight in model.get_weights()])
    assert all(weights == everyone[0] for weights in everyone)


def check_a_loaded_model_compresses(kit):
    keras = kit.keras
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128)])
    model.compile(kit.distributed(), keras.losses.MeanSquaredError())
    model.fit(np.ones((4, 64)), np.ones((4, 128)), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = kit.hvd.load_model(path, compression=kit.hvd.Compression.int8())
    loaded.fit(np.ones((4, 64)), np.ones((4, 128)), verbose=0)
    assert kit.hvd.compression_stats(loaded.optimizer)["gradient_bytes"] == 4 * 64 * 128


def check_one_warning_for_adam(kit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compression in (kit.hvd.Compression.topk(0.01), kit.hvd.Compression.int8()):
            optimizer = kit.distributed(kit.keras.optimizers.Adam(), compression=compression)
            train(kit, optimizer, 2, kit.apply)
    texts = [str(one.message) for one in caught if "adaptive" in str(one.message)]
    assert len(texts) == (kit.hvd.rank() == 0)


def check_the_switch(kit):
    begin(LIGHT_TOPK_ALLREDUCE="1", LIGHT_TOPK_RATIO="0.05")
    optimizer = kit.distributed(op=kit.hvd.Sum)
    expect_total(kit, optimizer, train(kit, optimizer, 2, kit.apply), 2)
    assert 0.05 <= kit.hvd.compression_stats(optimizer)["density"] < 0.06


def check_not_an_optimizer(kit):
    with pytest.raises(ValueError, match="give a DistributedOptimizer"):
        kit.hvd.compression_stats(kit.keras.optimizers.SGD(1.0))
    assert kit.hvd.compression_state(kit.distributed()) is None

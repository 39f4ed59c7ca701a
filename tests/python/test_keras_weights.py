"""Weights that differ between the ranks are found: hvd.check_weights and HOROVOD_CHECK_WEIGHTS, with every Keras."""
import numpy as np
import pytest
from kerases import HAS_TF_KERAS

import ranks
from lightcc.core import weights

EVERY = 2
pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    found = weights.knob
    monkeypatch.setattr(weights, "knob", lambda name: str(EVERY) if name == "HOROVOD_CHECK_WEIGHTS" else found(name))


@pytest.fixture(params=["compiled", "eager"])
def model(request, kit):
    return kit.model(kit.hvd.DistributedOptimizer(kit.keras.optimizers.SGD(1e-3)), run_eagerly=request.param == "eager")


def off(kit, variable):
    if kit.hvd.rank() == 1:
        variable.assign(variable + 1.0)


def check_weights_of_a_model(kit, model):
    kit.hvd.check_weights(model)
    variable = model.trainable_variables[0]
    off(kit, variable)
    with pytest.raises(RuntimeError, match=r"check_weights: .* 1 of \d parameters:\n  .*: rank 0 has .*; rank 1 has"):
        kit.hvd.check_weights(model)
    kit.hvd.check_weights(model.trainable_variables[1:])


def check_fit_finds_it(kit, model):
    """Both that training which is right goes on, and that it ends where weights have drifted apart."""
    kit.fit_mine(model, epochs=EVERY + 1)
    off(kit, model.trainable_variables[0])
    with pytest.raises(Exception, match=r"exchange \d+ of gradients: the ranks hold different weights") as error:
        kit.fit_mine(model, epochs=EVERY)
    assert error.type is RuntimeError or error.type.__name__ == "UnknownError"


def check_local_variables_are_left_out(kit):
    optimizer = kit.distributed()
    shared, own = kit.variable(np.ones(2)), kit.variable(np.full(2, kit.hvd.rank()))
    optimizer.register_local_var(own)
    kit.build(optimizer, [shared, own])
    for _ in range(2 * EVERY):
        kit.apply(optimizer, [(kit.tensor([1.0, 2.0]), shared), (kit.tensor([1.0, 2.0]), own)])

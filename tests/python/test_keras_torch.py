"""lightcc.keras where Keras runs on torch: no TensorFlow, and errors that say what there is no way for.

What it does there, the other files test_keras_... show, which run on torch where TensorFlow is absent.
"""
import subprocess
import sys

import kerases  # noqa: F401  not to be collected without Keras
import pytest
import torch  # noqa: F401  nor without torch

import ranks

pytestmark = pytest.mark.long

TRAIN = """
import sys
import numpy as np, keras
import lightcc.keras as hvd
hvd.init()
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
x = np.random.RandomState(hvd.rank()).standard_normal((8, 2)).astype("float32")
model.fit(x, x.sum(1), batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
every = np.asarray(hvd.allgather(model.get_weights()[0].reshape(1, -1)))
assert (every == every[0]).all() and every.any(), every
assert hvd.Compression.fp16.wire.is_floating_point  # of torch
assert not [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tf_keras", "jax")]
"""


@pytest.fixture(autouse=True)
def on_torch(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")


@pytest.mark.parametrize("np", (1, 2))
def test_training_without_tensorflow(np):
    ranks.run_script(TRAIN, np)


REFUSED = """
import keras, lightcc.keras as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
for call, message in (
        (lambda: hvd.broadcast_global_variables(0), "use hvd.callbacks.BroadcastGlobalVariablesCallback"),
        (lambda: optimizer._compute_gradients(None, []), "needs a tf.GradientTape")):
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"nothing said: {message}")
"""


def test_what_tensorflow_alone_has():
    ranks.run_script(REFUSED, 1)


def test_another_backend_is_an_error():
    program = "import keras; keras.backend.backend = lambda: 'jax'; import lightcc.keras"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=ranks.DEADLINE_S)
    assert "ImportError: lightcc.keras works with Keras on TensorFlow and on torch." in done.stderr
    assert "With KERAS_BACKEND=jax there is no place" in done.stderr


"""Metrics in Keras's logs, and in TensorBoard by TensorFlow's writers; steps of a graph, of which Python sees nothing.
"""
import importlib

import kerases  # noqa: F401  it says on which framework Keras runs
import numpy as np
import pytest

import ranks
from lightcc.core import metrics

keras, hvd = importlib.import_module("keras"), importlib.import_module("lightcc.keras")


@pytest.mark.parametrize("np", (2,))
def test_on_fresh_ranks(np):  # steps are told by what was reduced before
    ranks.run_checks(__file__, np)


def fitted(callbacks, epochs=2):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.ones((24, 4), np.float32)
    return model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks).history


def check_logs_of_an_epoch_have_what_it_added():
    hvd.init()
    history = fitted([hvd.callbacks.LightccMetricsCallback(["steps", "payload_bytes", "exposed_share", "ranks"])], 3)
    assert history["lightcc_steps"][1:] == [6.0, 6.0]  # of the first also what the optimizer's variables took
    assert history["lightcc_ranks"] == [2.0] * 3
    of_an_epoch = 6 * 4 * (4 * 8 + 8 + 8 + 1)
    assert all(added >= of_an_epoch for added in history["lightcc_payload_bytes"])
    assert all(0 < share <= 1 for share in history["lightcc_exposed_share"])


def check_names_that_are_no_metrics():
    with pytest.raises(ValueError, match="no metric is called waiting; there are steps, "):
        hvd.callbacks.LightccMetricsCallback(["steps", "waiting"])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="for TensorFlow's writers")
def check_writers_of_tensorflow(tmp_path):
    import tensorflow as tf

    from lightcc.tensorflow import write_metrics
    hvd.init()
    write_metrics(tf.summary.create_file_writer(str(tmp_path)), 7)
    file, = tmp_path.iterdir()
    found = {value.tag: event.step for event in tf.compat.v1.train.summary_iterator(str(file))
             for value in event.summary.value}
    assert set(found) >= {f"lightcc/{metric.name}" for metric in metrics.METRICS} and set(found.values()) == {7}
    with pytest.raises(TypeError, match="no add_scalar"):
        write_metrics(object(), 7)

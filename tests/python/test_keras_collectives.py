"""Collectives on values: numbers, lists, arrays and tensors, by both packages for Keras."""
import importlib

import numpy as np
import pytest
from kerases import HAS_TENSORFLOW, HAS_TF_KERAS

import ranks

pytestmark = pytest.mark.usefixtures("job")
PACKAGES = ["lightcc.keras", "lightcc.tensorflow.keras"] if HAS_TENSORFLOW else ["lightcc.keras"]


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


@pytest.fixture(params=PACKAGES)
def hvd(request, kit):
    return importlib.import_module(request.param)


@pytest.fixture(params=["number", "list", "array", "tensor"])
def value(request, kit):
    """Makes a value of the rank that it is given, and says what to expect of a number."""
    shape = {"number": (), "list": (1, 2), "array": (2, 1), "tensor": (1,)}[request.param]
    make = {"number": float, "list": lambda number: [[float(number)] * 2],
            "array": lambda number: np.full(shape, number, np.float64),
            "tensor": lambda number: kit.tensor([number])}[request.param]
    return make, lambda number: np.full(shape, number)


def check_allreduce(kit, hvd, value):
    make, expected = value
    total = sum(range(hvd.size()))
    cases = [({}, total / hvd.size()), ({"op": hvd.Sum}, total), ({"op": hvd.Average}, total / hvd.size()),
             ({"compression": hvd.Compression.fp16}, total / hvd.size()),
             ({"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 0.25}, total / 2)]
    for options, result in cases:
        reduced = kit.value(hvd.allreduce(make(hvd.rank()), name="value", **options))
        np.testing.assert_allclose(reduced, expected(result), rtol=1e-6)


def check_average(kit, hvd):
    """The deprecated form of op."""
    rank, size = hvd.rank(), hvd.size()
    with pytest.warns(DeprecationWarning):
        assert float(hvd.allreduce(float(rank), average=False)) == sum(range(size))
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(1.0, average=False, op=hvd.Sum)


def check_allgather(kit, hvd):
    mine = np.full((hvd.rank() + 1, 2), hvd.rank(), np.float32)
    np.testing.assert_array_equal(kit.value(hvd.allgather(mine)),
                                  np.concatenate([np.full((rank + 1, 2), rank) for rank in range(hvd.size())]))


def check_broadcast(kit, hvd, value):
    make, expected = value
    np.testing.assert_array_equal(kit.value(hvd.broadcast(make(hvd.rank()), hvd.size() - 1)), expected(hvd.size() - 1))


def check_reducescatter(kit, hvd):
    rows = np.arange(2.0 * hvd.size()) + hvd.rank()
    mean = np.arange(2.0 * hvd.size()) + (hvd.size() - 1) / 2
    mine = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    np.testing.assert_allclose(kit.value(hvd.reducescatter(rows)), mean[mine])
    np.testing.assert_allclose(kit.value(hvd.reducescatter(rows, op=hvd.Sum)), hvd.size() * mean[mine])


def check_names_of_a_graph(kit, hvd):
    """Eagerly there is no such thing as all variables of a graph."""
    with pytest.raises((RuntimeError, ValueError), match="broadcast_variables|BroadcastGlobalVariablesCallback|eager"):
        hvd.broadcast_global_variables(0)


def check_what_scripts_ask_for(hvd):
    assert hvd.is_initialized() and hvd.local_size() >= 1 and hvd.cross_size() >= 1
    assert hvd.rank() in range(hvd.size()) and (hvd.gloo_built() or hvd.mpi_built())
    hvd.init()  # again: nothing happens


def check_compression(hvd):
    """Of what float16 cannot hold."""
    assert float(hvd.allreduce(1 + 2 ** -12)) == 1 + 2 ** -12
    assert float(hvd.allreduce(1 + 2 ** -12, compression=hvd.Compression.fp16)) == 1


SESSION = """
import numpy as np, tensorflow as tf
tf.compat.v1.disable_eager_execution()
import lightcc.tensorflow.keras as hvd
hvd.init()
x = tf.compat.v1.get_variable("x", initializer=[1.0 + hvd.rank()])
session = tf.compat.v1.keras.backend.get_session()
session.run(tf.compat.v1.global_variables_initializer())
hvd.broadcast_global_variables(hvd.size() - 1)
assert session.run(x) == [hvd.size()]
gathered = hvd.allgather([hvd.rank()])
assert isinstance(gathered, np.ndarray) and gathered.tolist() == list(range(hvd.size()))
print("equal")
"""


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="graphs are TensorFlow's")
def test_in_a_session(monkeypatch):
    """TensorFlow 1's way, which Keras 3 has left: values are arrays then."""
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert ranks.run_script(SESSION, 2).count("equal") == 2

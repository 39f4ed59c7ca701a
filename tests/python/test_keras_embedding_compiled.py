"""keras.models.load_model of a model that was compiled with E.Optimizer: both optimizers come back with all that they
were, and training goes on as if nothing had happened, also on another number of ranks."""
import gc
import os

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc.tensorflow import embedding as of_tensorflow
from lightcc.tensorflow.compression import Compression

pytestmark = pytest.mark.usefixtures("job")
DIM = 3


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


ELSEWHERE = """
import os, sys
import numpy as np
from tensorflow import keras
import lightcc.tensorflow.keras as hvd
from lightcc.tensorflow.keras import embedding as E

hvd.init()
folder = os.environ["FOLDER"]
path = os.path.join(folder, "x.keras")
ids = np.random.default_rng(1).integers(9, size=(5, 12, 2))[:, hvd.rank()::hvd.size()]

def fit(model, steps):
    for step in steps:
        model.train_on_batch(ids[step], np.ones((len(ids[step]), 1)))

if os.environ["SAVES"] == "1":
    model = keras.Sequential([keras.layers.Input((2,), dtype="int64"), E.Embedding(3, name="user"),
                              keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.7)
    model.compile(E.Optimizer(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), E.SparseAdam(rate)), "mse")
    fit(model, [0, 1])
    model.save(path)
else:
    model = keras.models.load_model(path)
    assert int(model.optimizer.iterations) == int(model.optimizer.sparse.iterations) == 2
    assert model.get_layer(index=-3).table.stats()["steps"] == 2
fit(model, [2, 3, 4])
seen = model.predict_on_batch(np.arange(10).reshape(5, 2))
if os.environ["SAVES"] == "1" and hvd.rank() == 0:
    np.save(os.path.join(folder, "expected.npy"), seen)
elif os.environ["SAVES"] == "0":
    np.testing.assert_allclose(seen, np.load(os.path.join(folder, "expected.npy")), rtol=1e-4, atol=1e-6)
"""


def on_another_number_of_ranks(folder, **variables):
    for saves, np_ in ((1, 2), (0, 1), (0, 3)):
        ranks.run_script(ELSEWHERE, np_, FOLDER=str(folder), SAVES=str(saves), **variables)


def test_on_another_number_of_ranks(tmp_path):
    on_another_number_of_ranks(tmp_path)


if HAS_TF_KERAS:
    def test_on_another_number_of_ranks_with_tf_keras(tmp_path):
        on_another_number_of_ranks(tmp_path, TF_USE_LEGACY_KERAS="1")


def data():
    rng = np.random.default_rng(hvd.rank())
    return rng.integers(9, size=(6, 2)), rng.normal(size=(6, 1)).astype(np.float32)


def model_of(kit, E, optimizer, eagerly=True):
    keras = kit.keras
    model = keras.Sequential([keras.layers.Input((2,), dtype="int64"), E.Embedding(DIM, name="compiled"),
                              keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    return model


def decay(kit):
    return kit.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


def seen(model):
    return model.predict_on_batch(tf.reshape(tf.range(10), (5, 2)))


def train(model, steps=2):
    for _ in range(steps):
        model.train_on_batch(*data())


OPTIMIZERS = {
    "schedules": lambda kit, E: (kit.keras.optimizers.Adam(decay(kit), beta_1=0.8), E.SparseAdam(decay(kit), terms=9)),
    "rates": lambda kit, E: (kit.keras.optimizers.SGD(0.1, momentum=0.9), E.GroupAdam(0.2, beta_1=0.8, l1=1e-4)),
    "rowwise": lambda kit, E: (kit.keras.optimizers.RMSprop(0.01),
                               E.Adagrad(0.1, epsilon=1e-3, rowwise=True, initial_accumulator_value=0.2, op=hvd.Sum)),
    "lasso": lambda kit, E: (kit.keras.optimizers.Adagrad(0.1),
                             E.GroupAdagrad(0.1, l2=1e-3, l21=1e-4, initial_accumulator_value=0.3)),
    "lazy": lambda kit, E: (kit.keras.optimizers.Adam(0.1), E.LazyAdam(0.1, beta_2=0.99, epsilon=1e-5))}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def check_training_goes_on(kit, keras, E, folder, kind):
    dense, sparse = OPTIMIZERS[kind](kit, E)
    both, path = E.Optimizer(kit.hvd.DistributedOptimizer(dense), sparse), f"{folder}/x.keras"
    model = model_of(kit, E, both, eagerly=kind != "schedules")
    train(model)
    model.save(path)
    config = model.optimizer.get_config()
    train(model)
    expected, rule = seen(model), of_tensorflow.tables(model)[0].rule
    del model
    gc.collect()
    loaded = (kit.hvd if kind == "rates" else keras.models).load_model(path)
    assert loaded.optimizer.get_config() == config and type(loaded.optimizer.sparse) is type(sparse)
    assert int(loaded.optimizer.iterations) == int(loaded.optimizer.sparse.iterations) == 2
    train(loaded)
    np.testing.assert_array_equal(seen(loaded), expected)
    assert of_tensorflow.tables(loaded)[0].rule == rule


def check_rates_that_were_set(kit, keras, E, folder):
    """And the one that the callbacks' factors are for."""
    model = model_of(kit, E, E.Optimizer(keras.optimizers.SGD(0.5), E.SGD(0.25)))
    model.optimizer.learning_rate = 0.125
    model.optimizer.sparse.scale_rate(0.5)
    model.save(f"{folder}/x.keras")
    del model
    gc.collect()
    loaded = keras.models.load_model(f"{folder}/x.keras").optimizer
    assert float(loaded.learning_rate) == 0.125 and float(loaded.sparse.learning_rate.numpy()) == 0.125
    loaded.sparse.scale_rate(2.0)
    assert float(loaded.sparse.learning_rate.numpy()) == 0.5


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16, Compression.int8(),
                                         Compression.topk(0.1, warmup_steps=5)], ids=str)
def check_how_dense_gradients_travel(kit, keras, E, compression):
    """Keras's own class for one that is not distributed."""
    dense = kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), name="x", compression=compression, op=hvd.Sum,
                                         sparse_as_dense=True, groups=2)
    both = E.Optimizer(dense, E.SGD())
    again = type(both).from_config(both.get_config())
    assert again._distribution == both._distribution == dense._distribution
    plain = E.Optimizer(keras.optimizers.SGD(0.5), E.SGD())
    assert not hasattr(type(plain).from_config(plain.get_config()), "_distribution")


def check_what_a_file_cannot_say(kit, keras, E, folder):
    class Own(of_tensorflow.SGD):
        pass

    class Bare(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self):
            pass

        def __call__(self, step):
            return 0.1

    def distributed(**options):
        return kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    local = distributed()
    local.register_local_var(tf.Variable(1.0))
    sgd = keras.optimizers.SGD
    for dense, sparse, text in (
            (sgd(), Own(), "of a class of your own"), (sgd(), E.SGD(lambda step: 0.1), "learning rate of sparse"),
            (sgd(), E.SGD(Bare()), "learning rate of sparse.*no get_config"), (sgd(Bare()), E.SGD(), "dense"),
            (local, E.SGD(), "local layers"), (distributed(groups=[[tf.Variable(1.0)]]), E.SGD(), "groups of dense"),
            (distributed(compression=Compression.int8(lambda name, x: True)), E.SGD(), "compression of dense")):
        model = model_of(kit, E, E.Optimizer(dense, sparse))
        train(model, 1)
        with pytest.raises(ValueError, match=f"a file cannot say(.|\n)*{text}"):
            model.save(f"{folder}/x.keras")
        model.save_weights(f"{folder}/x.weights.h5")
        of_tensorflow.tables(model)[0].close()


def check_a_process_set(kit, keras, E):
    if hvd.size() == 1:
        return  # a set of one rank is the world
    both = hvd.add_process_set([0])
    dense = kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=both)
    with pytest.raises(ValueError, match="process_set of dense"):
        E.Optimizer(dense, E.SGD()).get_config()
    hvd.remove_process_set(both)


def check_a_plain_optimizer_in_an_older_file(kit, keras, E, folder):
    """It was saved as the dense one, and is refused at its first step, as any plain optimizer."""
    model = model_of(kit, E, keras.optimizers.SGD(0.1))
    model.save(os.path.join(folder, "x.keras"))
    del model
    gc.collect()
    with pytest.raises(ValueError, match=r"E\.Optimizer\(dense="):
        train(keras.models.load_model(os.path.join(folder, "x.keras")), 1)

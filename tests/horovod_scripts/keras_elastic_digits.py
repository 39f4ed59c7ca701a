"""A net learns handwritten digits while workers come and go: a Keras script for Horovod's elastic training, in the way
that Horovod's documentation shows.

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python keras_elastic_digits.py
"""
import argparse
import hashlib

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Elastic Keras digits with Horovod")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.002)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

digits = load_digits()
images, labels = (digits.images.reshape(-1, 64) / 16).astype("float32"), digits.target.astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images[:-300], labels[:-300])).repeat().shuffle(2000)
dataset = dataset.batch(args.batch_size)

model = tf.keras.Sequential([
    tf.keras.layers.Input((64,)),
    tf.keras.layers.Dense(64, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax"),
])

# Horovod: adjust the learning rate to the number of workers, and add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(args.lr * hvd.size()))
model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

# Horovod: initialize model and optimizer state, so that all workers can be synchronised.
model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    # Horovod: the number of workers has changed, and the learning rate with it.
    state.model.optimizer.learning_rate.assign(args.lr * hvd.size())
    # Horovod: new workers do this as they begin, so join them.
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)


state.register_reset_callbacks([on_state_reset])


class Progress(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch} workers {hvd.size()} loss {logs['loss']:.4f}", flush=True)


callbacks = [
    Progress(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]


@hvd.elastic.run
def train(state):
    # Horovod: adjust the number of steps and epochs to the workers and to what has been done.
    state.model.fit(dataset, steps_per_epoch=90 // hvd.size(), epochs=args.epochs - state.epoch, callbacks=callbacks,
                    verbose=0)


train(state)

accuracy = float(tf.reduce_mean(tf.cast(tf.argmax(model(images[-300:]), axis=1) == labels[-300:], tf.float32)))
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print(f"Rank {hvd.rank()} of {hvd.size()} parameters: {digest}", flush=True)
if hvd.rank() == 0:
    print(f"Test accuracy: {100 * accuracy:.2f}%", flush=True)

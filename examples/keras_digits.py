"""A small convolutional net learns to read handwritten digits with Keras: model.fit and Horovod's callbacks.

    lightccrun -np 2 python examples/keras_digits.py --output DIR
    python examples/keras_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rates) and fails unless it sees the same losses.
Keras 3 may run on TensorFlow or, with KERAS_BACKEND=torch, on torch; Keras 2 does as well. For Horovod the script would
differ in the import and the counters.
"""
import math
import os
import time

import numpy as np

import digits

for _threads in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(_threads, "1")  # the ranks share the cores
import keras  # noqa: E402

import lightcc.keras as hvd  # noqa: E402
from lightcc.core import lib  # noqa: E402  the counters

TEST_IMAGES = 288  # 2, 3, 4, 6, 8 or 9 ranks test as many each: then the mean of their accuracies is that of all
WARMUP_EPOCHS = 2
DECAY = 0.8  # of the learning rate, an epoch, after the warm-up
# Several processes add up a batch's gradients in another order than one does. In float32 that moves a loss by some
# 1e-7, and each step builds on the last: 2 to 4 ranks stayed within 3e-7 of one. Mistakes pass the bound: no broadcast
# at step 1, a sum for the average at step 2, velocities that a new learning rate leaves as they are at step 3.
LARGEST_DIFFERENCE = 5e-6  # of two losses, relative to the larger


class Shards(keras.utils.Sequence):
    """The images that this rank sees: of each step its part of a slice of the epoch's permutation. They depend on
    nothing else, so any number of ranks sees the same global batches."""

    def __init__(self, images, labels, batch, steps, seed):
        super().__init__()
        self.images, self.labels, self.batch, self.steps = images, labels, batch, steps
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.images))
        mine = np.array_split(order[step * self.batch:(step + 1) * self.batch], hvd.size())[hvd.rank()]
        return self.images[mine], self.labels[mine]

    def on_epoch_end(self):
        self.epoch += 1


class Losses(keras.callbacks.Callback):
    """After each step, the mean of the epoch's losses so far: of equal shards, so that of the global batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(hvd.allreduce(logs["loss"], name="loss")))


def net():
    """Two convolutions, two layers. No batch norm: its statistics would depend on how the batch is sharded."""
    layers = keras.layers
    return keras.Sequential([
        layers.Input((8, 8, 1)), layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.Conv2D(64, 3, strides=2, padding="same", activation="tanh"), layers.Flatten(),
        layers.Dense(128, activation="tanh"), layers.Dense(10)])


def warmup(rate, workers, steps_per_epoch):
    """From a rank's own learning rate to that of all. A reference run has fewer ranks than workers, so it must be told
    how the rate of theirs rose."""
    if workers == hvd.size():
        return hvd.callbacks.LearningRateWarmupCallback(rate, WARMUP_EPOCHS)
    return hvd.callbacks.LearningRateScheduleCallback(
        rate, lambda epoch: (1 + (workers - 1) * (epoch + 1 / steps_per_epoch) / WARMUP_EPOCHS) / workers,
        end_epoch=WARMUP_EPOCHS, staircase=False)


def train(settings, workers, path):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch; path: the best weights go
    there, with another suffix."""
    (images, labels), test = digits.load(settings["seed"], TEST_IMAGES)
    rows = np.eye(10, dtype=np.float32)  # one for each digit
    batch, rate = settings["batch_size"] * workers, settings["lr"] * workers
    steps_per_epoch = len(images) // batch
    epochs = settings["epochs"]
    if settings["steps"]:
        steps_per_epoch = min(steps_per_epoch, settings["steps"])
        epochs = math.ceil(settings["steps"] / steps_per_epoch)

    keras.utils.set_random_seed(settings["seed"] + hvd.rank())  # every rank starts elsewhere, until rank 0 sends
    model, losses = net(), Losses()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), metrics=["accuracy"],
                  loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1))
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        hvd.callbacks.MetricAverageCallback(),  # before callbacks that read metrics
        warmup(rate, workers, steps_per_epoch),
        hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: DECAY ** (epoch - WARMUP_EPOCHS + 1),
                                                   start_epoch=WARMUP_EPOCHS),
        losses]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(path.with_suffix(".weights.h5")), monitor="val_accuracy",
                                                         save_best_only=True, save_weights_only=True))
    mine = slice(hvd.rank(), None, hvd.size())
    before, begin = lib.counters(), time.perf_counter()
    # The shards are shuffled, so fit must not do it.
    shards = Shards(images, rows[labels], batch, steps_per_epoch, settings["seed"])
    history = model.fit(shards, epochs=epochs, shuffle=False, validation_data=(test[0][mine], rows[test[1][mine]]),
                        callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0).history
    seconds = time.perf_counter() - begin
    counted = {name: count - before[name] for name, count in lib.counters().items()}
    accuracies = [((i + 1) * steps_per_epoch, accuracy) for i, accuracy in enumerate(history["val_accuracy"])]
    return digits.outcome(settings, hvd.size(), seconds, len(losses.seen) * batch, TEST_IMAGES,
                          len(model.trainable_variables), counted, losses.seen, accuracies, rates=history["lr"])


def main():
    args = digits.arguments(__doc__, "keras", epochs=10, lr=0.01)
    hvd.init()
    digits.run(train, args, hvd.rank(), hvd.size(), LARGEST_DIFFERENCE)


if __name__ == "__main__":
    main()

"""Mixed precision that switches while a model is trained, with Keras: pytorch_amp.py, by model.fit and a callback.

    lightccrun -np 2 python examples/keras_amp.py --output DIR

Keras 3 may run on TensorFlow or, with KERAS_BACKEND=torch, on torch; Keras 2 does as well.
"""
import os

import diabetes
import numpy as np

for _threads in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(_threads, "1")  # the ranks share the cores
import keras  # noqa: E402

import lightcc.keras as hvd  # noqa: E402

if not hasattr(keras, "ops"):  # Keras 2 can cast only weights that were made under a mixed policy
    keras.mixed_precision.set_global_policy("mixed_bfloat16")


STEPS_PER_EPOCH = 10  # each with all samples


class Losses(keras.callbacks.Callback):
    """The loss of each step, out of the means that Keras gives."""

    def __init__(self):
        super().__init__()
        self.seen, self.before = [], 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = (batch + 1) * float(logs["loss"])
        self.seen.append(total - (self.before if batch else 0.0))
        self.before = total


def train(policy, seed, steps):
    x, y = diabetes.load(seed, hvd.rank(), hvd.size())
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential([layers.Input((10,)), layers.Dense(diabetes.HIDDEN, activation="relu"),
                              layers.Dense(diabetes.HIDDEN, activation="relu"), layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(diabetes.RATE)), "mse")
    precision, losses = hvd.callbacks.MixedPrecisionCallback(policy), Losses()
    model.fit(np.tile(x, (STEPS_PER_EPOCH, 1)), np.tile(y, (STEPS_PER_EPOCH, 1)), batch_size=len(x), shuffle=False,
              epochs=steps // STEPS_PER_EPOCH, verbose=0, callbacks=[
                  hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0), precision, losses,
                  keras.callbacks.LearningRateScheduler(lambda epoch, _: diabetes.rate_of(STEPS_PER_EPOCH * epoch))])
    return hvd.allreduce(np.array(losses.seen)).numpy().tolist(), precision.history().levels()


if __name__ == "__main__":
    hvd.init()
    diabetes.run(train, hvd, __doc__)

"""Keras on JAX learns to read handwritten digits, on as many processes as you like.

    lightccrun -np 2 python examples/jax_keras_digits.py
    python examples/jax_keras_digits.py

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. Keras spreads each batch over the devices of all
processes (keras.distribution.DataParallel), and XLA's sums of gradients run over lightcc. mpirun starts it as well.
"""
import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"
import lightcc.jax  # noqa: E402,I001  before Keras, which asks JAX for its devices
import keras  # noqa: E402

import digits  # noqa: E402

BATCH = 32  # images of a process and step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training set; default %(default)s")
    epochs = parser.parse_args().epochs
    rank, size = lightcc.jax.rank(), lightcc.jax.size()
    keras.utils.set_random_seed(42)  # the same on all processes: each makes the same weights
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    (images, labels), test = digits.load(42, test_images=288)
    kept = len(images) // (BATCH * size) * BATCH * size
    mine = slice(rank, kept, size)
    layers = keras.layers
    model = keras.Sequential([
        layers.Input((8, 8, 1)), layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"), layers.Flatten(),
        layers.Dense(128, activation="relu"), layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])
    model.fit(images[mine], labels[mine], batch_size=BATCH, epochs=epochs, verbose=2 if rank == 0 else 0)
    its = slice(rank, None, size)
    loss, accuracy = model.evaluate(test[0][its], test[1][its], batch_size=48, verbose=0)
    if rank == 0:
        print(f"{size} process(es): test accuracy {accuracy:.2%} of {len(test[1])} images, loss {loss:.4f}")


if __name__ == "__main__":
    main()

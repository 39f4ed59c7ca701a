"""A small convolutional net learns to read handwritten digits with JAX and optax, on as many processes as you like.

    lightccrun -np 2 python examples/jax_digits.py --output DIR
    python examples/jax_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The program is one for all devices: batches are spread
over a mesh, parameters are on each device, and XLA puts in the sums of gradients, which lightcc carries. mpirun starts
it as well, and so does python alone. The second command repeats in one process what the first did in two (the same
images in the same steps, the same learning rate) and fails unless it sees the same losses.
"""
import time

import lightcc.jax  # isort: skip  before jax

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import digits
from lightcc.core import lib  # the counters

# Several processes add up a batch's gradients in another order than one does. In float32 that moves a loss by some
# 1e-7, and each step builds on the last.
LARGEST_DIFFERENCE = 1e-5  # of two losses, relative to the larger


def new_parameters(key):
    """Two convolutions, two layers."""
    keys = jax.random.split(key, 4)
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "hidden": (64 * 4 * 4, 128), "digit": (128, 10)}
    draw = jax.nn.initializers.he_normal()
    return {name: {"w": draw(one, shape), "b": jnp.zeros(shape[-1])}
            for one, (name, shape) in zip(keys, shapes.items())}


def logits(parameters, images):
    features = images
    for name, stride in (("conv1", 1), ("conv2", 2)):
        features = jax.nn.gelu(parameters[name]["b"] + jax.lax.conv_general_dilated(
            features, parameters[name]["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    features = features.reshape(len(images), -1)
    features = jax.nn.gelu(features @ parameters["hidden"]["w"] + parameters["hidden"]["b"])
    return features @ parameters["digit"]["w"] + parameters["digit"]["b"]


def loss_of(parameters, images, labels):
    rows = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    return optax.softmax_cross_entropy(logits(parameters, images), rows).mean()


def train(settings, workers, path):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    (images, labels), test = digits.load(settings["seed"], test_images=288)  # as many for 1, 2, 3, 4, 6 or 8 ranks
    rank, size = lightcc.jax.rank(), lightcc.jax.size()
    mesh = lightcc.jax.mesh("batch")
    spread, everywhere = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    batch = settings["batch_size"] * workers
    steps_per_epoch = len(images) // batch
    steps = settings["steps"] or settings["epochs"] * steps_per_epoch

    def on_mesh(*mine):
        """What each process has of a batch, as arrays of all devices."""
        return tuple(jax.make_array_from_process_local_data(spread, one) for one in mine)

    parameters = jax.tree.map(np.asarray, new_parameters(jax.random.key(settings["seed"] + rank)))
    parameters = jax.device_put(lightcc.jax.broadcast_parameters(parameters), everywhere)  # those of rank 0
    schedule = optax.linear_schedule(settings["lr"] * workers, 0.01 * settings["lr"] * workers, steps)
    optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(schedule, momentum=0.9))
    state = jax.jit(optimizer.init, out_shardings=everywhere)(parameters)

    @jax.jit
    def step_of(parameters, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, images, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    @jax.jit
    def right_of(parameters, images, labels):
        return (logits(parameters, images).argmax(1) == labels).sum()

    mine = slice(rank, None, size)
    test_images, test_labels = on_mesh(test[0][mine], test[1][mine])
    losses, accuracies = [], []
    before, begin = lib.counters(), time.perf_counter()
    for step in range(1, steps + 1):
        mine = digits.shard(step - 1, len(images), batch, settings["seed"], rank, size)
        parameters, state, loss = step_of(parameters, state, *on_mesh(images[mine], labels[mine]))
        losses.append(float(loss))
        if step % steps_per_epoch == 0 or step == steps:
            accuracies.append((step, int(right_of(parameters, test_images, test_labels)) / len(test[1])))
    seconds = time.perf_counter() - begin
    counted = {name: count - before[name] for name, count in lib.counters().items()}
    return digits.outcome(settings, size, seconds, steps * batch, len(test[1]), len(jax.tree.leaves(parameters)),
                          counted, losses, accuracies)


def main():
    args = digits.arguments(__doc__, "jax", epochs=10, lr=0.01)
    lightcc.jax.init()
    digits.run(train, args, lightcc.jax.rank(), lightcc.jax.size(), LARGEST_DIFFERENCE)


if __name__ == "__main__":
    main()

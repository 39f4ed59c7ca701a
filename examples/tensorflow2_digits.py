"""A small convolutional net learns to read handwritten digits with a tf.GradientTape, on as many processes as you like.

    lightccrun -np 2 python examples/tensorflow2_digits.py --output DIR
    python examples/tensorflow2_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
For Horovod it would differ in the import and the counters.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import lightcc.tensorflow as hvd
from lightcc import _core  # the counters

TEST_IMAGES = 297
# Several processes add up a batch's gradients in another order than one does. In float32 that moves a loss by some
# 1e-7, and each step builds on the last: 2 to 4 ranks stayed within 3e-7 of one. Mistakes pass the bound: no broadcast
# at step 1, a sum for the average at step 2, the gradient of one bias that is lost on one rank at step 5.
LARGEST_DIFFERENCE = 5e-6  # of two losses, relative to the larger


def make_model():
    """Two convolutions, two layers. No batch norm: its statistics would depend on how the batch is sharded."""
    layers = tf.keras.layers
    return tf.keras.Sequential([
        tf.keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="gelu"),
        layers.Conv2D(64, 3, strides=2, padding="same", activation="gelu"),
        layers.Flatten(),
        layers.Dense(128, activation="gelu"),
        layers.Dense(10)])


def load(seed):
    """Training and test set, each (images, labels)."""
    data = load_digits()
    images, labels = data.images.astype(np.float32)[..., np.newaxis] / 8 - 1, data.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def shard(step, images, batch, seed):
    """Which images this rank sees in this step: its part of a slice of the epoch's permutation. It depends on nothing
    else, so any number of ranks sees the same global batch."""
    epoch, position = divmod(step, images // batch)
    order = np.random.default_rng(seed + 1 + epoch).permutation(images)
    return np.split(order[position * batch:(position + 1) * batch], hvd.size())[hvd.rank()]


def train(settings, workers):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    (images, labels), (test_images, test_labels) = load(settings["seed"])
    batch = settings["batch_size"] * workers
    steps_per_epoch = len(images) // batch
    steps = settings["steps"] or settings["epochs"] * steps_per_epoch

    tf.keras.utils.set_random_seed(settings["seed"] + hvd.rank())  # every rank starts elsewhere ...
    model, lr = make_model(), settings["lr"] * workers
    optimizer = tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.PolynomialDecay(lr, steps, lr / 100), 0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)  # ... until rank 0 sends its variables
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.categorical_crossentropy(tf.one_hot(labels, 10), model(images, training=True),
                                                            from_logits=True, label_smoothing=0.1)
            loss = tf.reduce_mean(loss)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)  # sends each gradient as soon as it is ready
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return hvd.allreduce(loss, name="loss")  # equal shards: the mean of the global batch

    @tf.function
    def count_right(images, labels):
        right = tf.equal(tf.argmax(model(images), 1, output_type=tf.int32), labels)
        return hvd.allreduce(tf.reduce_sum(tf.cast(right, tf.int32)), op=hvd.Sum, name="right")

    losses, accuracies = [], []
    before, begin = _core.counters(), time.perf_counter()
    for step in range(1, steps + 1):
        mine = shard(step - 1, len(images), batch, settings["seed"])
        losses.append(float(train_step(tf.constant(images[mine]), tf.constant(labels[mine]))))
        if step % steps_per_epoch == 0 or step == steps:
            mine = slice(hvd.rank(), None, hvd.size())
            right = int(count_right(tf.constant(test_images[mine]), tf.constant(test_labels[mine])))
            accuracies.append((step, right / TEST_IMAGES))
            if hvd.rank() == 0:
                print(f"step {step:4}  loss {losses[-1]:.4f}  accuracy {accuracies[-1][1]:.1%}", flush=True)
    seconds = time.perf_counter() - begin
    counted = {name: count - before[name] for name, count in _core.counters().items()}
    return {"ranks": hvd.size(), "settings": settings, "seconds": seconds, "images_per_second": steps * batch / seconds,
            "gradients": len(model.trainable_variables), "collectives_per_step": counted["collectives"] / steps,
            "fused_per_step": counted["fused_batches"] / steps, "accuracies": accuracies, "losses": losses}


def report(run):
    print(f"test accuracy    {run['accuracies'][-1][1]:.2%} of {TEST_IMAGES} images, after {len(run['losses'])} steps")
    print(f"speed            {run['images_per_second']:,.0f} images/s on {run['ranks']} rank(s), tests included")
    print(f"collectives      {run['collectives_per_step']:.2f} a step for {run['gradients']} gradients and the loss; "
          f"{run['fused_per_step']:.2f} of them carried several tensors")


def same(run, reference):
    """Prints how far two loss curves are apart at most; False if that is too far."""
    differences = [abs(a - b) / max(a, b) for a, b in zip(run["losses"], reference["losses"])]
    largest = max(differences)
    verdict = "same to float32 rounding" if largest <= LARGEST_DIFFERENCE else "DIFFERENT"
    print(f"{run['ranks']} rank(s) against {reference['ranks']}: {verdict}: losses of {len(differences)} steps differ "
          f"by at most {largest:.1e} (step {differences.index(largest) + 1}); bound {LARGEST_DIFFERENCE:.0e}")
    return largest <= LARGEST_DIFFERENCE


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/tensorflow2"), metavar="DIR",
                        help="gets run.json, with the curves of loss and accuracy; default %(default)s")
    parser.add_argument("--reference", action="store_true",
                        help="repeat the run in DIR on one rank, its settings too; exit code 1 if the losses differ")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training set; default %(default)s")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps, whatever --epochs says")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step; default %(default)s")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate a rank, at first; default %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="of variables, split and order; default %(default)s")
    return parser.parse_args()


def main():
    args = arguments()
    settings = {name: getattr(args, name) for name in ("epochs", "steps", "batch_size", "lr", "seed")}
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share the cores
    hvd.init()
    if args.reference:
        if hvd.size() > 1:
            sys.exit("--reference repeats a run in one process: start it without a launcher")
        earlier = json.loads((args.output / "run.json").read_text())
        settings = earlier["settings"]
    run = train(settings, workers=earlier["ranks"] if args.reference else hvd.size())
    if hvd.rank() != 0:
        return
    report(run)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / ("reference.json" if args.reference else "run.json")
    path.write_text(json.dumps(run))
    print(f"curves           {path}")
    if args.reference and not same(earlier, run):
        sys.exit(1)


if __name__ == "__main__":
    main()

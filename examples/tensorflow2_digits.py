"""A small convolutional net learns to read handwritten digits with a tf.GradientTape, on as many processes as you like.

    lightccrun -np 2 python examples/tensorflow2_digits.py --output DIR
    python examples/tensorflow2_digits.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
For Horovod it would differ in the import and the counters.
"""
import time

import tensorflow as tf

import digits
import lightcc.tensorflow as hvd
from lightcc.core import lib  # the counters

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


def train(settings, workers, path):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    (images, labels), (test_images, test_labels) = digits.load(settings["seed"])
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
    before, begin = lib.counters(), time.perf_counter()
    for step in range(1, steps + 1):
        mine = digits.shard(step - 1, len(images), batch, settings["seed"], hvd.rank(), hvd.size())
        losses.append(float(train_step(tf.constant(images[mine]), tf.constant(labels[mine]))))
        if step % steps_per_epoch == 0 or step == steps:
            mine = slice(hvd.rank(), None, hvd.size())
            right = int(count_right(tf.constant(test_images[mine]), tf.constant(test_labels[mine])))
            accuracies.append((step, right / len(test_labels)))
            if hvd.rank() == 0:
                print(f"step {step:4}  loss {losses[-1]:.4f}  accuracy {accuracies[-1][1]:.1%}", flush=True)
    seconds = time.perf_counter() - begin
    counted = {name: count - before[name] for name, count in lib.counters().items()}
    return digits.outcome(settings, hvd.size(), seconds, steps * batch, len(test_labels),
                          len(model.trainable_variables), counted, losses, accuracies)


def main():
    args = digits.arguments(__doc__, "tensorflow2", epochs=10, lr=0.02)
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share the cores
    hvd.init()
    digits.run(train, args, hvd.rank(), hvd.size(), LARGEST_DIFFERENCE)


if __name__ == "__main__":
    main()

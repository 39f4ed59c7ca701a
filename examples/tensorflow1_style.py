"""A small convolutional net learns to read handwritten digits in the style of TensorFlow 1: a graph, a session, a hook.

    lightccrun -np 2 python examples/tensorflow1_style.py --output DIR
    python examples/tensorflow1_style.py --output DIR --reference

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn. The second command repeats in one process what the
first did in two (the same images in the same steps, the same learning rate) and fails unless it sees the same losses.
For Horovod it would differ in the import and the counters.
"""
import time

import tensorflow.compat.v1 as tf

import digits
import lightcc.tensorflow as hvd
from lightcc.core import lib  # the counters

# Several processes add up a batch's gradients in another order than one does. In float32 that moves a loss by some
# 1e-7, and each step builds on the last: 2 to 4 ranks stayed within 3e-7 of one. Mistakes pass the bound: no hook at
# step 1, a sum for the average at step 2, the gradient of one bias that is lost on one rank at step 3.
LARGEST_DIFFERENCE = 5e-6  # of two losses, relative to the larger


def weights(name, shape):
    """The weights and biases of one layer."""
    return (tf.get_variable(f"{name}/weights", shape, initializer=tf.glorot_uniform_initializer()),
            tf.get_variable(f"{name}/biases", shape[-1:], initializer=tf.zeros_initializer()))


def net(images):
    """Two convolutions, two layers. No batch norm: its statistics would depend on how the batch is sharded."""
    features = images
    for name, shape, stride in (("conv1", [3, 3, 1, 32], 1), ("conv2", [3, 3, 32, 64], 2)):
        kernel, biases = weights(name, shape)
        features = tf.tanh(tf.nn.conv2d(features, kernel, strides=stride, padding="SAME") + biases)
    features = tf.reshape(features, [-1, 4 * 4 * 64])
    kernel, biases = weights("hidden", [4 * 4 * 64, 128])
    features = tf.tanh(features @ kernel + biases)
    kernel, biases = weights("digit", [128, 10])
    return features @ kernel + biases


def train(settings, workers, path):
    """Trains and returns what happened. workers: how many ranks' batches make a global batch."""
    (train_images, train_labels), (test_images, test_labels) = digits.load(settings["seed"])
    batch = settings["batch_size"] * workers
    steps_per_epoch = len(train_images) // batch
    steps = settings["steps"] or settings["epochs"] * steps_per_epoch

    tf.set_random_seed(settings["seed"] + hvd.rank())  # every rank starts elsewhere, until rank 0 sends its variables
    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf.placeholder(tf.int32, [None])
    logits = net(images)
    loss = tf.losses.softmax_cross_entropy(tf.one_hot(labels, 10), logits, label_smoothing=0.1)
    right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.int32))

    step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(settings["lr"] * workers, step, steps, settings["lr"] * workers / 100)
    optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(rate, momentum=0.9))
    update = optimizer.minimize(loss, step)  # computes gradients, averages them over the ranks, applies them
    mean_loss = hvd.allreduce(loss, name="loss")  # equal shards: the mean of the global batch
    all_right = hvd.allreduce(right, op=hvd.Sum, name="right")

    losses, accuracies = [], []
    alone = tf.ConfigProto(intra_op_parallelism_threads=1)  # the ranks share the cores
    hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0)]
    with tf.train.MonitoredTrainingSession(config=alone, hooks=hooks) as session:
        before, begin = lib.counters(), time.perf_counter()
        for done in range(1, steps + 1):
            mine = digits.shard(done - 1, len(train_images), batch, settings["seed"], hvd.rank(), hvd.size())
            fed = {images: train_images[mine], labels: train_labels[mine]}
            losses.append(float(session.run([mean_loss, update], fed)[0]))
            if done % steps_per_epoch == 0 or done == steps:
                mine = slice(hvd.rank(), None, hvd.size())
                count = session.run(all_right, {images: test_images[mine], labels: test_labels[mine]})
                accuracies.append((done, int(count) / len(test_labels)))
                if hvd.rank() == 0:
                    print(f"step {done:4}  loss {losses[-1]:.4f}  accuracy {accuracies[-1][1]:.1%}", flush=True)
        seconds = time.perf_counter() - begin
        counted = {name: count - before[name] for name, count in lib.counters().items()}
    return digits.outcome(settings, hvd.size(), seconds, steps * batch, len(test_labels), len(tf.trainable_variables()),
                          counted, losses, accuracies)


def main():
    args = digits.arguments(__doc__, "tensorflow1", epochs=10, lr=0.01)
    tf.logging.set_verbosity(tf.logging.ERROR)  # says that this style is deprecated, which is the point here
    tf.disable_v2_behavior()
    hvd.init()
    digits.run(train, args, hvd.rank(), hvd.size(), LARGEST_DIFFERENCE)


if __name__ == "__main__":
    main()

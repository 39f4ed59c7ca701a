"""What the checks of tape and v1 optimizers share: a small net in three variables, the data of all ranks, and
the reference, which trains in one process on all of them; also gradients that can be told without one."""
import numpy as np
import tensorflow as tf

import lightcc.tensorflow as hvd

SAMPLES = 4  # a rank and step
SHAPES = {"embedding": (7, 5), "weight": (5, 3), "bias": (3,)}
MODES = {"eager": lambda function: function, "function": tf.function}  # how TensorFlow runs it


def make_variables(**options):
    random = np.random.RandomState(1)
    return [tf.compat.v1.Variable(random.standard_normal(shape).astype(np.float32), name=name, **options)
            for name, shape in SHAPES.items()]


def data(step):
    """Words and targets of all ranks."""
    random = np.random.RandomState(100 + step)
    count = hvd.size() * SAMPLES
    return random.randint(0, 7, (count, 2)), random.standard_normal((count, 3)).astype(np.float32)


def mine(step):
    part = slice(hvd.rank() * SAMPLES, (hvd.rank() + 1) * SAMPLES)
    return tuple(all_ranks[part] for all_ranks in data(step))


def loss_of(variables, words, targets):
    """The gradient of the embedding is tf.IndexedSlices."""
    embedding, weight, bias = variables
    features = tf.reduce_mean(tf.nn.embedding_lookup(embedding, words), 1)
    return tf.reduce_mean((tf.tanh(features) @ weight + bias - targets) ** 2)


def dense(gradient):
    """A gradient, or a variable, as an array."""
    return gradient if isinstance(gradient, np.ndarray) else np.asarray(tf.convert_to_tensor(gradient))


def gradients_of(step, variables, part=data):
    """The plain gradients, as arrays."""
    with tf.GradientTape() as tape:
        loss = loss_of(variables, *part(step))
    return [dense(gradient) for gradient in tape.gradient(loss, variables)]


def expect_close(got, expected, rtol=1e-5, atol=1e-6):
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected):
        np.testing.assert_allclose(dense(mine), theirs, rtol=rtol, atol=atol)


def factor():
    """What this rank's losses are multiplied by; the average over the ranks is (size + 1) / 2."""
    return float(hvd.rank() + 1)


def average():
    return (hvd.size() + 1) / 2


def gradient(mode, make_loss, sources, wrap=hvd.DistributedGradientTape, **options):
    """The reduced gradients of make_loss()."""
    @mode
    def step():
        with tf.GradientTape() as tape:
            loss = make_loss()
        return wrap(tape, **options).gradient(loss, sources)
    return step()

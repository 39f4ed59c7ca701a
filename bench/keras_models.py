"""What bench/keras_fit.py trains. The functions are given the Keras that they are to use, any over TensorFlow."""
from typing import Any, Callable, Dict, List, Tuple

import numpy
import shapes

BATCH, BATCHES, CLASSES = 8, 8, 10

Data = Tuple[numpy.ndarray, numpy.ndarray]


# Networks: (inputs, outputs, what a loss is)

def quick(keras: Any, of_shapes: List[shapes.Shape]):
    """Parameters of any shapes. Each gradient is made in one pass over memory: twice the parameter times a number that
    differs between ranks and steps."""
    import tensorflow as tf

    class Squares(keras.layers.Layer):
        def build(self, input_shape):
            self._weights = [self.add_weight(name=f"w{i}", shape=shape, initializer="random_normal")
                             for i, shape in enumerate(of_shapes)]
            super().build(input_shape)

        def call(self, x):
            return x * tf.add_n([tf.reduce_sum(tf.square(w)) for w in self._weights])

        def compute_output_shape(self, input_shape):
            return input_shape

    inputs = keras.Input((1,))
    return inputs, Squares()(inputs), lambda y, outputs: outputs[:, 0]


def mlp(keras: Any):
    """Three wide layers: many parameters for little work, so that communication shows."""
    dense = keras.layers.Dense
    inputs = keras.Input((32, 32, 3))
    hidden = dense(1024, activation="relu")(dense(1024, activation="relu")(keras.layers.Flatten()(inputs)))
    return inputs, dense(CLASSES)(hidden), cross_entropy(keras)


def resnet20(keras: Any):
    """Nine blocks in three widths (He et al. 2015): 272,282 parameters in 61 tensors."""
    def normal(x, width: int, size: int = 3, stride: int = 1):
        y = keras.layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)
        return keras.layers.BatchNormalization()(y) if size == 3 else y

    relu = keras.layers.ReLU()
    inputs = keras.Input((32, 32, 3))
    x = relu(normal(inputs, 16))
    widths = [16] * 4 + [32] * 3 + [64] * 3
    for width_in, width in zip(widths, widths[1:]):
        stride = 1 if width_in == width else 2
        y = normal(relu(normal(x, width, 3, stride)), width)
        x = relu(keras.layers.add([y, x if stride == 1 else normal(x, width, 1, stride)]))
    outputs = keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    return inputs, outputs, cross_entropy(keras)


def cross_entropy(keras: Any):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# Data: a few batches of this rank

def factors(rank: int) -> Data:
    x = 1 + rank + numpy.arange(BATCHES) % 3
    return numpy.repeat(x, BATCH).astype("float32")[:, None], numpy.zeros(BATCH * BATCHES, "int64")


def images(rank: int) -> Data:
    x = numpy.random.default_rng(1 + rank).normal(size=(BATCH * BATCHES, 32, 32, 3))
    return x.astype("float32"), numpy.arange(BATCH * BATCHES) % CLASSES


MODELS: Dict[str, Tuple[str, Callable[[Any], Any], Callable[[int], Data]]] = {
    "mlp": ("a perceptron", mlp, images),
    "resnet20": ("ResNet-20 for small images", resnet20, images),
    "tiny": ("gradients of 16 numbers", lambda keras: quick(keras, shapes.TINY), factors),
    "resnet50": ("gradients of ResNet-50's shapes, 102 MB", lambda keras: quick(keras, shapes.resnet50()), factors),
}

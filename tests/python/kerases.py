"""The Keras of this process for checks on ranks, whatever it is: Keras 3 on TensorFlow or on torch, Keras 2, tf_keras.

Without TensorFlow, Keras runs on torch. tf_keras takes the place of tf.keras where TF_USE_LEGACY_KERAS=1 is set.
"""
import importlib
import importlib.util
import os

import numpy as np

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
HAS_TF_KERAS = importlib.util.find_spec("tf_keras") is not None
if not HAS_TENSORFLOW:
    os.environ.setdefault("KERAS_BACKEND", "torch")

BEYOND_CONFIG = ("schedule without get_config", "schedule that is not registered", "callable", "optional argument",
                 "required argument")  # Kit.beyond_config
BATCH = 12  # of all ranks together
FEATURES, TARGETS = 4, 2


class Kit:
    """lightcc's package and the Keras that it is for."""

    def __init__(self):
        if HAS_TENSORFLOW:
            from tensorflow import keras

            import lightcc.tensorflow.keras as hvd
        else:
            import keras

            import lightcc.keras as hvd
        self.keras, self.hvd = keras, hvd
        self.is_3 = hasattr(keras, "ops")
        self.keras_is_213 = not self.is_3 and keras.Model.__module__.startswith("keras.")  # not tf_keras
        self.on_tensorflow = keras.backend.backend() == "tensorflow"
        self.families = [keras.optimizers] if self.is_3 else [keras.optimizers, keras.optimizers.legacy]

    @property
    def embedding(self):
        """lightcc's embeddings for it."""
        return importlib.import_module(f"{self.hvd.__name__}.embedding")

    def distributed(self, plain=None, **options):
        """A distributed optimizer, SGD unless given, by whichever function of the package takes the options."""
        wrap = self.hvd.DistributedOptimizer if HAS_TENSORFLOW else self.hvd.PartialDistributedOptimizer
        return wrap(plain or self.keras.optimizers.SGD(1.0), **options)

    def mean_rank(self):
        return (self.hvd.size() - 1) / 2

    def beyond_config(self, family):
        """Makers of optimizers that train, but that their config does not tell all of. By name."""
        keras, cast = self.keras, self.keras.ops.cast if self.is_3 else self.keras.backend.cast

        class Bare(keras.optimizers.schedules.LearningRateSchedule):
            """Without get_config."""

            def __init__(self, top):
                self.top = top

            def __call__(self, step):
                return self.top / (1.0 + cast(step, "float32"))

        class Unregistered(Bare):
            def get_config(self):
                return {"top": self.top}

        class Reticent(family.SGD):
            """Its config lacks the momentum, without which from_config would make another optimizer."""

            def get_config(self):
                config = super().get_config()
                del config["momentum"]
                return config

        class Demanding(family.SGD):
            """Its config lacks an argument that must be given."""

            def __init__(self, extra, **options):
                super().__init__(**options)
                self.extra = extra

        return {"schedule without get_config": lambda: family.SGD(Bare(0.1)),
                "schedule that is not registered": lambda: family.SGD(Unregistered(0.1)),
                "callable": lambda: family.SGD(lambda: 0.1),
                "optional argument": lambda: Reticent(learning_rate=0.1, momentum=0.9),
                "required argument": lambda: Demanding([3], learning_rate=0.1)}

    # Tensors and variables

    def tensor(self, values, dtype="float32"):
        values = np.asarray(values, dtype)
        if self.on_tensorflow:
            import tensorflow as tf
            return tf.constant(values)
        return self.keras.ops.convert_to_tensor(values)

    def variable(self, values):
        values = np.asarray(values, np.float32)
        if self.is_3:
            return self.keras.Variable(values)
        import tensorflow as tf
        return tf.Variable(values)

    def value(self, tensor):
        """As an array."""
        return np.asarray(tensor.detach() if hasattr(tensor, "detach") else tensor.numpy())

    # One step by hand

    def apply(self, optimizer, pairs):
        optimizer.apply_gradients([(self.tensor(grad), variable) for grad, variable in pairs])

    def apply_in_function(self, optimizer, pairs):
        """In a tf.function."""
        self.function_of(optimizer, [variable for _, variable in pairs])(*(self.tensor(grad) for grad, _ in pairs))

    def function_of(self, optimizer, variables):
        """A tf.function of gradients that applies them to variables."""
        import tensorflow as tf

        @tf.function
        def step(*grads):
            optimizer.apply_gradients(list(zip(grads, variables)))
        return step

    def build(self, optimizer, variables):
        if hasattr(optimizer, "build"):
            if not getattr(optimizer, "built", False):
                optimizer.build(variables)
        else:
            optimizer._create_all_weights(variables)

    # Training

    def model(self, optimizer, hidden=5, depth=1, **options):
        model = self.uncompiled(hidden, depth)
        random = np.random.RandomState(1)
        model.set_weights([random.standard_normal(weight.shape) for weight in model.get_weights()])
        model.compile(optimizer, self.keras.losses.MeanSquaredError(), **options)  # "mse" Keras 3 cannot read from .h5
        return model

    def uncompiled(self, hidden=5, depth=1):
        layers = self.keras.layers
        return self.keras.Sequential([layers.Input((FEATURES,)),
                                      *(layers.Dense(hidden, activation="tanh") for _ in range(depth)),
                                      layers.Dense(TARGETS)])

    def data(self, batches=3):
        random = np.random.RandomState(2)
        return (random.standard_normal((batches * BATCH, FEATURES)).astype(np.float32),
                random.standard_normal((batches * BATCH, TARGETS)).astype(np.float32))

    def my_part(self, samples):
        """This rank's share of each batch."""
        count = BATCH // self.hvd.size()
        batches = samples.reshape(-1, BATCH, *samples.shape[1:])
        return batches[:, self.hvd.rank() * count:(self.hvd.rank() + 1) * count].reshape(-1, *samples.shape[1:])

    def fit_all(self, model, epochs=1, **options):
        """As one process would, with the whole batches."""
        return model.fit(*self.data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options)

    def fit_mine(self, model, epochs=1, **options):
        """As one of the ranks."""
        return model.fit(*map(self.my_part, self.data()), batch_size=BATCH // self.hvd.size(), epochs=epochs,
                         shuffle=False, verbose=0, **options)

    def expect_equal_weights(self, model, expected, rtol=1e-4, atol=1e-5):
        for mine, theirs in zip(model.get_weights(), expected.get_weights()):
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)

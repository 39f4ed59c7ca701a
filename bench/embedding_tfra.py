"""The side of TensorFlow Recommenders-Addons of bench/embedding.py: its dynamic embeddings, in a tf.function."""
import os

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
from importlib.metadata import version  # noqa: E402

import embedding_ids  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow_recommenders_addons import dynamic_embedding  # noqa: E402

VERSION = f"tensorflow-recommenders-addons {version('tensorflow-recommenders-addons')}"
PIECE, LOOKUP = 65536, "rows"
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


class Table:
    def __init__(self, rule: str, rows: int, dim: int):
        self._variable = dynamic_embedding.get_variable(
            f"table_{rule}", key_dtype=tf.int64, value_dtype=tf.float32, dim=dim, devices=["/CPU:0"],
            initializer=tf.keras.initializers.RandomNormal(0, 0.01), init_size=2 * rows)
        optimizers = {"lazy_adam": tf.keras.optimizers.Adam, "adagrad": tf.keras.optimizers.Adagrad}
        self._optimizer = dynamic_embedding.DynamicEmbeddingOptimizer(optimizers[rule](1e-3))
        self._step, self._lookup = tf.function(self._train), tf.function(self._look)
        for piece in np.array_split(np.arange(rows), max(1, rows // PIECE)):
            self.step(self.prepare(piece))

    def prepare(self, row_numbers: np.ndarray) -> "tf.Tensor":
        return tf.constant(embedding_ids.raw_keys(row_numbers))

    def step(self, batch: "tf.Tensor") -> None:
        self._step(batch)

    def lookup(self, batch: "tf.Tensor") -> None:
        self._lookup(batch).numpy()

    def bytes(self) -> float:
        return 0.0

    def _train(self, keys: "tf.Tensor") -> None:
        with tf.GradientTape() as tape:
            loss = 1e-3 * tf.reduce_sum(self._look(keys))
            trained = self._variable.get_trainable_by_name(LOOKUP)
        self._optimizer.apply_gradients([(tape.gradient(loss, trained), trained)])

    def _look(self, keys: "tf.Tensor") -> "tf.Tensor":
        """As its embedding_lookup_unique, which cannot be trained in a tf.function."""
        unique, inverse = tf.unique(keys)
        return tf.gather(dynamic_embedding.embedding_lookup(self._variable, unique, name=LOOKUP), inverse)

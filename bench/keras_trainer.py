"""A rank of bench/keras_fit.py: one model after the other with model.fit, in one of the ways that are compared."""
import hashlib
import json
import os
import time
from typing import Any, Dict, List, Tuple

import keras_models
from teams import become_rank

OURS, THEIRS = "lightcc", "MWMS"
ALONE_XLA, OURS_XLA = "alone, XLA", "lightcc, XLA"
RATE = 1e-3


def on_rank(rank: int, size: int, side: str, legacy: bool, folder: str, ports: List[int], threads: int) -> "Trainer":
    """What a Team calls. TensorFlow is imported here, once the environment says how."""
    os.environ["TF_USE_LEGACY_KERAS"] = str(int(legacy))
    if side == THEIRS:
        workers = [f"localhost:{port}" for port in ports]
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if side in (OURS, OURS_XLA):
        become_rank(rank, size, f"{folder}/{side}")
    return Trainer(tf, rank, side)


class Trainer:
    def __init__(self, tf: Any, rank: int, side: str):
        self._tf, self._rank, self._side = tf, rank, side
        if side == THEIRS:
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        else:
            self._strategy = tf.distribute.get_strategy()  # does nothing
        if side in (OURS, OURS_XLA):
            import lightcc.tensorflow.keras as hvd
            self._hvd = hvd
            hvd.init()

    def load(self, name: str) -> int:
        """Makes the model, with the same parameters on all ranks; how many gradients it has."""
        tf, keras = self._tf, self._tf.keras
        _, make, data = keras_models.MODELS[name]
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        with self._strategy.scope():
            inputs, outputs, loss = make(keras)
            optimizer = keras.optimizers.SGD(RATE)
            if self._side in (OURS, OURS_XLA):
                optimizer = self._hvd.DistributedOptimizer(optimizer)
            kind = compiled_gradients(tf) if self._side == OURS_XLA else keras.Model
            self._model = kind(inputs, outputs)
            self._model.compile(optimizer, loss, jit_compile=self._side == ALONE_XLA)
        batches = tf.data.Dataset.from_tensor_slices(data(self._rank)).batch(keras_models.BATCH).cache().repeat()
        self._data = batches
        if self._side == THEIRS:
            self._data = self._strategy.distribute_datasets_from_function(lambda context: batches)
        return len(self._model.trainable_variables)

    def train(self, steps: int) -> float:
        """Seconds a step of model.fit; its beginning, with the first step, is left out."""
        ends: List[float] = []

        class Clock(self._tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                ends.append(time.perf_counter())

        self._model.fit(self._data, steps_per_epoch=steps + 1, shuffle=False, verbose=0, callbacks=[Clock()])
        return (ends[-1] - ends[0]) / steps

    def parameters(self) -> Tuple[str, bytes]:
        """A digest of all parameters; from rank 0 also all of them, float32."""
        everything = b"".join(variable.numpy().tobytes() for variable in self._model.trainable_variables)
        return hashlib.sha256(everything).hexdigest(), everything if self._rank == 0 else b""

    def counters(self) -> Dict[str, int]:
        from lightcc.core import lib
        return lib.counters()

    def end(self) -> None:
        if self._side in (OURS, OURS_XLA):
            self._hvd.shutdown()


def compiled_gradients(tf: Any) -> type:
    """A model whose forward and backward are compiled by XLA. The exchange, in apply_gradients, stays outside: the way
    that docs/tensorflow.md recommends where jit_compile=True is wanted."""
    class Compiled(tf.keras.Model):
        @tf.function(jit_compile=True)
        def gradients(self, x, y):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data):
            loss, gradients = self.gradients(*data)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    return Compiled


"""lightcc.embedding.DecayedAUC as a metric of Keras."""
from typing import Any

import tensorflow as tf

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding import metrics


def metric_class(keras: Any) -> type:
    """The class of the metric DecayedAUC for a Keras."""
    class DecayedAUC(keras.metrics.Metric):
        """The area under the ROC curve over all ranks, in which a sample counts half as much after each half_life.

        Predictions are probabilities, one a sample. half_life, bins, unit, process_set: those of
        lightcc.embedding.DecayedAUC, which `decayed` is: what it has counted is in its state_dict(), not in a model's
        files. Keras resets metrics as an epoch and an evaluation begin: an epoch of many steps sees the past fade.
        result() is one allreduce of 16 bytes a bin, which Keras makes in every step: each rank makes as many.
        Errors: ValueError for sample weights, and those of lightcc.embedding.DecayedAUC, which in a tf.function are
        errors of TensorFlow with their text.

        >>> from lightcc.keras import embedding as E
        >>> auc = E.DecayedAUC(half_life=1000)
        >>> auc.update_state([0.0, 0.0, 1.0, 1.0], [0.1, 0.4, 0.35, 0.8]); float(auc.result())
        0.75
        """

        def __init__(self, half_life: float, bins: int = 4096, unit: str = "samples", name: str = "decayed_auc", *,
                     process_set: ProcessSet = global_process_set, **options: Any):
            super().__init__(name=name, **options)
            self.decayed = metrics.DecayedAUC(half_life, bins, unit=unit, process_set=process_set)

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if sample_weight is not None:
                raise ValueError("DecayedAUC: samples have no weights here; give it to compile(metrics=...), not to "
                                 "weighted_metrics.")
            labels, scores = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
            tf.numpy_function(self._count, [tf.cast(scores, tf.float64), tf.cast(labels, tf.float64)], [])

        def result(self) -> Any:
            value = tf.numpy_function(lambda: self.decayed.compute(), [], tf.float64)
            return tf.cast(tf.ensure_shape(value, []), tf.float32)

        def reset_state(self) -> None:
            self.decayed.reset()

        def get_config(self) -> Any:
            of_all = self.decayed
            return {**super().get_config(), "half_life": of_all.half_life, "bins": of_all.bins, "unit": of_all.unit}

        def _count(self, scores: Any, labels: Any) -> None:
            self.decayed.update(scores, labels)

    return DecayedAUC

"""The callback ServeCallback: a rank whose fit has ended answers those of the other ranks."""
from typing import Any, Callable, Optional

import tensorflow as tf

from lightcc._keras.embedding.refusals import tables_in
from lightcc._keras.embedding.zeros import Like, zero
from lightcc._keras.optimizer import is_distributed
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.tensorflow.embedding.leaf import leaf_of
from lightcc.tensorflow.embedding.serving import serve


def callback_class(keras: Any) -> type:
    """The class of the callback for a Keras."""
    class ServeCallback(keras.callbacks.Callback):
        """For fit on ranks that have different numbers of batches: one whose fit ends answers the lookups and updates
        of the others until all have ended, and makes their steps of a DistributedOptimizer with gradients of zero, so
        that its weights stay theirs.

        Put it last. The other ranks may do nothing else together meanwhile: no validation, which looks up rows, no
        MetricAverageCallback, no commits of an elastic job. With BroadcastGlobalVariablesCallback each rank has at
        least one batch. process_set: that of the tables.
        Errors: ValueError for a model that is not compiled with E.Optimizer, and with a scaled loss; those of
        lightcc.tensorflow.embedding's serve.

        >>> import keras; from lightcc.keras import embedding as E
        >>> model = keras.Sequential([keras.Input((1,), dtype="int64"), E.Embedding(4, name="ends")])
        >>> model.compile(optimizer=E.Optimizer(dense=keras.optimizers.SGD(0.1), sparse=E.SGD(0.1)), loss="mse")
        >>> history = model.fit(np.array([[7]]), np.ones((1, 1, 4)), verbose=0, callbacks=[E.ServeCallback()])
        """

        def __init__(self, process_set: ProcessSet = global_process_set):
            super().__init__()
            self._process_set = process_set

        def on_train_begin(self, logs: Optional[Any] = None) -> None:
            """Keras hook."""
            if tables_in(self.model.optimizer) is not self.model.optimizer:
                raise ValueError("ServeCallback: " + (
                    "the model is not compiled with E.Optimizer, so it has no tables."
                    if tables_in(self.model.optimizer) is None else
                    "the loss is scaled (mixed_float16), and a rank without data cannot know which steps the others "
                    "skip. Give all ranks as many batches, or train with mixed_bfloat16."))

        def on_train_end(self, logs: Optional[Any] = None) -> None:
            """Keras hook."""
            optimizer = self.model.optimizer
            serve(dense_step(self.model) if is_distributed(optimizer) else None, optimizer.sparse, self._process_set)

    return ServeCallback


def dense_step(model: Any) -> Callable[[], None]:
    """Makes one step of a model's dense optimizer with gradients of zero, which travel as those of fit do."""
    optimizer = model.optimizer
    seen = optimizer.dense_seen or [(variable, Like(tf.as_dtype(variable.dtype)))
                                    for variable in model.trainable_variables if leaf_of(variable) is None]

    def step() -> None:
        optimizer.apply_gradients([(zero(kind, variable), variable) for variable, kind in seen])

    return step if model.run_eagerly else tf.function(step)

"""Embeddings by any id, whose rows are spread over the ranks, for tf.keras:
`from lightcc.tensorflow.keras import embedding as E`.

docs/embedding_tensorflow.md tells how they work. Lookups and updates are collective: all ranks of a table's process set
make them, in the same order.
"""
from tensorflow import keras

from lightcc._keras.embedding.layer import layer_class, together_class
from lightcc._keras.embedding.metric import metric_class
from lightcc._keras.embedding.optimizer import Optimizer
from lightcc._keras.embedding.serve_callback import callback_class
from lightcc._keras.embedding.serving import freeze, split
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.eviction import L2, Asking, Count, Ttl
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.job_recovery import Recovery
from lightcc.tensorflow.embedding import (
    SGD,
    Adagrad,
    GroupAdagrad,
    GroupAdam,
    LazyAdam,
    SparseAdam,
    calls,
    serve,
    tables,
)

__all__ = ["Adagrad", "Asking", "Bloom", "Constant", "Count", "DecayedAUC", "Embedding", "GroupAdagrad", "GroupAdam",
           "L2", "LazyAdam", "Normal", "Optimizer", "Recovery", "SGD", "ServeCallback", "SparseAdam", "Together", "Ttl",
           "Uniform", "Zeros", "calls", "freeze", "serve", "split", "tables"]

Embedding, Together = layer_class(keras), together_class(keras)
DecayedAUC, ServeCallback = metric_class(keras), callback_class(keras)

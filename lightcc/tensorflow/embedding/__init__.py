"""Embeddings by any id, whose rows are spread over the ranks, for TensorFlow:
`from lightcc.tensorflow import embedding as E`.

docs/embedding_tensorflow.md tells how they work. Lookups and updates are collective: all ranks of a table's process set
make them, in the same order. For Keras there are lightcc.keras.embedding and lightcc.tensorflow.keras.embedding.
"""
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.eviction import L2, Asking, Count, Ttl
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.job_recovery import Recovery
from lightcc.embedding.metrics import DecayedAUC
from lightcc.tensorflow.embedding import elastic as _elastic  # noqa: F401  states know tables from then on
from lightcc.tensorflow.embedding.leaf import tables
from lightcc.tensorflow.embedding.library import calls
from lightcc.tensorflow.embedding.modules import HashEmbedding, lookup
from lightcc.tensorflow.embedding.optimizers import SGD, Adagrad, GroupAdagrad, GroupAdam, LazyAdam, SparseAdam
from lightcc.tensorflow.embedding.serving import serve

__all__ = ["Adagrad", "Asking", "Bloom", "Constant", "Count", "DecayedAUC", "GroupAdagrad", "GroupAdam",
           "HashEmbedding", "L2", "LazyAdam", "Normal", "Recovery", "SGD", "SparseAdam", "Ttl", "Uniform", "Zeros",
           "calls", "lookup", "serve", "tables"]

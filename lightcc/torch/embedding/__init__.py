"""Embeddings by any id, whose rows are spread over the ranks, for PyTorch: `from lightcc.torch import embedding as E`.

docs/embedding.md tells how they work. Modules and optimizers here are collective: all ranks of a table's process set
call them, in the same order.
"""
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.eviction import L2, Asking, Count, Ttl
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.job_recovery import Recovery
from lightcc.embedding.metrics import DecayedAUC
from lightcc.torch.compiling import keep_out as _keep_out
from lightcc.torch.embedding import elastic as _elastic  # noqa: F401  TorchState knows tables from then on
from lightcc.torch.embedding.lookups import lookup, prefetch
from lightcc.torch.embedding.modules import HashEmbedding, HashEmbeddingBag, dense_parameters, tables
from lightcc.torch.embedding.optimizers import SGD, Adagrad, GroupAdagrad, GroupAdam, LazyAdam, SparseAdam
from lightcc.torch.embedding.pipeline import Pipeline
from lightcc.torch.embedding.saving import export, load, load_deltas, save, save_delta
from lightcc.torch.embedding.serving import serve

__all__ = [
    "Adagrad", "Asking", "Bloom", "Constant", "Count", "DecayedAUC", "GroupAdagrad", "GroupAdam", "HashEmbedding",
    "HashEmbeddingBag", "L2", "LazyAdam", "Normal", "Pipeline", "Recovery", "SGD", "SparseAdam", "Ttl", "Uniform",
    "Zeros", "dense_parameters", "export", "load", "load_deltas", "lookup", "prefetch", "save", "save_delta", "serve",
    "tables",
]

_keep_out()

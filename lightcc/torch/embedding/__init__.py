"""Embeddings by any id, whose rows are spread over the ranks, for PyTorch: `from lightcc.torch import embedding as E`.

docs/embedding.md tells how they work. Modules and optimizers here are collective: all ranks of a table's process set
call them, in the same order.
"""
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.torch.compiling import keep_out as _keep_out
from lightcc.torch.embedding.lookups import lookup, prefetch
from lightcc.torch.embedding.modules import HashEmbedding, HashEmbeddingBag, dense_parameters, tables
from lightcc.torch.embedding.optimizers import SGD, Adagrad, GroupAdagrad, GroupAdam, LazyAdam, SparseAdam
from lightcc.torch.embedding.saving import load, save
from lightcc.torch.embedding.serving import serve

__all__ = [
    "Adagrad", "Constant", "GroupAdagrad", "GroupAdam", "HashEmbedding", "HashEmbeddingBag", "LazyAdam", "Normal",
    "SGD", "SparseAdam", "Uniform", "Zeros", "dense_parameters", "load", "lookup", "prefetch",
    "save", "serve", "tables",
]

_keep_out()

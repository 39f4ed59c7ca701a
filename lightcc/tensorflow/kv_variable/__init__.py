"""TFPlus's names for tables of embeddings, in graphs of TensorFlow 1's style and eagerly:
`from lightcc.tensorflow.kv_variable import get_kv_variable, embedding_lookup, AdamOptimizer`.

docs/kv_variable.md says which name of TFPlus is what here. Rows are spread over the ranks, as in
lightcc.tensorflow.embedding.
"""
from lightcc.tensorflow.kv_variable.lookups import (
    embedding_lookup,
    embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from lightcc.tensorflow.kv_variable.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    GroupAdamOptimizer,
    SparseGroupFtrlOptimizer,
)
from lightcc.tensorflow.kv_variable.variables import get_kv_variable, table_of

__all__ = ["AdagradOptimizer", "AdamOptimizer", "GroupAdamOptimizer", "SparseGroupFtrlOptimizer", "embedding_lookup",
           "embedding_lookup_sparse", "get_kv_variable", "safe_embedding_lookup_sparse", "table_of"]

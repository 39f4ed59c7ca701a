"""Tables of rows by key, spread over ranks, for any framework: docs/embedding.md. lightcc.torch.embedding stands on it.
"""
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.checkpoint import load, load_deltas, save, save_delta
from lightcc.embedding.delta import apply_delta, take_delta
from lightcc.embedding.eviction import L2, Asking, Count, Ttl
from lightcc.embedding.exporting import export
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.job_recovery import Recovery
from lightcc.embedding.metrics import DecayedAUC
from lightcc.embedding.rules import Rule
from lightcc.embedding.statistics import statistics
from lightcc.embedding.table import Table

__all__ = ["Asking", "Bloom", "Constant", "Count", "DecayedAUC", "L2", "Normal", "Recovery", "Rule", "Table", "Ttl",
           "Uniform", "Zeros", "apply_delta", "export", "load", "load_deltas", "save", "save_delta", "statistics",
           "take_delta"]

"""Tables of rows by key, spread over ranks, for any framework: docs/embedding.md. lightcc.torch.embedding stands on it.
"""
from lightcc.embedding.checkpoint import load, save
from lightcc.embedding.initializers import Constant, Normal, Uniform, Zeros
from lightcc.embedding.rules import Rule
from lightcc.embedding.table import Table

__all__ = ["Constant", "Normal", "Rule", "Table", "Uniform", "Zeros", "load", "save"]

"""lightcc's side of bench/embedding.py: lightcc.torch.embedding in a world of one, whose keys are raw 64-bit ids."""
import embedding_ids
import numpy as np
import torch

import lightcc
import lightcc.torch as hvd
from lightcc.torch import embedding as E

VERSION = f"lightcc {lightcc.__version__}"
RULES = {"sparse_adam": E.SparseAdam, "lazy_adam": E.LazyAdam, "adagrad": E.Adagrad, "sgd": E.SGD,
         "rowwise_adagrad": lambda tables, lr: E.Adagrad(tables, lr=lr, rowwise=True)}
PIECE = 65536
torch.set_num_threads(1)
hvd.init()


class Table:
    def __init__(self, rule: str, rows: int, dim: int, name: str = ""):
        self.module = E.HashEmbedding(dim, name=name or rule)
        self.optimizer = RULES[rule](E.tables(self.module), lr=1e-3)
        self._gradient = torch.empty(0)
        nothing = torch.zeros(PIECE, dim)
        for piece in np.array_split(np.arange(rows), -(-rows // PIECE)):  # rows are born at an update
            self.module(self._keys(piece)).backward(nothing[:len(piece)])
            self.optimizer.step()
        assert len(self.module) == rows

    def prepare(self, row_numbers: np.ndarray) -> torch.Tensor:
        self._gradient = torch.full((len(row_numbers), self.module.dim), 1e-3)
        return self._keys(row_numbers)

    def step(self, batch: torch.Tensor) -> None:
        self.module(batch).backward(self._gradient)
        self.optimizer.step()

    @torch.no_grad()
    def lookup(self, batch: torch.Tensor) -> None:
        self.module(batch)

    def bytes(self) -> float:
        return self.module.stats()["bytes"]

    @staticmethod
    def _keys(row_numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(embedding_ids.raw_keys(row_numbers))

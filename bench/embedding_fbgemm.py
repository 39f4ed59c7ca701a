"""FBGEMM's side of bench/embedding.py: SplitTableBatchedEmbeddingBagsCodegen on the CPU, whose ids are row numbers and
whose backward updates the rows."""
from importlib.metadata import version

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

VERSION = f"fbgemm-gpu-cpu {version('fbgemm-gpu-cpu')}"
RULES = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
         "sgd": EmbOptimType.EXACT_SGD}
torch.set_num_threads(1)


class Table:
    def __init__(self, rule: str, rows: int, dim: int):
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=RULES[rule], learning_rate=1e-3)
        self._bags.init_embedding_weights_uniform(-0.01, 0.01)
        self._offsets = self._gradient = torch.empty(0)
        self._rows, self._dim, self._slots = rows, dim, {"adagrad": dim, "rowwise_adagrad": 1, "sgd": 0}[rule]

    def prepare(self, row_numbers: np.ndarray) -> torch.Tensor:
        self._offsets = torch.arange(len(row_numbers) + 1)
        self._gradient = torch.full((len(row_numbers), self._dim), 1e-3)
        return torch.from_numpy(row_numbers)

    def step(self, batch: torch.Tensor) -> None:
        self._bags(batch, self._offsets).backward(self._gradient)

    @torch.no_grad()
    def lookup(self, batch: torch.Tensor) -> None:
        self._bags(batch, self._offsets)

    def bytes(self) -> float:
        return 4.0 * self._rows * (self._dim + self._slots)

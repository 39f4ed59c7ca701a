"""PyTorch's side of bench/embedding.py: torch.nn.EmbeddingBag with sparse gradients, and torch.optim's optimizers."""
import numpy as np
import torch

VERSION = f"torch {torch.__version__}"
torch.set_num_threads(1)


class Table:
    def __init__(self, rule: str, rows: int, dim: int):
        self._bag = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
        parameters = self._bag.parameters()
        self._optimizer = {"lazy_adam": lambda: torch.optim.SparseAdam(parameters, lr=1e-3),
                           "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-3),
                           "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3)}[rule]()
        self._offsets = self._gradient = torch.empty(0)
        self._dim = dim

    def prepare(self, row_numbers: np.ndarray) -> torch.Tensor:
        self._offsets = torch.arange(len(row_numbers))
        self._gradient = torch.full((len(row_numbers), self._dim), 1e-3)
        return torch.from_numpy(row_numbers)

    def step(self, batch: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        self._bag(batch, self._offsets).backward(self._gradient)
        self._optimizer.step()

    @torch.no_grad()
    def lookup(self, batch: torch.Tensor) -> None:
        self._bag(batch, self._offsets)

    def bytes(self) -> float:
        weight = self._bag.weight
        found = [value for state in self._optimizer.state.values() for value in state.values()]
        return weight.nbytes + sum(slot.nbytes for slot in found if getattr(slot, "shape", ()) == weight.shape)

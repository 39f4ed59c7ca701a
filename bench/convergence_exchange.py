"""How the gradients of bench/convergence.py travel, and what of it crosses the network."""
from typing import Any, Dict, NamedTuple

import torch

import lightcc.torch as hvd


class Setting(NamedTuple):
    """How gradients travel."""

    kind: str              # dense, topk or int8
    density: float = 1     # topk: share of the elements that is sent
    warm_up: float = 0     # topk: share of the steps in which the density falls to that
    feedback: bool = True  # what was not sent is added to the next gradient; without it there is no warm-up either

    def compression(self, steps: int) -> Any:
        if self.kind == "topk":
            return hvd.Compression.topk(self.density, warmup_steps=round(self.warm_up * steps))
        return hvd.Compression.int8() if self.kind == "int8" else hvd.Compression.none


def dense_bytes(gradient_bytes: float, nodes: int) -> float:
    """That a node sends to others when it takes part in a dense all-reduce: 2D's, which is the least there can be."""
    return 2 * (nodes - 1) / nodes * gradient_bytes


class Exchange:
    """Averages the gradients of all ranks, then steps, by `optimizer`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, steps: int):
        self._setting = setting
        self._bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._counted = {"sent_bytes": 0.0, "gradient_bytes": 0.0}  # of codecs that are no more
        self.optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(),
                                                  compression=setting.compression(steps))

    def step(self) -> None:
        self.optimizer.step()
        if not self._setting.feedback:
            self._forget()

    def sent(self, steps: int) -> float:
        """Bytes that this rank has sent to other nodes in so many steps, those of gradients that travel dense too."""
        counted = self._count()
        return counted["sent_bytes"] + dense_bytes(steps * self._bytes - counted["gradient_bytes"], hvd.size())

    def compressed_share(self, steps: int) -> float:
        """Of all gradient bytes of so many steps."""
        return self._count()["gradient_bytes"] / (steps * self._bytes)

    def _forget(self) -> None:
        """What is not in a state that is loaded begins at zero: what was left behind, warm-up and counting."""
        self._counted = self._count()
        state = self.optimizer.state_dict()
        del state["lightcc_residuals"]
        self.optimizer.load_state_dict(state)

    def _count(self) -> Dict[str, float]:
        if self._setting.kind == "dense":
            return self._counted
        now = hvd.compression_stats(self.optimizer)
        return {key: value + now[key] for key, value in self._counted.items()}

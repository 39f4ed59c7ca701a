"""A TorchState keeps the tables of its models: lightcc.embedding.elastic says how. Here is what PyTorch has beside."""
from typing import Any, Dict, List, Mapping

import torch

from lightcc.embedding.elastic import TablesPart
from lightcc.torch.elastic import state as elastic
from lightcc.torch.embedding import lookups, pipeline
from lightcc.torch.embedding.modules import tables
from lightcc.torch.embedding.optimizers import TableOptimizer
from lightcc.torch.embedding.parameter import TableParameter


class _Tables(TablesPart):
    """Also the gradients of tables, lookups in advance, and updates that wait in a Pipeline."""

    def __init__(self, parameters: List[TableParameter], values: Mapping[str, Any]):
        self._parameters = parameters
        super().__init__([parameter.table for parameter in parameters], values)

    def forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        lookups.forget()

    def restore(self) -> None:
        pipeline.forget([shard.table for shard in self.shards])
        super().restore()

    def complete(self) -> None:
        pipeline.finish([shard.table for shard in self.shards])


class TableOptimizerHandler(elastic.StateDictHandler):
    """The slots are the rows'; of the optimizer there are the options of its groups."""

    def restore(self) -> None:
        self.value.forget()
        super().restore()

    def sync(self) -> None:
        self.value.forget()
        super().sync()


def _part_of(_: Any, values: Mapping[str, Any]) -> TablesPart:
    found: Dict[int, TableParameter] = {}
    for value in values.values():
        if isinstance(value, torch.nn.Module):
            found.update((id(one), one) for one in tables(value))
    return _Tables(list(found.values()), values)


elastic.TorchState.has_part(_part_of)
elastic.register_own([(TableOptimizer, TableOptimizerHandler)])

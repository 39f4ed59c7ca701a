"""States of elastic jobs keep the tables among their variables: lightcc.embedding.elastic says how."""
from typing import Any, Dict, Mapping

from lightcc.embedding.elastic import TablesPart
from lightcc.embedding.table import Table
from lightcc.tensorflow.elastic import VariablesState
from lightcc.tensorflow.embedding.leaf import leaf_of
from lightcc.tensorflow.embedding.library import forget_lookups


class _Tables(TablesPart):
    def forget(self) -> None:
        for shard in self.shards:
            forget_lookups(shard.table)


def _part_of(state: Any, values: Mapping[str, Any]) -> TablesPart:
    leaves = [leaf for leaf in map(leaf_of, state.own_variables()) if leaf is not None]
    of_number: Dict[int, Table] = {leaf.number: leaf.table for leaf in leaves}
    return _Tables(of_number.values(), values)


VariablesState.has_part(_part_of)

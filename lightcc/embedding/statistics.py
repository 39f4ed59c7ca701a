"""Numbers of a whole table, of all ranks together."""
from typing import Dict

from lightcc.core import objects
from lightcc.embedding.table import Table

SUMMED = ("rows", "candidates", "bytes", "candidate_bytes", "index_bytes", "admitted", "evicted")


def statistics(table: Table) -> Dict[str, float]:
    """Of all ranks' shards; all ranks of the process set call it. The sums of rows, candidates, bytes, candidate_bytes,
    index_bytes, admitted and evicted of Table.stats(); steps; admission_error, that of the rank where it is largest;
    rows_max_to_mean, of the ranks: 1 where all have the same number of rows, and where there are none.

    >>> from lightcc import embedding
    >>> numbers = embedding.statistics(embedding.Table("user", 4)); numbers["rows"], numbers["rows_max_to_mean"]
    (0, 1.0)
    """
    every = objects.allgather_object(table.stats(), f"lightcc.embedding.statistics.{table.name}", table.process_set)
    numbers: Dict[str, float] = {name: sum(of[name] for of in every) for name in SUMMED}
    most = max(of["rows"] for of in every)
    numbers["steps"] = every[0]["steps"]
    numbers["admission_error"] = max(of["admission_error"] for of in every)
    numbers["rows_max_to_mean"] = most * len(every) / numbers["rows"] if most else 1.0
    return numbers

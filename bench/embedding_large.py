"""A table of many rows beside the floor of this machine's memory, in one process, by turns."""
import time
from typing import Dict, List

import embedding_ids
import numpy as np
import torch
from embedding_floor import HEADER_BYTES, Floor
from embedding_own import Table

from lightcc.embedding import lib

IDS, LINE_BYTES = 65536, 64


def bytes_a_key(rule: str, rows: int, dim: int) -> float:
    """Of a table with so many rows."""
    table = Table(rule, rows, dim, f"memory.{rule}")
    found = table.bytes() / rows
    table.module.table.close()
    return found


class Large:
    """lookup: the shard's own reading of raw keys, as an evaluation reads them; module: HashEmbedding's forward, which
    finds different keys first; floor: embedding_floor; index: likewise random reads of one line a key out of memory as
    large as the index, which a floor of row numbers does not need."""

    def __init__(self, rows: int, dim: int, batches: int):
        self._table = Table("sgd", rows, dim, "large")
        stats = self._table.module.stats()
        self._floor = Floor(rows, stats["record_bytes"], 4 * dim)
        lines = stats["index_bytes"] // LINE_BYTES
        self._index = Floor(lines, LINE_BYTES, LINE_BYTES - HEADER_BYTES)
        self._lines = list(np.random.default_rng(embedding_ids.SEED).integers(0, lines, (batches, IDS)))
        self._row_numbers = list(embedding_ids.batches("uniform", rows, IDS, batches))
        self._keys = [embedding_ids.raw_keys(one) for one in self._row_numbers]
        self._out = np.empty((IDS, dim), np.float32)
        self.record_bytes = stats["record_bytes"]

    def samples(self, rounds: int) -> Dict[str, List[float]]:
        """Seconds a batch; a round goes through all batches, each side by turns."""
        found: Dict[str, List[float]] = {"lookup": [], "module": [], "floor": [], "index": []}
        for _ in range(rounds):
            for side, some in found.items():
                some.append(float(np.mean([getattr(self, f"_{side}_s")(i) for i in range(len(self._keys))])))
        return found

    def _floor_s(self, i: int) -> float:
        return self._floor.read(self._row_numbers[i], self._out)

    def _index_s(self, i: int) -> float:
        return self._index.read(self._lines[i], self._out)

    def _lookup_s(self, i: int) -> float:
        keys, begin = self._keys[i], time.perf_counter()
        lib.call("read", self._table.module.table.handle, lib.address(keys), None, len(keys), lib.address(self._out))
        return time.perf_counter() - begin

    def _module_s(self, i: int) -> float:
        batch, begin = torch.from_numpy(self._keys[i]), time.perf_counter()
        self._table.lookup(batch)
        return time.perf_counter() - begin

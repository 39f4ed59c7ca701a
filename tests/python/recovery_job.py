"""A small job with a table and a Recovery, for tests."""
import os
import zlib

import numpy as np
import torch

import lightcc.torch as hvd
from lightcc.embedding.admission import candidates
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

DIM = 3


class Job:
    """A model, its state and its batches; the name of the table is the test's."""

    def __init__(self, name, folder, every, recovery=None, optimizer="SparseAdam", values=None, **options):
        self.model = E.HashEmbedding(DIM, name=name, dtype=torch.float64, **options)
        self.model.dense = torch.nn.Linear(1, 1)
        self.sparse = getattr(E, optimizer)(E.tables(self.model), lr=0.1)
        self.auc = E.DecayedAUC(1000, 16)
        self.recovery = E.Recovery(folder, every=every, **(recovery or {}))
        self.state = hvd.elastic.TorchState(self.model, sparse=self.sparse, auc=self.auc, steps=0,
                                            recovery=self.recovery, **(values or {}))
        self.shards = self.state._shared[0].shards
        self.metrics = self.state._shared[0].metrics

    def train(self, steps, keys=300, first=0):
        for _ in range(steps):
            rng = np.random.default_rng([self.state.steps, hvd.rank()])
            ids = torch.tensor(rng.integers(first, first + 3 * keys, keys))
            self.auc.update([0.5, 0.75], [0, 1])
            self.model(ids).square().sum().backward()
            self.sparse.step()
            self.state.steps += 1
            self.state.commit()

    def rows(self):
        """How many rows and candidates there are on all ranks, and a sum over them that each bit of them changes."""
        count, total = 0, 0
        for columns in [*slices(self.model.table, 16384), *candidates(self.model.table)]:
            parts = [np.ascontiguousarray(column).reshape(len(columns["key"]), -1).view(np.uint8).reshape(
                len(columns["key"]), -1) for column in columns.values()]
            records = np.ascontiguousarray(np.concatenate(parts, axis=1))
            count += len(records)
            total += sum(zlib.crc32(record) for record in records)
        return tuple(map(sum, zip(*hvd.allgather_object((count, total)))))

    def finish(self):
        """The newest checkpoint is whole: its folder."""
        self.recovery.finish()
        hvd.barrier()
        return self.recovery._newest()

    def load(self):
        """As when a rank was lost. Returns the step."""
        self.recovery.enter()
        newest = self.recovery.load(self.shards, self.state, self.metrics)
        self.state.sync()
        return newest and int(os.path.basename(newest).split(".")[0])

    def close(self):
        if self.recovery._now is not None:
            self.recovery._now.abandon()
            self.recovery._now._writer.join()
        hvd.barrier()
        self.model.table.close()


def math_of(auc):
    value = auc.compute()
    return value, auc.error, hvd.allreduce(torch.tensor(auc.state_dict()["counts"].sum()), op=hvd.Sum).item()

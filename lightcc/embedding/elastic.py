"""What a state of an elastic job does with tables: each rank keeps its own shard, and rows move to their owners in a
new world. Of no framework: that says by a subclass what of a step may be under way."""
import logging
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from lightcc.core import elastic_worker, lib, ops
from lightcc.core.elastic_shared import SharedPart, SharingState
from lightcc.core.objects import allgather_object, broadcast_object
from lightcc.core.process_sets import global_process_set
from lightcc.embedding import lib as library
from lightcc.embedding import moving
from lightcc.embedding.job_recovery import Recovery
from lightcc.embedding.metrics import DecayedAUC
from lightcc.embedding.moving import ElasticShard, Lost
from lightcc.embedding.table import Table

_logger = logging.getLogger("lightcc")


class TablesPart(SharedPart):
    """The tables of a state, and the DecayedAUCs and the Recovery among its values. save() begins a log of the rows
    that change; restore() plays it back. A state without tables has it too: other ranks may have tables that this rank
    may not.

    tables: of the state's models. values: all that the state was given by name. Errors: ValueError for a Recovery
    beside tables of a process set of their own.
    """

    def __init__(self, tables: Iterable[Table], values: Mapping[str, Any]):
        self.shards = [ElasticShard(table) for table in sorted(tables, key=lambda table: table.name)]
        self.metrics = {name: value for name, value in values.items() if isinstance(value, DecayedAUC)}
        recoveries = {name: value for name, value in values.items() if isinstance(value, Recovery)}
        self.recovery: Optional[Recovery] = next(iter(recoveries.values()), None)
        self.names = [*self.metrics, *recoveries]
        self._kept: Dict[str, Any] = {}
        if self.recovery is not None:
            _expect_of_all(self.shards)
        self.save()

    def forget(self) -> None:
        """Drops what a step has left that is taken back: lookups and gradients."""

    def assigned(self, name: str, value: Any) -> None:
        if isinstance(value, DecayedAUC):
            self.metrics[name] = value
            self._kept[name] = value.state_dict()

    def save(self) -> None:
        self._kept = {name: metric.state_dict() for name, metric in self.metrics.items()}
        for shard in self.shards:
            library.call("begin_log", shard.table.handle, library.OF_COMMIT)

    def restore(self) -> None:
        self.forget()
        for name, metric in self.metrics.items():
            metric.load_state_dict(self._kept[name])
        for shard in self.shards:
            library.call("go_back", shard.table.handle)
            shard.table.history = None  # a delta of what was undone may have been taken
        if self.recovery is not None:
            self.recovery.went_back()

    def agree(self) -> None:
        ops.barrier()

    def settle(self, state: SharingState) -> None:
        if self.recovery is not None:
            self.recovery.enter()
        self.forget()
        lost = moving.settle(self.shards)
        if any(allgather_object(lost is not None, "lightcc.embedding.lost")):
            self._recover(state, lost)
        elif self.recovery is not None and self.shards:
            self.recovery.resume(self.shards, state, self.metrics)
        for metric in self.metrics.values():
            metric.share()

    def _recover(self, state: SharingState, lost: Optional[Lost]) -> None:
        told = f"{lost or 'rows of another process set are lost'}: they were in the memory of that rank alone"
        if self.recovery is None:
            raise RuntimeError(f"{told}. So that a job with tables goes on when a rank is lost, give its "
                               f"{type(state).__name__} recovery=lightcc.embedding.Recovery(path, every=steps)."
                               ) from lost
        folder = self.recovery.load(self.shards, state, self.metrics)
        if folder is None:
            raise RuntimeError(f"{told}, and {self.recovery.path} has no checkpoint of this job that is whole: was the "
                               "disk full? lightcc has warned of what could not be written.") from lost
        _logger.warning("%s. All ranks go back to %s.", lost, folder)

    def leave(self) -> None:
        leaving = elastic_worker.leaving_ranks() if lib.rank() == 0 else []
        leaving = broadcast_object(leaving, 0, "lightcc.embedding.leaving")
        if not leaving:
            return
        moving.leave(self.shards, leaving)
        for metric in self.metrics.values():
            metric.share(_within(metric.process_set.ranks or [], leaving))

    def kept(self, state: SharingState, is_commit: bool) -> None:
        if self.recovery is not None and self.shards:
            self.recovery.kept(self.shards, state, self.metrics, is_commit)


def _expect_of_all(shards: Sequence[ElasticShard]) -> None:
    for shard in shards:
        if shard.table.process_set is not global_process_set:
            raise ValueError(f"Recovery: table {shard.table.name!r} is of a process set of its own; it brings back "
                             "tables of all ranks only.")


def _within(ranks: List[int], some: List[int]) -> List[int]:
    """Ranks of the world as those of a process set."""
    return [ranks.index(one) for one in some if one in ranks]

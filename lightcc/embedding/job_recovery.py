"""Recovery: what a rank that is lost takes with it comes back from a checkpoint, and all ranks go back to its step."""
import logging
import os
import uuid
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence

from lightcc.core import ops
from lightcc.core.elastic_shared import SharingState
from lightcc.core.lib import rank
from lightcc.core.objects import allgather_object, broadcast_object
from lightcc.embedding import lib, rows
from lightcc.embedding.checkpoint import agreed
from lightcc.embedding.metrics import DecayedAUC
from lightcc.embedding.moving import ElasticShard
from lightcc.embedding.recovery import Checkpoint
from lightcc.embedding.recovery_folder import Checkpoints, Damaged, newest_job, read

_logger = logging.getLogger("lightcc")


class Recovery:
    """Give it to the TorchState, KerasState or TensorFlowState of an elastic job with tables:
    `KerasState(model, ..., recovery=E.Recovery(path, every=1000))`.

    After each `every` steps of the tables, the next commit begins a checkpoint of all of the state: tables, dense
    model, optimizers, samplers, metrics, values. It is written in the background while training goes on. If a rank is
    lost, and its rows with it, all ranks go back to the newest checkpoint that is whole. The first one is written
    before the first step. One that cannot be written (a full disk) is a warning, and the one before it is kept.

    path: a folder that all ranks see, newcomers too; jobs may share it. every: at least 1. full_every: one of so many
    checkpoints has all rows, and the others those that have changed since the one before; 1: all have all rows.
    resume: a new job, of any number of ranks, begins with the newest whole checkpoint that the path has, of the job
    that wrote last, if there is one: the first sync() of the state brings it, and the job goes on in that folder.
    All tables must be of the global process set.
    Errors: ValueError for another `every` or `full_every`; and from sync(), on all ranks, if the state or a table does
    not fit the checkpoint.

    >>> from lightcc import embedding
    >>> recovery = embedding.Recovery("recovery", every=100); recovery.every, os.path.isabs(recovery.path)
    (100, True)
    """

    def __init__(self, path: str, every: int = 1000, full_every: int = 10, resume: bool = False):
        if every < 1:
            raise ValueError(f"Recovery: every={every!r} steps; give at least 1.")
        if full_every < 1:
            raise ValueError(f"Recovery: full_every={full_every!r} checkpoints; give at least 1.")
        self.path, self.every, self.full_every = os.path.abspath(path), int(every), int(full_every)
        self._is_to_resume = bool(resume)
        self._checkpoints: Optional[Checkpoints] = None
        self._now: Optional[Checkpoint] = None
        self._since_full: List[Checkpoint] = []  # the last one with all rows, and its deltas; none: the next has all
        self._next_has_all = False  # rows
        self._begun = self._last = 0  # steps
        self._is_first = True

    def finish(self) -> None:
        """Waits until what is being written is on this rank's disk: a checkpoint, and those that it is a delta of. For
        the end of a job: a process that ends does not wait, and then the newest whole checkpoint is an earlier one."""
        for checkpoint in (*self._since_full, self._now):
            if checkpoint is not None:
                checkpoint.finish()

    def enter(self) -> None:
        """In a new world: all ranks have the job's folder, and what was being written is left as it is."""
        if self._now is not None:
            self._now.abandon()
            self._now = None
        self._since_full = []
        said = allgather_object((self._checkpoints and self._checkpoints.folder, self._is_to_resume),
                                        "lightcc.embedding.job")
        known = [folder for folder, _ in said if folder]
        has_begun = any(folder and not is_to_resume for folder, is_to_resume in said)
        self._is_to_resume = not has_begun and any(is_to_resume for _, is_to_resume in said)
        job = os.path.basename(known[0]) if known else broadcast_object(
            self._chosen_job() if rank() == 0 else "", 0, "lightcc.embedding.job.name")
        self._checkpoints = Checkpoints(self.path, job)
        self._is_first = self._newest() is None

    def _chosen_job(self) -> str:
        return (newest_job(self.path) if self._is_to_resume else None) or uuid.uuid4().hex

    def resume(self, shards: Sequence[ElasticShard], state: SharingState,
               metrics: Mapping[str, DecayedAUC]) -> None:
        """At the beginning of a job, if it shall: everything as the job before had it."""
        if not self._is_to_resume:
            return
        is_there = self._newest() is not None
        folder = self.load(shards, state, metrics)
        if is_there and folder is None:
            raise RuntimeError(f"Recovery: {self.path} has no checkpoint that can be read; the warnings name what is "
                               "damaged. Without resume=True the job begins anew.")
        if rank() == 0:
            _logger.info("The job goes on from %s." if folder else "There is no checkpoint to go on from: %s.",
                         folder or self.path)

    def load(self, shards: Sequence[ElasticShard], state: SharingState,
             metrics: Mapping[str, DecayedAUC]) -> Optional[str]:
        """Everything as it was at the newest checkpoint: the shards, and on rank 0 what its sync sends to all. Returns
        where that is; None: there is none."""
        assert self._checkpoints is not None
        own = [shard.place.version for shard in shards if shard.place] + [self._checkpoints.last_version()]
        version = 1 + max(allgather_object(max(own), "lightcc.embedding.versions"))
        folder = self._newest(warn=True)
        while folder is not None:
            parts = self._read(folder, shards, state, version)
            if parts is not None:
                agreed(partial(_give, folder, parts, state, metrics), shards[0].table.group, "recovery")
                for shard in shards:
                    shard.broken = False
                break
            folder = self._newest(older_than=folder, warn=True)
        self._is_to_resume = False
        return folder

    def _read(self, folder: str, shards: Sequence[ElasticShard], state: SharingState,
              version: int) -> Optional[List[Dict[str, Any]]]:
        """Each old rank's state, with the rows read; None, with a warning, if some rank cannot read it."""
        parts: List[Dict[str, Any]] = []

        def damage() -> str:
            try:
                parts.extend(map(state.unpacked, read(folder, shards, version)))
            except Damaged as error:
                return str(error)
            return ""
        found = [text for text in agreed(damage, shards[0].table.group, "recovery") if text]
        if not found:
            return parts
        if rank() == 0:
            _logger.warning("The checkpoint %s cannot be read: %s. An older one is taken.", folder, found[0])
        return None

    def kept(self, shards: Sequence[ElasticShard], state: SharingState, metrics: Mapping[str, DecayedAUC],
             is_commit: bool) -> None:
        """All of the state was saved at this step, on all ranks."""
        assert self._checkpoints is not None
        step = max(shard.table.counters().steps for shard in shards)
        if is_commit and step - self._begun < self.every:
            half = self._begun + self.every // 2  # until when it shall have been read
            if self._now is not None:
                self._now.advance(min(0.5, (step - self._last) / max(half - self._last, 1)))
            self._last = step
            return
        if self._now is not None:
            self._now.advance(1)
        if not is_commit or not self._can_be_delta(shards):
            self._since_full = []
        version = max(shard.place.version for shard in shards if shard.place)
        self._now = Checkpoint(self._checkpoints.name(step, version), step, shards, _packed(state, metrics),
                               self._since_full[-1] if self._since_full else None,
                               self._checkpoints.remove_old if rank() == 0 else None)
        self._since_full.append(self._now)
        self._next_has_all = False
        self._begun = self._last = step
        if self._is_first:
            self._now.finish()
            ops.barrier()
            self._is_first = False

    def went_back(self) -> None:
        """The tables are what they were at a commit, which their changes do not say: the next checkpoint has all rows.
        """
        self._next_has_all = True

    def _can_be_delta(self, shards: Sequence[ElasticShard]) -> bool:
        """Whether the next checkpoint may have only changes, on all ranks."""
        if self.full_every == 1:
            return False
        can = (not self._next_has_all and 0 < len(self._since_full) < self.full_every and
               not any(one.failed for one in self._since_full) and
               all(rows.gone(shard.table, lib.OF_CHECKPOINTS) is not None for shard in shards))
        return all(allgather_object(can, "lightcc.embedding.can_be_delta"))

    def _newest(self, older_than: Optional[str] = None, warn: bool = False) -> Optional[str]:
        assert self._checkpoints is not None
        found = self._checkpoints.newest(older_than, warn) if rank() == 0 else None
        return broadcast_object(found, 0, "lightcc.embedding.newest")


def _give(folder: str, parts: List[Dict[str, Any]], state: SharingState, metrics: Mapping[str, DecayedAUC]) -> None:
    """What a checkpoint has beside rows to the metrics, and on rank 0 to the state."""
    for name, metric in metrics.items():
        metric.load_parts([part["metrics"][name] for part in parts if name in part["metrics"]] if rank() == 0 else [])
    if rank() != 0:
        return
    kept, values = parts[0]["kept"], parts[0]["values"]
    others = sorted(kept.keys() - state.own_saved().keys() | values.keys() - state._saved_state.keys())
    if others:
        raise ValueError(f"Recovery: {folder} has {', '.join(others)}, which this {type(state).__name__} has not. Give "
                         "it all that it had when that was written.")
    for name, saved in kept.items():
        try:
            state.take_own(name, saved)
        except ValueError as error:
            raise ValueError(f"Recovery: {name!r} does not fit {folder}: {error}") from error
    state.take_values(values)


def _packed(state: SharingState, metrics: Mapping[str, DecayedAUC]) -> bytes:
    """What a checkpoint has beside the tables: each rank's part of the metrics, and all else on rank 0."""
    kept, values = (state.own_saved(), state._saved_state) if rank() == 0 else ({}, {})
    return state.packed({"kept": kept, "values": values,
                         "metrics": {name: metric.state_dict() for name, metric in metrics.items()}})

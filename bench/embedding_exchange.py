"""Two ranks of one host: what the exchange of a step takes, and how many more ids a second two ranks look up than one.
Beside these, two processes with a world of their own each, which exchange nothing, say how many the machine allows.

Exchange: a lookup and an update of lightcc.embedding, less the same rows' reading and updating in a table of the owner
alone; beside it what a program would do by itself: torch.unique with inverse, keys to their owners, and the three
alltoalls of keys, rows and gradients, by lightcc.torch's alltoall.
"""
import os
import statistics
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import embedding_ids
import numpy as np
import torch
from report import ratio_of
from teams import Team, become_rank

import lightcc.torch as hvd
from lightcc.embedding import Rule, Table, lib
from lightcc.embedding import exchange as E

BATCHES, WARM_UP = 8, 2
NUMBERS = {"lr": 1e-3}
LEAST_SCALING, MOST_EXCHANGE = 1.5, 1.0


def update(table: Table, gradients: List[Tuple[E.Found, np.ndarray]]) -> None:
    E.Step([E.Update(table, gradients, NUMBERS)], average=True).finish()


class Local:
    """A table of one rank alone, whose rows are read and updated by key."""

    def __init__(self, dim: int):
        self._set = hvd.ProcessSet([hvd.rank()])
        for rank in range(hvd.size()):  # every rank adds every set
            own = self._set if rank == hvd.rank() else hvd.ProcessSet([rank])
            hvd.add_process_set(own)
        self._table = Table("local", dim, "float32", process_set=self._set)
        self._table.attach(Rule("sgd"))
        self._dim = dim

    def born(self, keys: np.ndarray) -> None:
        self.update(keys, np.zeros((len(keys), self._dim), np.float32))

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        lib.call("read", self._table.handle, lib.address(keys), None, len(keys), lib.address(rows))

    def update(self, keys: np.ndarray, values: np.ndarray) -> None:
        """One gradient a key, none twice."""
        gradient = (lib.Gradient * 1)(lib.Gradient(keys=lib.address(keys), count=len(keys), values=lib.address(values)))
        step = (lib.Step * 1)(lib.struct(lib.Step, table=self._table.handle, gradient_count=1, gradients=gradient,
                                         **NUMBERS))
        lib.finish(lib.CallHandle(lib.made("update", self._table.group.handle, step, 1, 0)))


class Rank:
    """Of a world of `size`; ids of a rank are its own. It is bound to the core of that number; default: its rank."""

    def __init__(self, rank: int, size: int, folder: str, ids: int, rows: int, dim: int, kind: str,
                 core: Optional[int] = None):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(rank if core is None else core) % len(cores)]})
        become_rank(rank, size, folder)
        torch.set_num_threads(1)
        hvd.init()
        self._table = Table("shared", dim, "float32")
        self._table.attach(Rule("sgd"))
        every = embedding_ids.raw_keys(np.arange(rows))
        for piece in np.array_split(np.ascontiguousarray(every[rank::size]), -(-rows // size // ids)):
            self._step(piece)
        self._keys = [embedding_ids.raw_keys(one) for one in embedding_ids.batches(kind, rows, ids, BATCHES, rank + 2)]
        self._prepare_pieces(every, dim)

    def _prepare_pieces(self, every: np.ndarray, dim: int) -> None:
        """For the sides of the exchange."""
        self._owned, self._dim = [], dim
        if hvd.size() == 1:
            return
        self._local = Local(dim)
        owners = self._owners_of(every)
        for piece in np.array_split(every[owners == hvd.rank()], 16):
            self._local.born(piece)
        for step in range(BATCHES):  # what this rank's shard is asked for
            unique = np.unique(self._keys[step])
            everything = np.concatenate(hvd.allgather_object(unique))
            served = np.unique(everything)
            self._owned.append(np.ascontiguousarray(served[self._owners_of(served) == hvd.rank()]))

    def _owners_of(self, keys: np.ndarray) -> np.ndarray:
        owners = np.empty(len(keys), np.uint16)
        lib.call("owner_of", self._table.handle, lib.address(keys), len(keys), lib.address(owners))
        return owners

    def _step(self, keys: np.ndarray) -> None:
        (found,) = E.Lookup([(self._table, E.Keys(keys))], training=True, prefetch=False).finish()
        update(self._table, [(found, found.rows)])

    def steps(self, repeats: int) -> float:
        """Seconds a lookup and update of lightcc."""
        return self._timed(lambda i: self._step(self._keys[i]), repeats)

    def local(self, repeats: int) -> float:
        """Seconds that this rank's part of the reading and updating takes."""
        rows = [np.zeros((len(owned), self._dim), np.float32) for owned in self._owned]

        def step(i: int) -> None:
            self._local.read(self._owned[i], rows[i])
            self._local.update(self._owned[i], rows[i])
        return self._timed(step, repeats)

    def by_hand(self, repeats: int) -> float:
        """Seconds of unique, partition and three alltoalls."""
        return self._timed(self._by_hand, repeats)

    def _by_hand(self, i: int) -> None:
        unique, inverse = torch.unique(torch.from_numpy(self._keys[i]), return_inverse=True)
        owners = torch.bitwise_and(unique, 1)  # as good as a hash: these keys are hashes
        order = torch.argsort(owners, stable=True)
        splits = torch.bincount(owners, minlength=hvd.size()).int()
        keys, received = hvd.alltoall(unique[order], splits, name="keys")
        rows = torch.empty((len(keys), self._dim))
        mine, _ = hvd.alltoall(rows, received, name="rows")
        hvd.alltoall(mine, splits, name="gradients")

    def _timed(self, step: Callable[[int], None], repeats: int) -> float:
        for i in range(WARM_UP):
            step(i)
        hvd.barrier()
        begin = time.perf_counter()
        for i in range(repeats):
            step(i % BATCHES)
        return (time.perf_counter() - begin) / repeats

    def end(self) -> None:
        hvd.shutdown()


class Apart(Rank):
    """One of several processes at a time that each are a world of one."""

    def __init__(self, number: int, _: int, folder: str, *rest: Any):
        super().__init__(0, 1, f"{folder}/{number}", *rest, core=number)


def slowest(team: Team, what: str, repeats: int) -> float:
    return max(team.ask(what, repeats))


def contest(ids: int, rows: int, dim: int, rounds: int, repeats: int) -> Dict[str, Any]:
    """The exchange beside that by hand."""
    found = {}
    for kind in embedding_ids.KINDS:
        samples: Dict[str, List[float]] = {"steps": [], "local": [], "by_hand": []}
        with tempfile.TemporaryDirectory() as folder:
            team = Team("exchange", 2, Rank, (folder, ids, rows, dim, kind))
            try:
                for _ in range(rounds):
                    for what, some in samples.items():
                        some.append(slowest(team, what, repeats))
            finally:
                team.end()
        ours = [whole - local for whole, local in zip(samples["steps"], samples["local"])]
        ratio, low, high = ratio_of(ours, samples["by_hand"])
        print(f"\n2 ranks, {ids:,} ids each, {kind}, ms: lookup and update {ms(samples['steps'])}, of which the rows "
              f"{ms(samples['local'])}; exchange {ms(ours)}, by hand {ms(samples['by_hand'])}\n"
              f"exchange: {ratio:.2f} of that by hand ({low:.2f} to {high:.2f}), goal <= {MOST_EXCHANGE:g}: "
              f"{'ok' if ratio <= MOST_EXCHANGE else 'MISSED'}", flush=True)
        found[kind] = {"samples_s": samples, "ratio": ratio}
    return found


def scaling(ids: int, rows: int, dim: int, rounds: int, repeats: int) -> Dict[str, Any]:
    """Ids a second of two ranks beside those of one."""
    found = {}
    for kind in embedding_ids.KINDS:
        sides = {"1 rank": (1, Rank), "2 ranks": (2, Rank), "2 apart": (2, Apart)}
        samples: Dict[str, List[float]] = {side: [] for side in sides}
        with tempfile.TemporaryDirectory() as folder:
            teams = {side: Team(side, size, factory, (f"{folder}/{side.replace(' ', '_')}", ids, rows, dim, kind))
                     for side, (size, factory) in sides.items()}
            try:
                for _ in range(rounds):
                    for side, team in teams.items():
                        samples[side].append(slowest(team, "steps", repeats))
            finally:
                for team in teams.values():
                    team.end()
        twice = [2 * seconds for seconds in samples["1 rank"]]
        ratio, low, high = ratio_of(twice, samples["2 ranks"])
        apart, least, most = ratio_of(twice, samples["2 apart"])
        print(f"\n{ids:,} ids each, {kind}, ms: " + ", ".join(f"{side} {ms(some)}" for side, some in samples.items()) +
              f"\nids a second: {ratio:.2f} times those of one rank ({low:.2f} to {high:.2f}), goal >= "
              f"{LEAST_SCALING:g}: {'ok' if ratio >= LEAST_SCALING else 'MISSED'}; of two that exchange nothing "
              f"{apart:.2f} ({least:.2f} to {most:.2f})", flush=True)
        found[kind] = {"samples_s": samples, "ratio": ratio, "apart": apart}
    return found


def ms(samples: List[float]) -> str:
    return f"{1e3 * statistics.median(samples):.2f}"

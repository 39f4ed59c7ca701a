"""Tables in elastic jobs: ranks come, leave and are killed, and every sample is in the rows as often as it should be.

A row of `counts` holds how often its sample was trained, as whole numbers, which any ranks add up alike. The rows of
`moments` (SparseAdam) are compared with those of another table that trains the same batches at the end, unbroken. Those
of `seen` and `sieved` come when their keys have occurred MIN_COUNT times. The state has a ledger of what each rank
trained in each step. Of `aged` and `asked` rows go all the time; they are compared with unbroken tables, too.
"""
import collections
import json
import logging
import re

import elastic_worlds
import numpy as np
import pytest
import torch
from counted_training import OPTIONS, SAMPLES, Training, expect_each_once, prepare, result_of

import lightcc.torch as hvd
from lightcc.core import elastic_worker
from lightcc.core.elastic_state import HostUpdateResult, run_fn
from lightcc.embedding import eviction
from lightcc.embedding.admission import candidates
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

__all__ = ["prepare"]  # which the nursery calls
MIN_COUNT = 5
OTHERS = 20  # further keys of a step, which are born all the time
GOING = {"aged": {"evict": E.Ttl(2)},  # of which rows go in the update, and afterwards
         "asked": {"evict": E.Asking(lambda key, count, last, step: (key % 5 == 0) & (last < step), every=2),
                   "max_rows": 120}}


class Job(Training):
    """One worker: its tables and their optimizers."""

    FIRST_STEP = 1  # before, there are no rows

    def __init__(self, worlds, options):
        super().__init__(worlds, options)
        self.model = torch.nn.ModuleDict({
            "counts": E.HashEmbedding(2, name="counts", init=E.Zeros(), dtype=torch.float64),
            "moments": E.HashEmbedding(3, name="moments", init=E.Constant(0.5), dtype=torch.float64),
            "seen": E.HashEmbedding(1, name="seen", init=E.Zeros(), dtype=torch.float64, min_count=MIN_COUNT),
            "sieved": E.HashEmbedding(1, name="sieved", init=E.Zeros(), dtype=torch.float64, min_count=MIN_COUNT,
                                      admission=E.Bloom(4 << 20))})
        if options["evicts"]:
            for name, evict in GOING.items():
                self.model[name] = going(name, evict)
            self.going = E.SparseAdam([table for name in GOING for table in E.tables(self.model[name])], lr=0.01,
                                      op=hvd.Sum)
            self.wrap(self.going, "step", "age")
            self.wrap(eviction, "after_step", "evict")
            self.wrap(eviction, "_trim", "trim", before=True)
        if options["rows"]:
            self.model["many"] = E.HashEmbedding(1, name="many")
            self.many = E.SGD(E.tables(self.model["many"]), lr=1.0)
        self.came, self.moves = None, []
        self.model.dense = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(self.model.dense.weight, 1e6 if worlds.number else 0.0)
        self.counts = E.Pipeline(E.SGD(E.tables(self.model["counts"]), lr=1.0, op=hvd.Sum), depth=options["depth"])
        seen = E.tables(self.model["seen"]) + E.tables(self.model["sieved"])
        self.seen = E.SGD(seen, lr=1.0, op=hvd.Sum)
        self.moments = E.SparseAdam(E.tables(self.model["moments"]), lr=0.01, op=hvd.Sum)
        self.dense = hvd.DistributedOptimizer(torch.optim.SGD([self.model.dense.weight], lr=1.0), op=hvd.Sum)
        self.auc = E.DecayedAUC(1e9, 64)
        extra = {"recovery": E.Recovery(options["folder"], every=options["every"], resume=options["resume"])
                 } if options["every"] else {}
        self.begin(hvd.elastic.TorchState(
            self.model, self.dense, counts=self.counts, moments=self.moments, seen=self.seen, sampler=self.sampler,
            auc=self.auc, epoch=0, batch=0, steps=0, ledger=[], **extra,
            **({"going": self.going} if options["evicts"] else {})))
        for thing, method in ((self.counts, "step"), (self.moments, "step"), (self.state, "check_host_updates"),
                              (self.state, "save"), (self.state, "sync")):
            self.wrap(thing, method)
        shard = self.state._shared[0].shards[-1]
        self.wrap(shard, "_move", before=True)
        elastic_worker.leaving_ranks = lambda: [
            self.worlds.members.index(me) for me in self.worlds.lost] if self.where() == "leave" else []

    def note_moves(self):
        """How many rows have moved into this world, of how many, and of how many ranks it is."""
        shards = self.state._shared[0].shards
        now = sum(shard.came for shard in shards)
        moved, rows = zip(*hvd.allgather_object((now - (self.came or 0), sum(len(shard.table) for shard in shards))))
        self.came = now
        self.moves.append([sum(moved), sum(rows), hvd.size()])

    def train(self, state):
        self.note_moves()
        if self.options["rows"] and not state.steps:
            self.model["many"](torch.arange(hvd.rank(), self.options["rows"], hvd.size())).sum().backward()
            self.many.step()
        super().train(state)

    def trained(self, ids):
        self.state.ledger.append(hvd.allgather_object(ids.tolist()))

    def step(self, ids):
        self.auc.update([0.5] * len(ids), [1] * len(ids))
        counts = self.model["counts"](ids)
        keys = seen_keys(ids, self.state.steps)
        seen = self.model["seen"](keys).sum() + self.model["sieved"](keys).sum()
        loss = -seen - counts.sum() - len(ids) * self.model.dense.weight.sum()
        loss = loss + moments_loss(self.model["moments"], ids, self.state.steps)
        for name in GOING if self.options["evicts"] else ():
            loss = loss + moments_loss(self.model[name], ids, self.state.steps)
        self.counts.start()
        loss.backward()
        self.dense.step()
        self.counts.step()
        self.seen.step()
        self.moments.step()
        if self.options["evicts"]:
            self.going.step()
        self.dense.zero_grad()


def going(name, evict):
    return E.HashEmbedding(3, name=name, init=E.Constant(0.5), dtype=torch.float64, **evict)


def moments_loss(table, ids, step):
    """Also of keys that nobody else has in this step, many of them new."""
    others = ids[:1] * 1000 + 1_000_000 * step + torch.arange(OTHERS) if len(ids) else ids
    keys = torch.cat([ids, others])
    scale = 1 + (keys % 7).double().unsqueeze(1)
    return (table(keys) * scale).sum() + table(keys).square().sum()


def seen_keys(ids, step):
    """Those of all steps, and one of each rank's step alone."""
    return torch.cat([ids % 17, ids[:1] * 1000 + 1_000_000 * (step + 1)])


def work(worlds, options):
    """Of a worker."""
    logging.basicConfig()
    worlds.enter()
    if options["set"]:
        work_of_a_set(worlds, options["set"])
        return
    job = Job(worlds, options)
    try:
        run_fn(job.train, worlds.leave_and_enter)(job.state)
    except RuntimeError as error:
        print("lost", error)
        hvd.shutdown()
        return
    rows = everything(job.model["counts"])
    counts = [round(rows[key][0]) if key in rows else 0 for key in range(SAMPLES)]
    assert all(list(row) == [round(row[0])] * 2 for row in rows.values())
    assert job.model.dense.weight.item() == sum(counts), "the dense part is of other steps"
    trained = [sample for step in job.state.ledger for part in step for sample in part]
    assert sorted(trained) == sorted(key for key in range(SAMPLES) for _ in range(counts[key])), "the ledger is wrong"
    expect_as_unbroken(job, "moments", {})
    for name, evict in GOING.items() if options["evicts"] else ():
        born = expect_as_unbroken(job, name, evict)
        assert 0 < len(everything(job.model[name])) < born / 2, "few rows have gone"
    expect_as_counted(job)
    auc = hvd.allreduce(torch.tensor(job.auc.state_dict()["counts"].sum()), op=hvd.Sum).item()
    print("result", json.dumps([counts, job.state.ledger, round(auc, 3), worlds.number]))
    print("moves", json.dumps(job.moves))
    hvd.shutdown()


def work_of_a_set(worlds, members):
    """A table of some ranks: those that are left go on, and newcomers are not in its set."""
    some = hvd.add_process_set([worlds.members.index(me) for me in members if me in worlds.members] or [0])
    model = torch.nn.ModuleDict()
    if worlds.me in members:
        model["some"] = E.HashEmbedding(2, name="some", init=E.Zeros(), process_set=some)
        sparse = E.SGD(E.tables(model), lr=1.0, op=hvd.Sum)
    else:
        with pytest.raises(ValueError, match="rank"):
            E.HashEmbedding(2, name="some", process_set=some)
    state = hvd.elastic.TorchState(model, step=0)
    elastic_worker.leaving_ranks = lambda: [worlds.members.index(me) for me in worlds.lost]

    def train(state):
        while state.step < 12:
            if worlds.me in members:
                model["some"](torch.arange(40)).sum().backward()
                sparse.step()
            state.step += 1
            if hvd.rank() == 0 and state.step % 4 == 0 and not worlds.is_last:
                state.on_hosts_updated(1000 + worlds.number, HostUpdateResult.mixed)
            state.commit()

    run_fn(train, worlds.leave_and_enter)(state)
    if worlds.me in members:
        print("rows", json.dumps([[int(key), float(row[0])] for columns in slices(model["some"].table, 100)
                                  for key, row in zip(columns["key"], columns["weight"])]))
    hvd.shutdown()


def everything(module):
    """All rows of a table, on every rank: keys to weights."""
    mine = {int(key): row.tolist() for columns in slices(module.table, 1000)
            for key, row in zip(columns["key"], columns["weight"])}
    return {key: row for part in hvd.allgather_object(mine) for key, row in part.items()}


def expect_as_unbroken(job, name, evict):
    """The rows are, to rounding, those of a table that trains what the ledger says. With as many ranks in all steps as
    now, bit for bit. Returns how many rows that table had in all."""
    twin = going(f"{name} twin", evict)
    optimizer = E.SparseAdam(E.tables(twin), lr=0.01, op=hvd.Sum)
    alike = all(len(step) == hvd.size() for step in job.state.ledger)
    most = max(map(len, job.state.ledger))
    for number, step in enumerate(job.state.ledger):
        for part in [*step[hvd.rank()::hvd.size()], *[[]] * most][:-(-most // hvd.size())]:  # lookups are collective
            moments_loss(twin, torch.tensor(part, dtype=torch.int64), number).backward()
        optimizer.step()
    expected, got = everything(twin), everything(job.model[name])
    assert expected.keys() == got.keys()
    for key, row in got.items():
        if alike:
            assert row == expected[key]
        np.testing.assert_allclose(np.array(row), np.array(expected[key]), rtol=1e-9, atol=1e-12)
    numbers = twin.statistics()
    return numbers["rows"] + numbers["evicted"]


def expect_as_counted(job):
    """A row has the gradients from the step on that brought its key's count to MIN_COUNT; other keys are candidates."""
    counts, rows = collections.Counter(), collections.Counter()
    for number, step in enumerate(job.state.ledger):
        now = collections.Counter(
            key for part in step for key in seen_keys(torch.tensor(part, dtype=torch.int64), number).tolist())
        counts.update(now)
        rows.update({key: n for key, n in now.items() if counts[key] >= MIN_COUNT})
    assert {key: round(row[0]) for key, row in everything(job.model["seen"]).items()} == rows
    assert everything(job.model["sieved"]) == everything(job.model["seen"])
    mine = [(int(key), int(count)) for part in candidates(job.model["seen"].table)
            for key, count in zip(part["key"], part["count"])]
    expected = {key: n for key, n in counts.items() if n < MIN_COUNT}
    assert dict(sum(hvd.allgather_object(mine), [])) == expected and len(expected) > SAMPLES


@pytest.fixture(scope="module")
def nursery():
    with elastic_worlds.Nursery("test_embedding_elastic") as nursery:
        yield nursery


PLAIN = {**OPTIONS, "where": ["step"], "every": 0, "rows": 0, "set": [], "resume": False, "depth": 0,
         "evicts": False}


@pytest.fixture
def train(nursery, tmp_path):
    return lambda worlds, **options: result(nursery, tmp_path, worlds, **options)


def result(nursery, folder, worlds, **options):
    """How often each sample is in the rows at the end, on all ranks of the last world alike; and the workers' texts."""
    options = {**PLAIN, "folder": str(folder / "recovery"), **options}
    print(options)
    texts = nursery.run(worlds, folder, options)
    counts, ledger, counted = result_of(texts, worlds)
    assert counted == pytest.approx(sum(counts), abs=0.01), "the metric has other samples"
    return counts, ledger, texts


def test_ranks_that_come_get_their_rows(train):
    counts, ledger, _ = train([[0, 1], [0, 1, 2], [0, 1, 2, 3]])
    expect_each_once(counts, 4)
    assert {len(step) for step in ledger} >= {2, 4}


def test_as_few_rows_move_as_can_be(train):
    """From n ranks to m, at least the share of those that are new, or have gone."""
    worlds = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1]]
    _, _, texts = train(worlds, where=["leave"], rows=30_000)
    moves = json.loads(re.search("^moves (.*)$", texts[0], re.MULTILINE)[1])
    assert [ranks for _, _, ranks in moves] == [2, 3, 4, 3, 2]
    for (_, _, before), (moved, rows, after) in zip(moves, moves[1:]):
        assert rows > 30_000
        assert moved <= 1.1 * rows * abs(after - before) / max(after, before), moves


@pytest.mark.parametrize("commit_every", [1, 100])
def test_ranks_that_leave_hand_over_their_rows(commit_every, train):
    """Four, three, four, two; rank 0 is among those that leave. Nothing is trained again."""
    counts, _, _ = train([[0, 1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [2, 4]], where=["leave"], commit_every=commit_every)
    expect_each_once(counts, 4)


def test_a_lost_shard_ends_the_job_and_says_what_to_set(nursery, tmp_path):
    texts = nursery.run([[0, 1, 2], [0, 2]], tmp_path, {**PLAIN, "folder": ""})
    for text in texts.values():
        assert re.search(r"^lost the rows of rank 1 of 3 of table 'counts' are lost: .*Recovery\(path, every=steps\)",
                         text, re.MULTILINE), text


def test_a_newcomer_that_dies_while_rows_move_to_it(train):
    """It had none yet, so nothing is lost: the world before goes on, and another newcomer comes."""
    counts, _, _ = train([[0, 1], [0, 1, 2], [0, 1], [0, 1, 3]], where=["_move"], seed=3)
    expect_each_once(counts, 3)


PLACES = [["step"], ["check_host_updates"], ["save"], ["sync"], ["step", "save", "sync"]]


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_rank_takes_all_back_to_the_same_step(seed, train):
    """The ledger has no gap and no repeat, and rows are those of an unbroken run. A newcomer replaces each."""
    where = PLACES[seed]
    counts, ledger, texts = train([[0, 1, 2], [0, 2, 3], [2, 3, 4]], where=where, every=3, seed=10 + seed,
                                  resume=seed % 2 == 1)
    expect_each_once(counts, 3)
    if where != ["sync"]:  # in the first one there are no rows yet
        assert re.search(r"WARNING:lightcc:the rows of rank \d of 3 .* All ranks go back to .*recovery", texts[2])
    assert {len(step) for step in ledger} == {3}


@pytest.mark.parametrize("where", [["evict"], ["age", "trim"]])
def test_a_rank_that_is_killed_while_rows_go(where, train):
    """While the ranks ask or trim after an update; in an update, of which rows have gone on some ranks; and between
    rows that go by a function and those above max_rows."""
    counts, ledger, texts = train([[0, 1, 2], [0, 2, 3], [2, 3, 4]], where=where, every=3, seed=30 + len(where),
                                  evicts=True)
    expect_each_once(counts, 3)
    assert re.search(r"WARNING:lightcc:the rows of rank \d of 3 .* All ranks go back to .*recovery", texts[2])
    assert {len(step) for step in ledger} == {3}


@pytest.mark.parametrize("depth", [1, 2])
def test_updates_that_wait_are_in_each_commit_and_go_back_with_the_step(depth, train):
    """A world whose ranks leave between two commits, and two in which a rank is killed."""
    worlds = [[0, 1, 2], [0, 2], [0, 2, 3], [0, 3, 4], [0, 3, 4, 5]]
    counts, _, _ = train(worlds, where=["leave", "step", "step", "check_host_updates"], every=3, seed=20 + depth,
                         commit_every=3, depth=depth)
    expect_each_once(counts, 4)


def test_fewer_ranks_go_on_from_a_checkpoint(train):
    counts, _, _ = train([[0, 1, 2, 3], [0, 2, 3], [2, 3], [2, 3, 4]], where=["step", "save", "sync"], every=4, seed=4,
                         commit_every=2)
    expect_each_once(counts, 4)


def test_a_table_of_some_ranks_goes_on_with_those_that_are_left(nursery, tmp_path):
    """Names 1 to 3 have it; 3 leaves, and 4 is new and not in the set."""
    texts = nursery.run([[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 4]], tmp_path, {**PLAIN, "set": [1, 2, 3]})
    rows = [row for me in (1, 2) for row in json.loads(re.search("^rows (.*)$", texts[me], re.MULTILINE)[1])]
    trained = -1.0 * (4 * 3 + 8 * 2)  # by three ranks, and then by two
    assert sorted(rows) == [[key, trained] for key in range(40)]

"""Process sets in elastic jobs: a set goes from world to world with its workers, which have other ranks there."""
import gc
import sys
from collections import deque

import elastic_worlds
import pytest
import torch
import warm

import lightcc.torch as hvd
from jobs import launch
from lightcc.core import process_sets
from lightcc.core.carried_sets import Known, Told, agreed
from lightcc.core.elastic_state import HostsUpdatedInterrupt, run_fn

pytestmark = pytest.mark.long

# Names are ranks of the first world: a worker is lost, the next comes, another one is lost, one comes.
WORLDS = [[0, 1, 2], [1, 2], [1, 2, 3], [2, 3], [2, 3, 4]]


# Who decides

@pytest.mark.parametrize("told, expected", [
    ([None, None], {}),
    ([Told(0, []), None], {}),
    ([Told(1, [Known(0, 1, True, True)]), None, Told(1, [Known(0, 1, True, True)])], {0: (1, [0, 2])}),
    ([None, Told(1, [Known(0, 1, False, True)])], {0: (1, [])}),
    ([Told(1, [Known(0, 1, True, False)]), Told(1, [Known(0, 1, False, True)])], {0: (1, [0])}),
    ([Told(1, [Known(0, 1, True, False)]), Told(1, [Known(0, 1, False, False)])], {}),
    ([Told(2, [Known(0, 1, True, True), Known(1, 2, True, True)]), Told(1, [Known(0, 1, True, True)])],
     {0: (1, [0, 1])})],
    ids=["first world", "none", "a newcomer", "no member left", "one holds it", "nobody holds it", "made by one only"])
def test_what_is_carried_over(told, expected):
    assert agreed(told) == expected


# Workers

class Worker:
    """Lives in the worlds, and checks its process sets in each of them."""

    def __init__(self, worlds, options):
        self.worlds, self.wanted = worlds, options["sets"]
        if options["given to"] == "init":
            self.sets = [hvd.ProcessSet(ranks) for ranks in self.wanted]
            worlds.enter(process_sets=self.sets)
        else:
            worlds.enter()
            self.sets = [hvd.add_process_set(ranks) for ranks in self.wanted]
        self.model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0), self.model.named_parameters(), op=hvd.Sum,
            process_set=self.sets[0])
        self.state = hvd.elastic.TorchState(self.model, self.optimizer)
        self.checks = getattr(self, options["checks"])

    def train(self, state):
        state.commit()
        self.checks()
        hvd.barrier()
        if self.worlds.is_last:
            return
        if self.worlds.me in self.worlds.lost:
            elastic_worlds.die()
        if self.worlds.grows:
            raise HostsUpdatedInterrupt(False)
        while True:
            hvd.allreduce(torch.ones(1), name="until somebody is gone")

    def ranks(self, wanted):
        """Of those who are left."""
        return [rank for rank, me in enumerate(self.worlds.members) if me in wanted]

    def check_sets(self):
        for i, (wanted, process_set) in enumerate(zip(self.wanted, self.sets)):
            if self.ranks(wanted):
                self.check_set(process_set, 1 + i, wanted)
            else:
                assert (process_set.process_set_id, process_set.ranks, process_set.included()) == (None, [], False)
                for use in (hvd.barrier, hvd.add_process_set):
                    with pytest.raises(ValueError, match=r"ranks=\[\].*every member of it has left the elastic job"):
                        use(process_set)

    def check_set(self, process_set, number, wanted):
        ranks = self.ranks(wanted)
        assert (process_set.process_set_id, process_set.ranks, process_set.size()) == (number, ranks, len(ranks))
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks()[number] == ranks
        assert process_set.included() == (self.worlds.me in wanted)
        if process_set.included():
            assert hvd.allgather(torch.tensor([self.worlds.me]), process_set=process_set).tolist() == [
                me for me in self.worlds.members if me in wanted]

    def check_optimizer(self):
        """Adds the names of its set's members to the weights of these, and nothing to those of others."""
        self.check_sets()
        before = self.model.weight.item()
        self.optimizer.zero_grad()
        (-self.worlds.me * self.model.weight).sum().backward()
        self.optimizer.step()
        members = [me for me in self.worlds.members if me in self.wanted[0]]
        assert self.model.weight.item() - before == (
            sum(members) if self.worlds.me in members else self.worlds.me)

    def check_sets_of_the_function(self):
        """Made anew in each world, some with the ranks of one that has been carried over; nothing piles up."""
        self.check_sets()
        gc.collect()
        first, last = hvd.add_process_set([0]), hvd.add_process_set([hvd.size() - 1])
        for process_set in (first, last):
            if process_set.included():
                assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=process_set).tolist() == process_set.ranks
        assert len(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) <= 1 + len(self.sets) + 2
        if self.worlds.number == 0:
            with pytest.raises(ValueError, match="exists already"):
                hvd.add_process_set(last.ranks)

    def check_removed_sets(self):
        """The first is removed in the first world: the second keeps its id, and newcomers know which one is which."""
        if self.worlds.number == 0:
            assert hvd.remove_process_set(self.sets[0])
        assert self.sets[0].process_set_id is None
        self.check_set(self.sets[1], 2, self.wanted[1])


def prepare():
    """Before workers are forked: what torch imports late."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def work(worlds, options):
    """Of a worker."""
    worker = Worker(worlds, options)
    run_fn(worker.train, worlds.leave_and_enter)(worker.state)
    hvd.shutdown()


@pytest.fixture(scope="module")
def nursery():
    with elastic_worlds.Nursery("test_elastic_process_sets") as nursery:
        yield nursery


@pytest.mark.parametrize("given_to", ["init", "add_process_set"])
@pytest.mark.parametrize("sets", [[[0, 1]], [[0, 1], [1, 2], [0], [2]], [[0], [2, 1], [0, 2]]], ids=str)
def test_sets_go_with_their_workers(sets, given_to, nursery, tmp_path):
    nursery.run(WORLDS, tmp_path, {"sets": sets, "given to": given_to, "checks": "check_sets"})


@pytest.mark.parametrize("checks", ["check_optimizer", "check_sets_of_the_function", "check_removed_sets"])
def test_what_uses_sets(checks, nursery, tmp_path):
    sets = [[1, 2], [0, 2]]
    nursery.run(WORLDS, tmp_path, {"sets": sets, "given to": "add_process_set", "checks": checks})


def test_a_set_of_all_who_are_left(nursery, tmp_path):
    worlds = [[0, 1, 2], [0, 1], [1], [1, 3]]
    nursery.run(worlds, tmp_path, {"sets": [[0, 1]], "given to": "init", "checks": "check_sets"})


def test_a_newcomer_that_makes_more_sets_than_there_are(monkeypatch):
    hvd.init()
    monkeypatch.setattr(process_sets, "to_take", deque())
    with pytest.raises(ValueError, match=r"rank 0 has come later .* more process sets than the \d+ that the others"):
        hvd.add_process_set([0])
    hvd.shutdown()


PROGRAM = """
import os, signal, sys, time
import lightcc.torch as hvd
import torch
from lightcc.core import carried_sets

def die(): os.kill(os.getpid(), signal.SIGKILL)

worker, folder = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
if worker == 3:
    carried_sets._make_groups = lambda ranks: die()
hvd.init()
pair = hvd.add_process_set([0, 1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=pair)

@hvd.elastic.run
def train(state):
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.steps += 1
        state.commit()
        workers = hvd.allgather(torch.tensor([worker])).tolist()
        if worker == 0 and len(workers) == 3 and state.steps > 10:
            die()
        if max(workers) == 4 and len(workers) == 3:
            return workers
        time.sleep(0.01)

workers = train(hvd.elastic.TorchState(model, optimizer, steps=0))
print("in the end", [workers[rank] for rank in pair.ranks], pair.process_set_id, flush=True)
"""


def test_a_newcomer_that_dies_while_sets_are_carried_over_costs_the_others_nothing(tmp_path):
    """Worker 0, a member, is lost; worker 3, which comes for it, dies in init; worker 4 comes."""
    code, out, err = launch("-np", 3, "--min-np", 2, "--failures-per-host", 9, sys.executable, "-c", PROGRAM, tmp_path,
                            popen=warm.Popen)
    assert code == 0 and err.count("was killed by signal 9") == 2, err
    assert sorted(out.splitlines()) == [f"[{worker}]<stdout>:in the end [1] 1" for worker in (1, 2, 4)], (out, err)

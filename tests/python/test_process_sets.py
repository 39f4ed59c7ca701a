"""Process sets: registered at init and later, overlapping, used side by side. Mostly with numpy: sets know no
framework."""
import random
import threading

import numpy as np
import pytest
from cases import FRAMEWORKS, Numpy

import lightcc.numpy as hvd
import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.sizes]

SEED = 7


@pytest.mark.parametrize("np", (2, 3, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def halves():
    """Three sets that overlap: the even ranks, the last ones, and the first alone."""
    size = hvd.size()
    wanted = [range(0, size, 2), range(size // 2, size), [0]]
    distinct = []
    for who in map(list, wanted):
        if who not in distinct and who != list(range(size)):
            distinct.append(who)
    return [hvd.ProcessSet(who) for who in distinct]


@pytest.fixture
def sets():
    """The sets of halves(), given to init."""
    hvd.init()
    static = halves()
    hvd.shutdown()
    hvd.init(process_sets=static)
    yield static
    hvd.shutdown()


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


def mine(sets):
    return [s for s in sets if s.included()]


def expect_works(process_set, framework=None):
    """Every collective in one set, with ranks that are not members doing nothing."""
    framework = framework or Numpy()
    who, verbs, how = process_set.ranks, framework.hvd, {"process_set": process_set}
    every = np.array([[1.0 + rank] for rank in who])

    def rows(count):
        return framework.tensor(np.full((count, 1), 1.0 + hvd.rank()), "float64")

    def expect(tensor, values):
        framework.expect(tensor, values, "float64")

    expect(verbs.allreduce(rows(1), op=hvd.Sum, **how), [[every.sum()]])
    expect(verbs.allreduce(rows(1), **how), [[every.mean()]])
    expect(verbs.allgather(rows(1), **how), every)
    expect(verbs.broadcast(rows(1), who[-1], **how), [[1 + who[-1]]])  # a world rank
    expect(verbs.alltoall(rows(len(who)), **how), every)
    expect(verbs.reducescatter(rows(len(who) + 1), op=hvd.Sum, **how),
           np.full((2 if process_set.rank() == 0 else 1, 1), every.sum()))
    expect(verbs.grouped_allreduce([rows(1), rows(1)], op=hvd.Max, **how)[1], [[every.max()]])
    assert hvd.broadcast_object(hvd.rank(), who[-1], **how) == who[-1]
    assert hvd.allgather_object(hvd.rank(), **how) == who
    verbs.barrier(process_set)


def check_queries(sets):
    assert [s.process_set_id for s in sets] == list(range(1, 1 + len(sets)))
    for s in [hvd.global_process_set, *sets]:
        assert s.size() == len(s.ranks)
        assert s.included() == (hvd.rank() in s.ranks)
        if s.included():
            assert s.rank() == s.ranks.index(hvd.rank())
        else:
            with pytest.raises(ValueError, match=f"rank {hvd.rank()}"):
                s.rank()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.process_set_id == 0


def check_unregistered_set(world):
    s = hvd.ProcessSet([0])
    assert (s.process_set_id, s.size(), s.rank(), s.included()) == (None, None, None, hvd.rank() == 0)
    assert hvd.ProcessSet([3, 1, 2]).ranks == [1, 2, 3]
    for ranks_or_comm in (["0"], [0.0], [0, 0], 0, None):
        with pytest.raises(ValueError):
            hvd.ProcessSet(ranks_or_comm)


def check_collectives(sets):
    for framework in [make() for make in FRAMEWORKS.values()] * 3:
        for s in mine(sets):
            expect_works(s, framework)
        expect_works(hvd.global_process_set, framework)


def check_sets_in_any_order(sets):
    """Each rank goes through its sets in its own order: operations of different sets do not wait for each other, and
    may have the same names."""
    everything = mine(sets) + [hvd.global_process_set]
    rng = random.Random(SEED + hvd.rank())
    for step in range(50):
        rng.shuffle(everything)
        handles = [(s, name, hvd.allreduce_async(np.array([1.0 + step]), name=name, op=hvd.Sum, process_set=s))
                   for s in everything for name in (None, "same")]
        rng.shuffle(handles)
        for s, _, handle in handles:
            assert hvd.synchronize(handle) == (1 + step) * s.size()


def check_broadcast_of_other_root(sets):
    for s in mine(sets):
        for root in range(hvd.size()):
            x = np.array([hvd.rank()])
            if root in s.ranks:
                assert hvd.broadcast(x, root, name="root", process_set=s) == root
            else:
                with pytest.raises(ValueError, match=f"root rank {root} is not in process set"):
                    hvd.broadcast(x, root, name="root", process_set=s)


def check_disagreement_in_a_set_is_no_concern_of_others(sets):
    handle = hvd.allreduce_async(np.ones(4), op=hvd.Sum, name="all")
    for s in mine(sets):
        if s.size() > 1:
            with pytest.raises(hvd.HorovodInternalError, match="ranks disagree on shape"):
                hvd.allreduce(np.ones(2 + (s.rank() == 0)), name="bad", process_set=s)
            assert (hvd.allreduce(np.ones(2), name="bad", op=hvd.Sum, process_set=s) == s.size()).all()
    assert (hvd.synchronize(handle) == hvd.size()).all()


def check_add_and_remove(world):
    for _ in range(3):
        added = [hvd.add_process_set(s) for s in halves()]
        assert [s.process_set_id for s in added] == list(range(1, 1 + len(added)))
        for s in mine(added):
            expect_works(s)
        for s in added:
            assert hvd.remove_process_set(s) is True
            assert s.process_set_id is None and s.size() is None
            assert hvd.remove_process_set(s) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    expect_works(hvd.global_process_set)


def check_ids_are_used_again(world):
    a, b = hvd.add_process_set([0]), hvd.add_process_set([1])
    assert (a.process_set_id, b.process_set_id) == (1, 2)
    hvd.remove_process_set(b)
    hvd.remove_process_set(a)
    c, d = hvd.add_process_set([0]), hvd.add_process_set([1])
    assert (c.process_set_id, d.process_set_id) == (2, 1)  # first freed, first used
    for s in mine([c, d]):
        expect_works(s)


def check_remove_waits_for_nobody_in_the_set(world):
    """A set may be removed while operations of the world are in flight."""
    s = hvd.add_process_set([0])
    handles = [hvd.allreduce_async(np.full(1000, i), op=hvd.Max) for i in range(20)]
    hvd.remove_process_set(s)
    for i, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == i).all()


def check_duplicates(world):
    first = hvd.add_process_set([0])
    for again in (first, [0], hvd.ProcessSet([0]), range(hvd.size())):
        with pytest.raises(ValueError, match="exists already"):
            hvd.add_process_set(again)
    for unknown in ([hvd.size()], [-1, 0]):
        with pytest.raises(ValueError, match="rank"):
            hvd.add_process_set(unknown)
    expect_works(hvd.global_process_set)


def check_duplicates_at_init():
    for sets in ([[0], [0]], [hvd.ProcessSet([0]), hvd.ProcessSet([0])]):
        with pytest.raises(ValueError, match="twice"):
            hvd.init(process_sets=sets)
        assert hvd.is_initialized()
        expect_works(hvd.global_process_set)
        hvd.shutdown()


def check_second_init_matches_sets_again(sets):
    again = halves()
    hvd.init(process_sets=again)
    assert [s.process_set_id for s in again] == [s.process_set_id for s in sets]
    for s in mine(again):
        expect_works(s)


def check_sets_end_with_the_epoch(world):
    s = hvd.add_process_set([0])
    for _ in range(3):
        hvd.shutdown()
        hvd.init()
        assert s.process_set_id is None
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(np.ones(1), process_set=s)
        hvd.add_process_set(s)
        assert s.process_set_id == 1
        if s.included():
            expect_works(s)


def check_init_with_a_part_of_the_job():
    hvd.init()
    everybody = list(range(hvd.size()))
    hvd.shutdown()
    hvd.init(comm=everybody)
    hvd.init(comm=[])
    expect_works(hvd.global_process_set)
    hvd.shutdown()
    with pytest.raises(ValueError, match="different ranks of this job"):
        hvd.init(comm=everybody + [len(everybody)])
    with pytest.raises(ValueError, match="no rank of the job"):
        hvd.init(comm=[rank + 2 ** 32 for rank in everybody])
    assert not hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    expect_works(hvd.global_process_set)
    hvd.shutdown()


def check_init_from_several_threads():
    """One of them meets the other ranks, and all find the library initialised, with one and the same set."""
    for _ in range(3):
        start = threading.Barrier(8)
        sets = []

        def begin(start=start, sets=sets):
            own = hvd.ProcessSet([0])
            start.wait()
            hvd.init(process_sets=[own])
            sets.append(own.process_set_id)

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sets == [1] * 8
        expect_works(hvd.global_process_set)
        hvd.shutdown()


def check_worlds_of_some_ranks():
    hvd.init()
    launched, size, on_one_host = hvd.rank(), hvd.size(), hvd.local_size() == hvd.size()
    hvd.shutdown()
    # Any order; but ranks of several hosts meet where the job does, so the first of a list must be on that host.
    mine = sorted((rank for rank in range(size) if rank % 2 == launched % 2), reverse=on_one_host)
    for _ in range(2):  # the same lists make worlds again and again
        hvd.init(comm=mine)
        assert (hvd.rank(), hvd.size()) == (mine.index(launched), len(mine))
        assert hvd.local_size() <= len(mine) and hvd.local_rank() < hvd.local_size()
        assert hvd.allgather(np.array([launched])).tolist() == mine
        with pytest.raises(ValueError, match="initialised already"):
            hvd.init(comm=[launched, size])
        hvd.shutdown()
    others = [rank for rank in range(size) if rank != launched]
    if others:
        with pytest.raises(ValueError, match=f"rank {launched} "):
            hvd.init(comm=others)
    hvd.init()
    assert hvd.size() == size
    hvd.shutdown()


# Removal

def check_a_set_may_be_removed_with_operations_in_flight(world):
    if hvd.size() == 2:
        return  # a set of some ranks with two of them needs three
    for _ in range(2):
        s = hvd.add_process_set([0, 1])
        handles = []
        if hvd.rank() == 1:  # rank 0 never comes
            handles = [hvd.allreduce_async(np.ones(3), name="x", process_set=s), hvd.allgather_async(np.ones(2),
                                                                                                   process_set=s)]
        assert hvd.remove_process_set(s) and s.process_set_id is None
        for handle in handles:
            with pytest.raises(hvd.HorovodInternalError, match="its process set was removed"):
                hvd.synchronize(handle)
            assert hvd.synchronize(handle) is None
        expect_works(hvd.global_process_set)


def check_all_objects_of_a_set_forget_a_removed_one(world):
    first, again = hvd.ProcessSet([0]), hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    hvd.init(process_sets=[again])
    assert first.process_set_id == again.process_set_id == 1
    hvd.remove_process_set(first)
    other = hvd.add_process_set([1])
    assert (first.process_set_id, again.process_set_id, other.process_set_id) == (None, None, 1)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(np.ones(1), process_set=again)


def check_freed_ids_go_first_in_first_out(world):
    sets = [hvd.add_process_set(who) for who in ([0], [1], *([[0, 1]] if hvd.size() > 2 else []))]
    ids = [s.process_set_id for s in sets]
    assert ids == list(range(1, 1 + len(sets)))
    order = sets[1:] + sets[:1]
    freed = [s.process_set_id for s in order]
    for s in order:
        assert hvd.remove_process_set(s)
    assert [hvd.add_process_set(who).process_set_id for who in [[1], [0]]] == freed[:2]


# Who asks what

def check_queries_of_others(world):
    s = hvd.add_process_set([0])
    assert (s.size(), s.included(), s.ranks) == (1, hvd.rank() == 0, [0])
    assert str(s) == repr(s) == "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)"
    if hvd.rank() > 0:
        x = np.ones(4)
        for call in (lambda: s.rank(), lambda: hvd.allreduce(x, process_set=s),
                     lambda: hvd.grouped_allreduce_async([x], process_set=s), lambda: hvd.allgather(x, process_set=s),
                     lambda: hvd.broadcast_(x, 0, process_set=s), lambda: hvd.alltoall(x, process_set=s),
                     lambda: hvd.alltoall(x, [4], process_set=s), lambda: hvd.reducescatter_async(x, process_set=s),
                     lambda: hvd.barrier(process_set=s)):
            with pytest.raises(ValueError, match=r"not in process set 1 \(ranks 0\)|does not contain rank"):
                call()
    expect_works(hvd.global_process_set)


def check_sets_of_other_forms(world):
    size = hvd.size()
    for who in ([], [size], [-1], [2 ** 32], "01", ["0"], [0.0], [True], 0, None, [0, 0]):
        with pytest.raises(ValueError):
            hvd.add_process_set(who)
    for who in ((size - 1,), np.array([size - 1]), {size - 1}, range(size - 1, size), iter([size - 1])):
        s = hvd.add_process_set(who)
        assert s.ranks == [size - 1] and s.process_set_id == 1
        for t in mine([s]):
            expect_works(t)
        assert hvd.remove_process_set(s) is True and hvd.remove_process_set(s) is False
    s = hvd.add_process_set(list(range(size))[:0:-1])
    assert s.ranks == list(range(1, size))
    for t in mine([s]):
        assert t.rank() == hvd.rank() - 1
        expect_works(t)


def check_the_global_set_is_filled_in_place():
    before = hvd.global_process_set.ranks
    hvd.init()
    assert hvd.global_process_set.ranks is before and before == list(range(hvd.size()))
    assert hvd._basics._get_process_set_ids_and_ranks() == {0: before}
    hvd.shutdown()
    assert before == [] and hvd.global_process_set.process_set_id == 0


# Communicators, as mpi4py has them

class Comm:
    """What init asks of a communicator. Its processes: those that call with the same ranks. For a world of its own
    only of one process."""

    def __init__(self, ranks):
        self.ranks = ranks

    def Get_size(self):
        return len(self.ranks)

    def Get_rank(self):
        return 0

    def bcast(self, value, root):
        return value

    def allgather(self, rank):
        assert rank in self.ranks
        return self.ranks


def check_sets_of_communicators():
    hvd.init()
    size, me = hvd.size(), hvd.rank()
    hvd.shutdown()
    parity = hvd.ProcessSet(Comm(list(range(me % 2, size, 2))[::-1]))  # what a split makes: another one on each rank
    assert parity.ranks is None and parity.included() is None and parity.process_set_id is None
    for _ in range(2):
        alone = hvd.ProcessSet([size - 1]) if size > 2 else None  # a set of ranks beside it
        hvd.init(process_sets=[parity] + ([alone] if alone else []))
        assert parity.ranks == list(range(me % 2, size, 2)) and parity.rank() == me // 2
        assert parity.process_set_id == 1 + me % 2  # in the order of the ranks
        expect_works(parity)
        assert not alone or alone.process_set_id == 3
        with pytest.raises(NotImplementedError, match="init"):
            hvd.add_process_set(hvd.ProcessSet(Comm([me])))
        with pytest.raises(ValueError, match="global set"):
            hvd.init(process_sets=[hvd.ProcessSet(Comm(list(range(size))))])
        with pytest.raises(ValueError, match="equally many"):
            hvd.init(process_sets=[parity] * (1 + (me == 0)))
        hvd.shutdown()


def check_the_communicator_of_the_world():
    alone, again = Comm([0]), Comm([0])
    for comm in (alone, again):
        hvd.init(comm=comm)
        hvd.init()
        assert hvd.size() == 1 and hvd.global_process_set.mpi_comm is comm
        assert str(hvd.global_process_set) == f"ProcessSet(process_set_id=0, ranks=[0], mpi_comm={comm})"
        with pytest.raises(ValueError, match="exists already"):
            hvd.add_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match="global set"):
            hvd.init(process_sets=[hvd.global_process_set])
        expect_works(hvd.global_process_set)
        hvd.shutdown()
        assert hvd.global_process_set.mpi_comm is None
    hvd.init()
    assert hvd.global_process_set.mpi_comm is None  # the ranks of the job, without a communicator
    hvd.shutdown()


def check_ranks_that_add_or_remove_other_sets_are_told(world):
    me, last = hvd.rank(), hvd.size() - 1
    with pytest.raises(hvd.HorovodInternalError, match=r"add_process_set.*ranks disagree.*\[0\]"):
        hvd.add_process_set([0] if me == 0 else [last])
    a, b = hvd.add_process_set([0]), hvd.add_process_set([last])
    assert (a.process_set_id, b.process_set_id) == (1, 2)
    with pytest.raises(hvd.HorovodInternalError, match="remove_process_set.*ranks disagree"):
        hvd.remove_process_set(a if me == 0 else b)
    assert (a.process_set_id, b.process_set_id) == (1, 2)
    for s in mine([a, b]):
        expect_works(s)
    assert hvd.remove_process_set(a) and hvd.remove_process_set(b)
    expect_works(hvd.global_process_set)

"""join(): ranks whose data has come to its end stand by while the others go on, with every collective."""
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_gradients import expect, full
from test_termination import Ranks, errors_of

import ranks
from jobs import wait_until

pytestmark = [pytest.mark.tensorflow, pytest.mark.sizes]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Uneven:
    """Rounds that fewer and fewer ranks take part in. order[i] is the rank that joins after round i."""

    def __init__(self, hvd, backwards):
        self.hvd = hvd
        self.order = list(range(hvd.size()))
        if backwards:
            self.order.reverse()

    def rounds(self):
        """(round, the ranks that have data) for as long as this rank has some."""
        for i in range(self.order.index(self.hvd.rank()) + 1):
            yield i, sorted(self.order[i:])

    def join(self):
        assert self.hvd.join() == self.order[-1]


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def backwards(request):
    return request.param


# Every collective

def reduced(case, op, parts):
    """The oracle. parts: the values of the ranks that have data."""
    if op == "Average":
        mean = sum(parts) / case.hvd.size()
        return np.trunc(mean) if case.is_integer else mean
    if not case.is_number:
        op = {"Sum": "Max", "Product": "Min"}.get(op, op)  # or, and
    return {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op](np.stack(parts), axis=0)


SHAPES = ((), (0,), (5, 3), (1031,))


def check_reductions(case, backwards):
    hvd, uneven = case.hvd, Uneven(case.hvd, backwards)
    for op in ("Average", "Sum", "Min", "Max", "Product"):
        if op == "Average" and not case.is_number:
            continue
        values, how = case.factors if op == "Product" else case.values, getattr(hvd, op)
        for i, present in uneven.rounds():
            outputs = [reduced(case, op, [values(shape, rank) for rank in present]) for shape in SHAPES]
            xs = [case.tensor(values(shape, hvd.rank())) for shape in SHAPES]
            name = None if i % 2 else "x"
            case.expect(hvd.allreduce(xs[-1], name=name, op=how), outputs[-1])
            case.expect_all(hvd.grouped_allreduce(xs, name=name, op=how), outputs)
            if op in ("Average", "Sum"):
                mine = [np.array_split(output, hvd.size())[hvd.rank()] for output in outputs[1:]]
                case.expect(hvd.reducescatter(xs[-1], name=name, op=how), mine[-1])
                case.expect_all(hvd.grouped_reducescatter(xs[1:], op=how), mine)
        uneven.join()


@pytest.mark.parametrize("count", [1, 16_385, 786_433])
def check_sizes(framework, backwards, count):
    hvd, uneven = framework.hvd, Uneven(framework.hvd, backwards)
    for _, present in uneven.rounds():
        x = framework.tensor(np.full(count, 1.0 + hvd.rank()), "float32")
        framework.expect(hvd.allreduce(x, op=hvd.Sum), np.full(count, sum(1.0 + rank for rank in present)), "float32")
        framework.expect(hvd.allreduce(x, op=hvd.Min), np.full(count, 1.0 + present[0]), "float32")
        framework.expect(hvd.allgather(x), np.repeat([1.0 + rank for rank in present], count), "float32")
    uneven.join()


@pytest.mark.parametrize("op, before", [("Sum", 0.5), ("Max", 2.0), ("Min", -1.0), ("Max", -2.0), ("Product", -1.0)])
def check_factors(number, backwards, op, before):
    if before < 0 and number.dtype.startswith("u"):
        return
    hvd, uneven = number.hvd, Uneven(number.hvd, backwards)
    for _, present in uneven.rounds():
        parts = [number.factors((37,), rank) * before for rank in present]
        if number.is_integer:
            parts = [np.trunc(part) for part in parts]
        x = number.tensor(number.factors((37,), hvd.rank()))
        number.expect(hvd.allreduce(x, op=getattr(hvd, op), prescale_factor=before, postscale_factor=3.0),
                      3 * reduced(number, op, parts))
    uneven.join()


def check_movement(case, backwards):
    hvd, uneven = case.hvd, Uneven(case.hvd, backwards)
    size, me = hvd.size(), hvd.rank()
    for _ in range(2):
        for _, present in uneven.rounds():
            for rows in (0, 3):
                def values(rank, rows=rows):
                    return case.values((rows + rank, 2), rank)
                every = np.concatenate([values(rank) for rank in present])
                case.expect(hvd.allgather(case.tensor(values(me)), name="x"), every)
                case.expect_all(hvd.grouped_allgather([case.tensor(values(me))] * 2), [every] * 2)
                case.expect(hvd.broadcast(case.mine((rows, 2)), present[0]), case.values((rows, 2), present[0]))
                equal = [case.values((rows * size, 2), rank)[rows * me:rows * (me + 1)] for rank in present]
                case.expect(hvd.alltoall(case.mine((rows * size, 2))), np.concatenate(equal))
                splits = [rows + to for to in range(size)]
                begin = sum(splits[:me])
                parts = [case.values((sum(splits), 2), rank)[begin:begin + splits[me]] for rank in present]
                output, received = hvd.alltoall(case.mine((sum(splits), 2)), splits)
                case.expect(output, np.concatenate(parts))
                assert list(np.array(received)) == [splits[me] if rank in present else 0 for rank in range(size)]
            hvd.barrier()
        uneven.join()


def check_a_broadcast_from_a_rank_that_has_joined(framework, backwards):
    hvd, uneven = framework.hvd, Uneven(framework.hvd, backwards)
    for i, present in uneven.rounds():
        for root in uneven.order[:i]:
            for name in ("x", None):
                with pytest.raises(framework.refused, match=f"root rank {root} has joined"):
                    hvd.broadcast(framework.tensor([1.0], "float32"), root, name=name)
        x = framework.tensor([hvd.rank()], "float32")
        framework.expect(hvd.broadcast(x, present[-1]), [present[-1]], "float32")
    uneven.join()


def check_objects(framework, backwards):
    hvd, uneven = framework.hvd, Uneven(framework.hvd, backwards)
    for _, present in uneven.rounds():
        assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in present]
        assert hvd.broadcast_object(hvd.rank(), present[0]) == present[0]
    uneven.join()


# Gradients

@pytest.fixture(params=[0, 1])
def some(request, job):
    """A set with all ranks, or with all but rank 0, which has other numbers in it."""
    if not request.param or job.size() == 1:
        yield job.global_process_set
        return
    process_set = job.add_process_set(range(1, job.size()))
    yield process_set
    assert job.remove_process_set(process_set)


def rounds_of(some, uneven):
    """(this rank's number in the set, numbers of those that have data, the size of the set), where it is one."""
    for _, present in uneven.rounds():
        if some.included():
            yield some.rank(), [i for i, rank in enumerate(some.ranks) if rank in present], some.size()
        uneven.hvd.barrier()


def check_gradients_of_reductions_and_broadcast(differentiable, backwards, some):
    hvd, uneven = differentiable.hvd, Uneven(differentiable.hvd, backwards)
    for me, present, size in rounds_of(some, uneven):
        total = sum(1.0 + i for i in present)
        for op, factor in ("Sum", 1), ("Average", 1 / size):
            expect(differentiable, lambda hvd, x: [hvd.allreduce(x, op=getattr(hvd, op), process_set=some)], [3],
                   [full(3, 1 + me)], [full(3, total * factor)])
        root = present[-1]
        expect(differentiable, lambda hvd, x: [hvd.broadcast(x, some.ranks[root], process_set=some)], [3],
               [full(3, 1 + me)], [full(3, total / size if me == root else 0)])
        for op, factor in ("Sum", size), ("Average", 1):
            of_ranks = [2] + [1] * (size - 1)
            values = np.concatenate([full((rows, 2), (1 + i) * factor if i in present else 0)
                                     for i, rows in enumerate(of_ranks)])
            how = {"op": getattr(hvd, op), "process_set": some}
            above = full((of_ranks[me], 2), 1 + me)
            expect(differentiable, lambda hvd, x: [hvd.reducescatter(x, **how)], [(size + 1, 2)], [above], [values])
            expect(differentiable, lambda hvd, x, y: hvd.grouped_reducescatter([x, y], **how), [(size + 1, 2)] * 2,
                   [above, -above], [values, -values])
    uneven.join()


def check_gradients_of_movement(differentiable, backwards, some):
    uneven = Uneven(differentiable.hvd, backwards)
    for me, present, size in rounds_of(some, uneven):
        ramp = np.arange(sum(1.0 + i for i in present))  # a number for each row
        mean = ramp * sum(1.0 + i for i in present) / size
        mine = np.split(mean, np.cumsum([1 + i for i in present])[:-1])[present.index(me)]
        expect(differentiable, lambda hvd, x: [hvd.allgather(x, process_set=some)], [1 + me], [ramp * (1 + me)], [mine])
        expect(differentiable, lambda hvd, x, y: hvd.grouped_allgather([x, y], process_set=some), [1 + me] * 2,
               [ramp * (1 + me), -2 * ramp * (1 + me)], [mine, -2 * mine])
        expect(differentiable, lambda hvd, x: [hvd.alltoall(x, process_set=some)], [(2 * size, 2)],
               [np.concatenate([full((2, 2), 10 * i + me + 1) for i in present])],
               [np.concatenate([full((2, 2), (10 * me + i + 1) * (i in present)) for i in range(size)])])
        expect(differentiable, lambda hvd, x: [hvd.alltoall(x, [*range(size)], process_set=some)[0]],
               [(size * (size + 1) // 2, 2)],  # more rows than are sent
               [np.concatenate([full((me, 2), 10 * i + me + 1) for i in present])],
               [np.concatenate([full((i, 2), (10 * me + i + 1) * (i in present)) for i in range(size)]
                               + [full((size, 2), 0)])])
    uneven.join()


# Process sets

def check_process_sets(job, backwards):
    import lightcc.numpy as hvd
    from lightcc.core import lib
    size, me = hvd.size(), hvd.rank()
    wanted = []
    for who in (range(1), range(size - 1, size), range(0, size, 2), range(size // 2, size)):
        if list(who) not in [hvd.global_process_set.ranks, *wanted]:
            wanted.append(list(who))
    sets = [hvd.add_process_set(who) for who in wanted]
    uneven = Uneven(hvd, backwards)
    for i, present in uneven.rounds():
        for process_set in sets:
            if not process_set.included():
                continue
            there = [rank for rank in process_set.ranks if rank in present]
            x = np.full((2, 2), 1.0 + me)
            for name in ("x", None):
                expected = sum(1.0 + rank for rank in there)
                assert (hvd.allreduce(x, name=name, op=hvd.Sum, process_set=process_set) == expected).all()
                assert hvd.allgather(x[:1], name=name, process_set=process_set)[:, 0].tolist() == \
                    [1.0 + rank for rank in there]
            hvd.barrier(process_set=process_set)
        if i > 0:
            for change in (lambda: lib.add_group([0]), lambda: hvd.remove_process_set(sets[0])):
                with pytest.raises(hvd.HorovodInternalError, match="all ranks of the job must call it, but rank"):
                    change()
    uneven.join()
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


# Order, numbering, time

def check_what_was_started_before_takes_part_and_is_finished(handled):
    hvd = handled.hvd
    for _ in range(3):
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.05)
        handles = [hvd.allreduce_async(handled.tensor(np.full(1000, hvd.rank()), "float32"), op=hvd.Sum, name=name)
                   for name in ("a", "b", None)]
        hvd.join()
        for handle in handles:
            assert hvd.poll(handle)
            handled.expect(hvd.synchronize(handle), np.full(1000, sum(range(hvd.size()))), "float32")


def check_names_meet_again_afterwards(framework, backwards):
    hvd, uneven = framework.hvd, Uneven(framework.hvd, backwards)
    for _ in range(3):
        for _ in uneven.rounds():
            for _ in range(5):
                hvd.allreduce(framework.tensor([1.0], "float32"))
            hvd.allgather(framework.tensor([1.0], "float32"))
        uneven.join()
        for count in (1, 10):
            x = framework.tensor(np.full(count, hvd.rank()), "float32")
            framework.expect(hvd.allreduce(x, op=hvd.Sum), np.full(count, sum(range(hvd.size()))), "float32")
            framework.expect(hvd.allgather(x), np.repeat(np.arange(hvd.size()), count), "float32")


def check_several_times_in_a_row(framework):
    hvd = framework.hvd
    who = [int(hvd.join()) for _ in range(10)]
    if framework.has_handles:
        who.append(hvd.join(device=0))
    assert set(who) <= set(range(hvd.size()))
    assert hvd.allgather_object(who) == [who] * hvd.size()


def check_at_random_times(framework):
    hvd, rng = framework.hvd, random.Random(hvd_seed(framework.hvd))
    for _ in range(10 if framework.has_handles else 3):
        steps = [rng.randrange(20) for _ in range(hvd.size())]
        for step in range(steps[hvd.rank()]):
            xs = [framework.tensor(np.full(count, 1.0), "float32") for count in (1, 500, 20_000)]
            expected = sum(step < most for most in steps)
            forms = [*framework.forms("allreduce"), *framework.forms("allreduce", in_place=True)]
            for x, result in zip(xs, forms[step % len(forms)](xs, op=hvd.Sum)):
                framework.expect(result, np.full(tuple(x.shape), expected), "float32")
        last = hvd.join()
        assert steps[last] == max(steps) or max(steps) == 0


def hvd_seed(hvd):
    """The same on all ranks."""
    seed = hvd.broadcast_object(random.SystemRandom().randrange(2 ** 32), 0)
    print("seed", seed, flush=True)
    return seed


def check_another_thread_is_refused_meanwhile(handled, folder):
    hvd, refused = handled.hvd, Path(folder) / "refused"
    if hvd.size() == 1:
        return  # nobody is ever inside
    if hvd.rank() > 0:
        wait_until(refused.exists, "rank 0 to be refused")
        hvd.join()
        return
    inside = threading.Thread(target=hvd.join)
    handles = []
    with pytest.raises(ValueError, match=r"rank 0 has called join\(\) and takes part in nothing new until it returns"):
        inside.start()
        while inside.is_alive():  # what comes before join() takes part
            handles.append(hvd.allgather_async(handled.tensor([1.0], "float32"), name=f"early.{len(handles)}"))
    refused.touch()
    inside.join()
    for handle in handles:
        handled.expect(hvd.synchronize(handle), [1.0], "float32")


# Ends, on ranks that are started one by one

INSIDE = """
import sys, time
import numpy as np
import lightcc.numpy as hvd
hvd.init()
who = int(sys.argv[1])
print("ready", flush=True)
try:
    if hvd.rank() == who:
        sys.stdin.readline()
    else:
        hvd.join()
    print("returned", flush=True)
except hvd.HorovodInternalError as error:
    print("error", time.time(), error, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_is_named_by_those_inside(victim):
    with Ranks(3, INSIDE, str(victim)) as job:
        job.wait_ready()
        time.sleep(0.2)
        job.kill(victim)
        for message in errors_of(job, [rank for rank in range(3) if rank != victim], time.time()):
            assert message.startswith("join(): ") and f"rank {victim} (pid" in message and "died" in message, message


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_is_named_by_those_inside(leaver):
    with Ranks(3, INSIDE, str(leaver)) as job:
        job.wait_ready()
        time.sleep(0.2)
        since = time.time()
        job.processes[leaver].stdin.write("\n")
        job.processes[leaver].stdin.flush()
        for message in errors_of(job, [rank for rank in range(3) if rank != leaver], since):
            assert message.startswith("join(): ") and f"rank {leaver} (pid" in message, message
            assert "has left" in message
        assert job.output(leaver).startswith("returned")


def test_ctrl_c_inside_interrupts_this_rank_and_tells_the_others():
    with Ranks(3, INSIDE, "0") as job:
        job.wait_ready()
        time.sleep(0.3)
        since = time.time()
        job.kill(1, signal.SIGINT)
        for message in errors_of(job, [2], since):
            assert "KeyboardInterrupt on rank 1" in message
        assert job.output(1).startswith("interrupted")


def test_before_init():
    import lightcc.numpy as hvd
    hvd.shutdown()  # another test of this process may have left it initialised
    with pytest.raises(hvd.HorovodInternalError, match="not initialised"):
        hvd.join()

"""Handles of the ..._async operations: ints, polled and waited for in any order, given up, dropped."""
import time
import weakref

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.core import request

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_a_name_in_flight_is_refused_and_may_stay_so_to_the_end():
    """As programs and tests do it: one rank after the other starts an operation again and again until it is refused,
    nobody waits for what is left over, and the job goes on and ends in order."""
    output = ranks.run_script("""
import torch, lightcc.torch as hvd
hvd.init()
for kind, start in {"allreduce": hvd.allreduce_async, "allgather": hvd.allgather_async,
                    "broadcast": lambda x, name: hvd.broadcast_async(x, 0, name=name),
                    "alltoall": lambda x, name: hvd.alltoall_async(x, name=name),
                    "reducescatter": hvd.reducescatter_async,
                    "group": lambda x, name: hvd.grouped_allreduce_async([x, x], name=name)}.items():
    for turn in range(hvd.size()):
        if hvd.rank() == turn:
            try:
                for _ in range(10):
                    start(torch.ones(6, 3), name="twice")
                raise SystemExit(f"{kind} was never refused")
            except ValueError as error:
                assert "'twice'" in str(error) and "still in flight on rank" in str(error), error
        hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
print("to the end")
""", np=2, deadline_s=200)
    assert output.count("to the end") == 2


def test_a_name_of_two_threads_is_an_error_on_all_ranks_until_a_barrier():
    output = ranks.run_script("""
import threading
import torch, lightcc.torch as hvd
hvd.init()
errors, wrong = [], []

def calls():
    for i in range(100_000):
        try:
            hvd.allreduce(torch.full([3], float(i)), name="shared", op=hvd.Sum)
        except (ValueError, hvd.HorovodInternalError) as error:
            return errors.append(str(error))

for turn in range(3):
    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for _ in range(300):
        try:
            hvd.allreduce(torch.ones(3), name="shared")
            wrong.append(turn)
        except (ValueError, hvd.HorovodInternalError) as error:
            errors.append(str(error))
    hvd.barrier()
    for i in range(300):
        assert (hvd.allreduce(torch.full([3], float(i)), name="shared", op=hvd.Sum) == i * hvd.size()).all()
assert not wrong and len(errors) == 3 * 302, (wrong, len(errors))
for error in errors:
    assert "allreduce of tensor 'shared'" in error and "give each thread names of its own" in error, error
print("to the end")
""", np=2, deadline_s=200)
    assert output.count("to the end") == 2


# Polling and waiting

STARTS = {
    "allreduce": lambda x: hvd.allreduce_async(x, op=hvd.Sum),
    "allreduce_": lambda x: hvd.allreduce_async_(x, op=hvd.Sum),
    "group": lambda x: hvd.grouped_allreduce_async([x, x], op=hvd.Sum),
    "group_": lambda x: hvd.grouped_allreduce_async_([x], op=hvd.Sum),
    "allgather": hvd.allgather_async,
    "gathered group": lambda x: hvd.grouped_allgather_async([x, x]),
    "broadcast": lambda x: hvd.broadcast_async(x, 0),
    "broadcast_": lambda x: hvd.broadcast_async_(x, 0),
    "alltoall": hvd.alltoall_async,
    "reducescatter": hvd.reducescatter_async,
    "scattered group": lambda x: hvd.grouped_reducescatter_async([x, x]),
}


def rows():
    return torch.ones(hvd.size(), 4)


@pytest.mark.parametrize("what", STARTS)
def check_handles_are_numbers(what):
    first, second = STARTS[what](rows()), STARTS[what](rows())
    assert type(first) is type(second) is int and 0 < first < second
    assert hvd.synchronize(second) is not None
    while not hvd.poll(first):
        time.sleep(0)
    assert hvd.poll(first) is True  # also a second time
    assert hvd.synchronize(first) is not None
    for handle in (first, second):
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="unknown handle"):
            hvd.poll(handle)


def check_poll_says_so_while_operations_are_on_their_way():
    """Right after the submission of many, one of them at least is not finished. Programs rely on it."""
    seen, handles = set(), []
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        for dimensions in (1, 2, 3):
            for _ in range(4):
                handles.append(hvd.allreduce_async(torch.ones([17] * dimensions, dtype=dtype), op=hvd.Sum))
                seen.add(hvd.poll(handles[-1]))
    assert False in seen
    for handle in handles:
        assert (hvd.synchronize(handle) == hvd.size()).all()


def check_waited_for_backwards():
    handles = [(STARTS[what](rows() * i), what, i) for i in range(1, 40) for what in STARTS]
    for handle, what, i in reversed(handles):
        result = hvd.synchronize(handle)
        result = result[0] if isinstance(result, (list, tuple)) else result
        assert (result == i * (hvd.size() if what.startswith(("allreduce", "group")) else 1)).all(), what


def check_two_of_a_name_whether_or_not_the_first_is_done():
    if hvd.size() > 1:
        return  # alone a rank is done with each at once
    refused, x = 0, torch.ones(2)
    for _ in range(100):
        begin = time.monotonic()
        first = hvd.allreduce_async(x, name="two")
        try:
            hvd.synchronize(hvd.allreduce_async(x, name="two"))
            assert time.monotonic() - begin >= 1e-3  # a slow machine
        except ValueError as error:
            assert "'two': one of this name is still in flight on rank 0; synchronize it first" in str(error), error
            refused += 1
        hvd.synchronize(first)
        polled = hvd.allreduce_async(x, name="two")
        while not hvd.poll(polled):
            time.sleep(0)
        hvd.allreduce(x, name="two")  # two blocking calls
        hvd.allreduce(x, name="two")
        hvd.synchronize(hvd.allreduce_async(x, name="two"))
        hvd.synchronize(polled)
    assert refused > 50
    dropped = []
    for _ in range(10):  # nobody looks at these for now
        dropped.append(hvd.allreduce_async(x, name="dropped"))
        hvd.barrier()  # so it is done
        time.sleep(2e-3)
    for handle in dropped:
        hvd.synchronize(handle)


def check_a_handle_of_an_operation_that_failed():
    if hvd.size() == 1:
        return  # nobody to disagree with
    handle = hvd.allreduce_async(torch.ones(1 + hvd.rank()), name="shapes")
    after = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    while not hvd.poll(handle):  # finished, in failure
        time.sleep(0)
    with pytest.raises(hvd.HorovodInternalError, match="'shapes'.*disagree on shape"):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    assert (hvd.synchronize(after) == hvd.size()).all()


# Memory

@pytest.mark.parametrize("what", STARTS)
def check_a_handle_keeps_its_tensors_alive_and_only_until_synchronize(what):
    x = rows()
    x_alive = weakref.ref(x)
    handle = STARTS[what](x)
    del x
    assert x_alive() is not None
    hvd.synchronize(handle)
    assert x_alive() is None and not request._pending


def check_failures_leave_nothing_behind():
    if hvd.size() > 1:
        for _ in range(3):
            with pytest.raises(hvd.HorovodInternalError):
                hvd.synchronize(hvd.allgather_async(torch.ones(2, 1 + hvd.rank())))
    for call in (lambda: hvd.allreduce_async(rows().to_sparse()), lambda: hvd.broadcast_async(rows(), 99)):
        with pytest.raises(ValueError):
            call()
    assert not request._pending


def check_shutdown_gives_up_what_was_dropped():
    for _ in range(2):
        xs = [rows() for _ in range(8)]
        alive = [weakref.ref(x) for x in xs]
        handles = [start(x) for x in xs for start in (STARTS["allreduce"], STARTS["allgather"])]
        hvd.barrier()
        hvd.synchronize(hvd.allreduce_async(torch.ones(1)))
        del xs
        assert all(x() is not None for x in alive)
        hvd.shutdown()
        assert not any(x() for x in alive) and not request._pending
        hvd.init()
        new = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        assert new not in handles  # numbers are not used again
        for handle in handles:
            assert hvd.synchronize(handle) is None
            with pytest.raises(ValueError, match="unknown handle"):
                hvd.poll(handle)
        assert hvd.synchronize(new) == hvd.size()


def check_outputs_outlive_the_job():
    size = hvd.size()
    gathered, (received, splits) = hvd.allgather(rows()), hvd.alltoall(rows(), [1] * size)
    view = gathered[-1:].t()
    hvd.shutdown()
    del gathered
    assert (view == 1).all() and (received == 1).all() and splits.tolist() == [1] * size
    hvd.init()

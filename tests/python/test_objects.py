"""Python objects by broadcast and allgather, for each framework."""
import numpy as np
import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch_sizes]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def thing(rank, size):
    """Objects of other types and sizes on each rank."""
    return [None, {"rank": rank, "nested": [rank] * size}, "x" * size, b"\0" * size, (rank, {rank}),
            np.arange(size) + rank, lambda x: x + rank][(rank + size) % 7]


def expect_same(got, wanted):
    if callable(wanted):
        assert got(1) == wanted(1)
    elif isinstance(wanted, np.ndarray):
        assert (got == wanted).all()
    else:
        assert got == wanted


@pytest.mark.parametrize("size", [0, 1, 3, 17, 1000, 300_001])
def check_broadcast_object(framework, size):
    hvd = framework.hvd
    for root in range(hvd.size()):
        for name in (None, "thing"):
            got = hvd.broadcast_object(thing(hvd.rank(), size), root, name=name)
            expect_same(got, thing(root, size))
        expect_same(hvd.broadcast_object(thing(root, size) if hvd.rank() == root else None, root_rank=root),
                    thing(root, size))


@pytest.mark.parametrize("size", [0, 1, 3, 17, 1000, 300_001])
def check_allgather_object(framework, size):
    hvd = framework.hvd
    for name in (None, "thing"):
        got = hvd.allgather_object(thing(hvd.rank(), size * hvd.rank()), name=name)
        assert len(got) == hvd.size()
        for rank, entry in enumerate(got):
            expect_same(entry, thing(rank, size * rank))


def check_object_that_cannot_be_pickled(framework):
    import threading
    hvd = framework.hvd
    with pytest.raises(TypeError, match="pickle"):
        hvd.allgather_object(threading.Lock())
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


class Unwilling:
    def __reduce__(self):
        raise ArithmeticError("no pickle of me")


def check_object_of_one_rank_that_cannot_be_pickled(framework):
    """It is told on every rank; nobody waits, and the next call works."""
    hvd = framework.hvd
    for bad in range(hvd.size()):
        here = hvd.rank() == bad
        expected = pytest.raises(ArithmeticError, match="no pickle of me") if here else \
            pytest.raises(ValueError, match=rf"rank {bad} could not pickle.*ArithmeticError: no pickle of me")
        with expected:
            hvd.allgather_object([Unwilling()] if here else "x" * 1000)
        with expected:
            hvd.broadcast_object(Unwilling() if here else None, bad)
        assert hvd.broadcast_object(Unwilling() if not here else bad, bad) == bad  # looked at on the root alone
        assert hvd.allgather_object((bad, hvd.rank())) == [(bad, rank) for rank in range(hvd.size())]


def check_objects_of_process_sets(framework):
    hvd = framework.hvd
    last = hvd.size() - 1
    if last == 0:
        return
    process_set = hvd.add_process_set([last])
    if process_set.included():
        assert hvd.broadcast_object("here", last, process_set=process_set) == "here"
    else:
        with pytest.raises(ValueError, match="not in process set"):
            hvd.broadcast_object("there", last, process_set=process_set)
    hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="root"):
        hvd.broadcast_object("x", root_rank=hvd.size())


def check_tensors_inside_objects(framework):
    hvd = framework.hvd
    got = hvd.broadcast_object({"x": framework.tensor([hvd.rank(), 2], "float32")}, hvd.size() - 1)
    framework.expect(got["x"], [hvd.size() - 1, 2], "float32")

"""Python objects by broadcast and allgather, for each framework."""
import numpy as np
import pytest

import ranks


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


def check_tensors_inside_objects(framework):
    hvd = framework.hvd
    got = hvd.broadcast_object({"x": framework.tensor([hvd.rank(), 2], "float32")}, hvd.size() - 1)
    framework.expect(got["x"], [hvd.size() - 1, 2], "float32")

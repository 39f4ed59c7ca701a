"""Ranks that disagree: every rank is told which tensor, what differs and which ranks have what; the next operation of
the same name works, with the right values. One odd rank, the first or the last, asks for something else than others.
"""
import re

import numpy as np
import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch_sizes]


@pytest.mark.parametrize("np", (2, 3, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


WAYS = {  # what may differ: options of the odd rank's allreduce, its value in messages, that of the others
    "shape": ({"shape": (2, 3)}, "[2, 3]", "{shape}"),
    "dtype": ({"dtype": "int32"}, "int32", "float32"),
    "reduce op": ({"op": "Max"}, "max", "sum"),
    "prescale factor": ({"prescale_factor": 0.25}, "0.25", "1"),
    "postscale factor": ({"postscale_factor": 2.0}, "2", "1"),
}


@pytest.mark.parametrize("how", ["named", "unnamed", "grouped", "cached", "tiny", "tiny cached", "among others"])
@pytest.mark.parametrize("what", WAYS)
def check_disagreement(framework, what, how):
    hvd, shape = framework.hvd, (1,) if "tiny" in how else (7,)
    options, odd_text, text = WAYS[what]
    for odd in (0, hvd.size() - 1):
        name = None if how == "unnamed" else f"{what} {how} {odd}"

        def run(shape=shape, dtype="float32", op="Sum", name=name, **factors):
            x = framework.tensor(np.full(shape, 1 + hvd.rank()), dtype)
            if how == "grouped":
                other = framework.tensor([1.0], "float32")
                return hvd.grouped_allreduce([other, x], name=name, op=getattr(hvd, op), **factors)[1]
            return hvd.allreduce(x, name=name, op=getattr(hvd, op), **factors)

        def expect_good():
            framework.expect(run(), np.full(shape, sum(1 + rank for rank in range(hvd.size()))), "float32")

        for _ in range(2 if "cached" in how else 0):
            expect_good()
        with healthy(framework, 20 if how == "among others" and framework.has_handles else 0):
            with pytest.raises(framework.refused) as raised:
                run(**(options if hvd.rank() == odd else {}))
        which = " of tensor 2of2" if how == "grouped" and what in ("shape", "dtype") else ""
        sides = {odd: odd_text, **{rank: text.format(shape=list(shape)) for rank in range(hvd.size()) if rank != odd}}
        expect_blame(framework, raised.value, "allreduce", name, what + which, sides)
        for _ in range(3):
            expect_good()


class healthy:
    """Operations in flight around a block, which must all succeed."""

    def __init__(self, framework, count):
        self.framework, self.count = framework, count

    def __enter__(self):
        hvd, tensor = self.framework.hvd, self.framework.tensor
        self.handles = [hvd.allreduce_async(tensor([i, hvd.rank()], "float32"), op=hvd.Max) for i in range(self.count)]

    def __exit__(self, *error):
        for i, handle in enumerate(self.handles):
            self.framework.expect(self.framework.hvd.synchronize(handle), [i, self.framework.hvd.size() - 1], "float32")


def expect_blame(framework, error, verb, name, what, sides):
    """The message says which tensor, what differs and which rank has what."""
    message = framework.message(error)
    groups = {}
    for rank in sorted(sides):
        groups.setdefault(sides[rank], []).append(rank)
    text = ", ".join(f"ranks {', '.join(map(str, who))} have {value}" if len(who) > 1 else f"rank {who[0]} has {value}"
                     for value, who in groups.items())
    assert re.match(rf"{verb} of tensor '{framework.name_pattern(name)}", message), message
    assert message.endswith(f"ranks disagree on {what}: {text}"), message


OTHER_KINDS = {  # verb, what differs: (call(hvd, tensor, name, is odd), text of the odd rank and of the others)
    ("allgather", "shape"): (
        lambda hvd, tensor, name, odd: hvd.allgather(tensor(np.ones((2, 4 if odd else 3)), "float32"), name=name),
        "[any, 4]", "[any, 3]"),
    ("allgather", "dtype"): (
        lambda hvd, tensor, name, odd: hvd.allgather(tensor(np.ones(2), "int64" if odd else "float32"), name=name),
        "int64", "float32"),
    ("broadcast", "root rank"): (
        lambda hvd, tensor, name, odd: hvd.broadcast(tensor(np.ones(2), "float32"), int(odd), name=name), "1", "0"),
    ("broadcast", "shape"): (
        lambda hvd, tensor, name, odd: hvd.broadcast(tensor(np.ones((2 + odd, 3 - odd)), "float32"), 0, name=name),
        "[3, 2]", "[2, 3]"),
    ("reducescatter", "shape"): (
        lambda hvd, tensor, name, odd: hvd.reducescatter(tensor(np.ones(9 if odd else 8), "float32"), name=name),
        "[9]", "[8]"),
    ("reducescatter", "reduce op"): (
        lambda hvd, tensor, name, odd: hvd.reducescatter(tensor(np.ones(8), "float32"), name=name,
                                                         op=hvd.Sum if odd else hvd.Average), "sum", "average"),
    ("alltoall", "dtype"): (
        lambda hvd, tensor, name, odd: hvd.alltoall(tensor(np.ones(hvd.size()), "uint8" if odd else "int8"), name=name),
        "uint8", "int8"),
    ("alltoall", "shape"): (
        lambda hvd, tensor, name, odd: hvd.alltoall(tensor(np.ones((hvd.size(), 1 + odd)), "int8"), name=name),
        "[any, 2]", "[any, 1]"),
}


@pytest.mark.parametrize("repeats", [0, 2], ids=["new", "cached"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("verb, what", OTHER_KINDS)
def check_disagreement_of_other_kinds(framework, verb, what, named, repeats):
    hvd = framework.hvd
    call, odd_text, text = OTHER_KINDS[verb, what]
    for odd in (0, hvd.size() - 1):
        name = f"{verb} {what} {odd} {repeats}" if named else None

        def run(is_odd, name=name):
            return call(hvd, framework.tensor, name, is_odd)

        for _ in range(repeats):
            run(False)
        with pytest.raises(framework.refused) as raised:
            run(hvd.rank() == odd)
        expect_blame(framework, raised.value, verb, name, what,
                     {rank: odd_text if rank == odd else text for rank in range(hvd.size())})
        for _ in range(2):
            assert (framework.values(run(False)) == 1).all()
        hvd.barrier()


def check_every_rank_has_another_shape(framework):
    hvd = framework.hvd
    with pytest.raises(framework.refused) as raised:
        hvd.allreduce(framework.tensor(np.ones(1 + hvd.rank()), "float32"), name="all")
    expect_blame(framework, raised.value, "allreduce", "all", "shape",
                 {rank: f"[{1 + rank}]" for rank in range(hvd.size())})
    framework.expect(hvd.allreduce(framework.tensor([1.0], "float32"), name="all", op=hvd.Sum), [hvd.size()], "float32")


def check_number_of_tensors(framework):
    hvd = framework.hvd
    one = framework.tensor([1.0], "float32")
    with pytest.raises(framework.refused, match="number of tensors"):
        hvd.grouped_allreduce([one] * (1 + (hvd.rank() == 0)), name="group")
    framework.expect(hvd.grouped_allreduce([one] * 3, name="group", op=hvd.Sum)[2], [hvd.size()], "float32")

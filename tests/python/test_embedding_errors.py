"""What is wrong with tables, ids and gradients is said by name, on every rank that must know, and changes nothing."""
import math

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.torch import embedding as E

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def read(module, keys=range(8)):
    with torch.no_grad():
        return module(torch.tensor(list(keys))).clone()


# Tables

def check_two_tables_of_one_name():
    first = E.HashEmbedding(2, name="twice")
    with pytest.raises(ValueError, match="twice"):
        E.HashEmbedding(2, name="twice")
    first.table.close()
    E.HashEmbedding(2, name="twice")


def check_a_closed_table():
    user = E.HashEmbedding(2, name="closed")
    output = user(torch.tensor([1]))
    user.table.close()
    with pytest.raises(ValueError, match="table 'closed' was closed"):
        user(torch.tensor([1]))
    assert output.shape == (1, 2)
    del output


@pytest.mark.parametrize("options", [{"dim": 0}, {"dim": -1}, {"seed": -1}, {"dtype": torch.float16},
                                     {"wire": torch.float64}, {"name": "a\0b"}, {"dim": None}, {"name": None}])
def check_arguments_of_tables(options):
    with pytest.raises(ValueError):
        E.HashEmbedding(**{"dim": 2, "name": "arguments", **options})


def check_initializers():
    for make in (lambda: E.Normal(0, -1), lambda: E.Uniform(2, 1), lambda: E.Constant(math.nan)):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(TypeError, match="Normal"):
        E.HashEmbedding(2, name="initializer", init=torch.nn.init.normal_)


def check_modules_that_share_a_table_have_its_name_and_dim():
    user = E.HashEmbedding(2, name="shared")
    with pytest.raises(ValueError, match="'shared'"):
        E.HashEmbeddingBag(3, table=user)
    with pytest.raises(ValueError, match="'shared'"):
        E.HashEmbeddingBag(2, name="other", table=user)
    with pytest.raises(ValueError, match="mode='min'"):
        E.HashEmbeddingBag(2, name="other", mode="min")


# What ranks must have in common

DIFFERENT = {
    "dim": {"dim": 3},
    "dtype": {"dtype": torch.float64},
    "initializer": {"init": E.Constant(1.0)},
    "seed": {"seed": 1},
    "name": {"name": "another"},
}


@pytest.mark.parametrize("what", DIFFERENT)
def check_a_table_that_is_another_on_another_rank(what):
    if hvd.size() == 1:
        return
    last = hvd.rank() == hvd.size() - 1
    user = E.HashEmbedding(**{"dim": 2, "name": f"other {what}", **(DIFFERENT[what] if last else {})})
    with pytest.raises(hvd.HorovodInternalError, match="other " + what):
        user(torch.tensor([1, 2]))
    user.table.close()
    expect_that_tables_work(f"after {what}")


def check_another_optimizer_on_another_rank():
    if hvd.size() == 1:
        return
    user = E.HashEmbedding(2, name="optimizers")
    kind = E.SGD if hvd.rank() == hvd.size() - 1 else E.LazyAdam
    optimizer = kind(E.tables(user))
    with pytest.raises(hvd.HorovodInternalError, match="optimizers"):
        user(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    user.table.close()
    expect_that_tables_work("after optimizers")


def check_another_order_of_tables():
    if hvd.size() == 1:
        return
    modules = [E.HashEmbedding(2, name=f"order {i}") for i in range(2)]
    requests = [(module, torch.tensor([1])) for module in modules]
    with pytest.raises(hvd.HorovodInternalError, match="order [01]"):
        E.lookup(requests[::-1] if hvd.rank() == hvd.size() - 1 else requests)
    expect_that_tables_work("after order")


def expect_that_tables_work(name):
    user = E.HashEmbedding(2, name=name, init=E.Zeros())
    optimizer = E.SGD(E.tables(user), lr=1.0)
    user(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert (read(user, [1, 2]) == -1).all()


# Ids

@pytest.mark.parametrize("ids", [
    torch.tensor([1.0]), torch.tensor([True]), np.array([1.5]), [2.5], [None], torch.tensor([1j]), ["one"],
    np.array(["one"]), torch.zeros(1, dtype=torch.int64, device="meta")])
def check_what_is_no_key(ids):
    user = E.HashEmbedding(2, name="ids")
    with pytest.raises(ValueError, match="table 'ids'"):
        user(ids)


def check_strings_and_integers():
    names = E.HashEmbedding(2, name="names", strings=True)
    with pytest.raises(ValueError, match="'names' is for strings"):
        names(torch.tensor([1]))
    with pytest.raises(ValueError, match="no string"):
        1 in names  # noqa: B015
    assert "one" not in names


@pytest.mark.parametrize("mask", [torch.tensor([True]), torch.tensor([1, 0]), [True, False]])
def check_masks(mask):
    user = E.HashEmbedding(2, name="masks")
    with pytest.raises(ValueError, match="table 'masks': the mask must be"):
        user(torch.tensor([1, 2]), mask)


@pytest.mark.parametrize("offsets,match", [
    ([0, 2, 1], "offset 2 falls, from 2 to 1"), ([0, 4], "offset 1 is 4, and there are 3 ids"), ([1, 2], "must be 0"),
    (torch.zeros(0, dtype=torch.int64), "must be 0"), ([[0, 1]], "one-dimensional"), ([0.0, 1.0], "one-dimensional"),
    ([0, -1], "falls"), (None, "need offsets")])
def check_offsets(offsets, match):
    tags = E.HashEmbeddingBag(2, name="offsets")
    with pytest.raises(ValueError, match=f"table 'offsets'.*{match}"):
        tags(torch.tensor([1, 2, 3]), None if offsets is None else torch.as_tensor(offsets))


def check_weights():
    tags = E.HashEmbeddingBag(2, name="weights", mode="sum")
    with pytest.raises(ValueError, match="have the shape"):
        tags(torch.tensor([[1, 2]]), None, torch.ones(2))
    with pytest.raises(ValueError, match="mode='sum'"):
        E.HashEmbeddingBag(mode="max", table=tags)(torch.tensor([[1, 2]]), None, torch.ones(1, 2))
    with pytest.raises(ValueError, match="need offsets|one-dimensional"):
        tags(torch.tensor([[1, 2]]), torch.tensor([0]))


# Optimizers

@pytest.mark.parametrize("make", [
    lambda t: E.SGD(t, lr=-1), lambda t: E.SGD(t, lr=math.nan), lambda t: E.LazyAdam(t, betas=(1.0, 0.9)),
    lambda t: E.SparseAdam(t, terms=-1), lambda t: E.GroupAdagrad(t, initial_accumulator_value=0),
    lambda t: E.GroupAdam(t, l1=-1), lambda t: E.Adagrad(t, op=hvd.Max), lambda t: E.SGD([torch.ones(1)])])
def check_arguments_of_optimizers(make):
    with pytest.raises(ValueError):
        make(E.tables(E.HashEmbedding(2, name="options")))


def check_two_optimizers_of_a_table():
    user = E.HashEmbedding(2, name="optimizers")
    E.SGD(E.tables(user))
    with pytest.raises(ValueError, match="'optimizers' has the optimizer .*sgd"):
        E.LazyAdam(E.tables(user))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("clipped", [False, True])
def check_a_gradient_that_is_not_finite(wrong, clipped):
    """Nothing is applied, not even to another table, and the next step works."""
    modules = [E.HashEmbedding(2, name=name) for name in ("good", "bad")]
    optimizer = E.SparseAdam(E.tables(torch.nn.ModuleList(modules)))
    before = [read(module) for module in modules]
    rank = hvd.size() - 1
    good, bad = E.lookup([(module, torch.tensor([1, 77, 3])) for module in modules])
    scale = torch.tensor([[1.0], [wrong if hvd.rank() == rank else 1.0], [1.0]])
    (good.sum() + (bad * scale).sum()).backward()
    with pytest.raises(ValueError, match="table 'bad': the gradient of key 77") as raised:
        if clipped:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert hvd.size() == 1 or f"rank {rank}" in str(raised.value)
    assert all(torch.equal(read(module), one) for module, one in zip(modules, before))
    assert not any(map(len, modules))
    E.lookup([(module, torch.tensor([1])) for module in modules])[1].sum().backward()
    optimizer.step()
    assert not torch.equal(read(modules[1]), before[1])


def check_memory_that_does_not_suffice():
    """The step is not applied on any rank, and the table stays usable."""
    user = E.HashEmbedding(64, name="large", init=E.Zeros(), limit_bytes=(1 << 20) if hvd.rank() == 0 else 0)
    optimizer = E.LazyAdam(E.tables(user), lr=1.0)

    def step(keys):
        user(torch.arange(keys)).sum().backward()
        optimizer.step()
    step(10)
    before, count = read(user, range(20)), len(user)
    with pytest.raises(hvd.HorovodInternalError, match="large.*memory|memory.*large"):
        step(100_000)
    assert torch.equal(read(user, range(20)), before) and len(user) == count
    step(10)
    assert not torch.equal(read(user, range(20)), before)


def check_a_gradient_of_a_table_is_changed_in_place_only():
    user = E.HashEmbedding(2, name="in place")
    with pytest.raises(ValueError, match="table 'in place' can only be set to None"):
        E.tables(user)[0].grad = torch.ones(1, 2)

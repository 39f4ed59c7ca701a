"""The sparse optimizers against their formulas and against dense ones, in float64 and on one rank."""
import itertools

import embedding_oracles as oracles
import numpy as np
import pytest
import torch

from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")

DIM = 4
NUMBERS = itertools.count()


class Trained:
    """A table whose rows get the gradients they are told, through a module and backward."""

    def __init__(self, make, name=None):
        name = name or f"trained {next(NUMBERS)}"
        self.module = E.HashEmbedding(DIM, name=name, init=E.Normal(0, 1), dtype=torch.float64)
        self.optimizer = make(E.tables(self.module))

    def update(self, keys, gradients, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        rows = self.module(torch.tensor(keys, dtype=torch.int64))
        rows.backward(torch.as_tensor(np.asarray(gradients, np.float64)).reshape(rows.shape))
        self.optimizer.step()

    def read(self, keys):
        self.module.eval()
        with torch.no_grad():
            values = self.module(torch.tensor(keys, dtype=torch.int64)).numpy().copy()
        self.module.train()
        return values

    def first(self, keys):
        return self.read(keys)


def steps(count, keys, every, size=1.0, seed=0):
    """(keys, gradients, lr) of each step: each key about every so many steps."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        chosen = np.flatnonzero(rng.random(keys) < 1 / every)
        yield chosen.tolist(), size * rng.normal(size=(len(chosen), DIM)), 1e-3 * (1 + i % 7)


RULES = {
    "SGD": (lambda t: E.SGD(t), lambda: oracles.SGD()),
    "Adagrad": (lambda t: E.Adagrad(t), lambda: oracles.Adagrad()),
    "Adagrad with a first value": (lambda t: E.Adagrad(t, initial_accumulator_value=0.3),
                                   lambda: oracles.Adagrad(initial=0.3)),
    "Adagrad rowwise": (lambda t: E.Adagrad(t, rowwise=True, eps=1e-6), lambda: oracles.Adagrad(1e-6, rowwise=True)),
    "LazyAdam": (lambda t: E.LazyAdam(t, betas=(0.8, 0.99)), lambda: oracles.LazyAdam((0.8, 0.99))),
    "SparseAdam": (lambda t: E.SparseAdam(t), lambda: oracles.SparseAdam()),
    "SparseAdam, few terms": (lambda t: E.SparseAdam(t, terms=5), lambda: oracles.SparseAdam(terms=5)),
    "GroupAdagrad": (lambda t: E.GroupAdagrad(t, l1=0.3, l2=0.2, l21=0.2),
                     lambda: oracles.GroupAdagrad(0.3, 0.2, 0.2)),
    "GroupAdam": (lambda t: E.GroupAdam(t, l1=0.01, l2=0.02, l21=0.01),
                  lambda: oracles.GroupAdam(l1=0.01, l2=0.02, l21=0.01)),
}


@pytest.mark.parametrize("every", [1, 10, 60])
@pytest.mark.parametrize("name", RULES)
def test_formulas(name, every):
    make, rule = RULES[name]
    trained = Trained(make)
    start = trained.first(range(30))
    oracle = oracles.Table(rule(), lambda key: start[key])
    for keys, gradients, lr in steps(300, 30, every):
        trained.update(keys, gradients, lr)
        oracle.update(keys, gradients, lr)
    np.testing.assert_allclose(trained.read(range(30)), oracle.read(range(30)), rtol=1e-12, atol=1e-12)


def from_dense_adam(terms, every, count=900, size=1.0, eps=0.0):
    """How far SparseAdam is from Adam over all rows, at any step."""
    trained = Trained(lambda t: E.SparseAdam(t, terms=terms, eps=eps))
    x = trained.first(range(20))
    dense = oracles.DenseAdam(x, eps=eps)
    worst = 0.0
    for keys, gradients, lr in steps(count, 20, every, size):
        trained.update(keys, gradients, lr)
        every_gradient = np.zeros_like(x)
        every_gradient[keys] = gradients
        dense.update(every_gradient, lr)
        worst = max(worst, np.abs(trained.read(range(20)) - dense.x).max())
    return worst


@pytest.mark.parametrize("every", [1, 10, 300])
def test_sparse_adam_is_adam_over_all_rows(every):
    assert from_dense_adam(0, every) <= 1e-12


@pytest.mark.parametrize("every", [10, 300])
def test_a_sum_that_is_cut(every):
    assert from_dense_adam(192, every) <= 1e-8


@pytest.mark.parametrize("every", [10, 300])
def test_eps(every):
    assert from_dense_adam(192, every, size=1e-2, eps=1e-8) <= 1e-6


def test_an_evaluation_between_steps_changes_nothing():
    values, rows = [], []
    for look in (True, False):
        trained = Trained(lambda t: E.SparseAdam(t), "looked at")
        for keys, gradients, lr in steps(100, 20, 10):
            trained.update(keys, gradients, lr)
            if look:
                trained.read(range(40))
        values.append(trained.read(range(40)))
        rows.append(len(trained.module))
        trained.module.table.close()
    assert rows == [20, 20]
    np.testing.assert_array_equal(*values)


def twin(first, second, born=0, size=1.0):
    """Two optimizers on the same gradients, through a change of lr; rows are seen now and then."""
    tables = []
    for make in (first, second):
        trained = Trained(make, "twin")
        for _ in range(born):
            trained.update([], np.zeros((0, DIM)), 1e-3)
        for i, (keys, gradients, _) in enumerate(steps(200, 10, 3, size)):
            trained.update(keys, gradients, 0.1 if i < 100 else 0.03)
        tables.append(trained.read(range(10)))
        trained.module.table.close()
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-12)


@pytest.mark.parametrize("born,size", [(0, 1.0), (1000, 1e-7)])
def test_without_penalties_group_adagrad_is_adagrad(born, size):
    twin(lambda t: E.GroupAdagrad(t), lambda t: E.Adagrad(t, eps=0.0, initial_accumulator_value=0.1), born, size)


@pytest.mark.parametrize("born,size", [(0, 1.0), (1000, 1e-7)])
def test_without_penalties_group_adam_is_adam(born, size):
    twin(lambda t: E.GroupAdam(t), lambda t: E.LazyAdam(t), born, size)


def test_group_adagrad_as_published():
    rng = np.random.default_rng(2)
    trained = Trained(lambda t: E.GroupAdagrad(t, l1=0.1, l2=0.2, l21=0.3))
    x, gradients = trained.first([5])[0], rng.normal(size=(50, DIM))
    for gradient in gradients:
        trained.update([5], [gradient], 0.1)
    np.testing.assert_allclose(trained.read([5])[0],
                               oracles.group_adagrad_as_published(x, gradients, 0.1, 0.1, 0.2, 0.3), atol=1e-12)


@pytest.mark.parametrize("make", [lambda t: E.GroupAdagrad(t, l1=5.0), lambda t: E.GroupAdagrad(t, l21=5.0),
                                  lambda t: E.GroupAdam(t, l1=5.0), lambda t: E.GroupAdam(t, l21=5.0)])
def test_penalties_make_exact_zeros(make):
    trained = Trained(make)
    towards_zero, zero = 0.1 * trained.first([5]), False
    for _ in range(1000):
        trained.update([5], towards_zero, 0.1)
        zero |= trained.read([5]) == 0
    assert zero.all()


def test_lazy_adam_is_what_torch_calls_sparse_adam():
    trained = Trained(lambda t: E.LazyAdam(t))
    weight = torch.nn.Parameter(torch.from_numpy(trained.first(range(20))))
    theirs = torch.optim.SparseAdam([weight], lr=1e-3)
    for keys, gradients, _ in steps(200, 20, 5):
        trained.update(keys, gradients, 1e-3)
        weight.grad = torch.sparse_coo_tensor([keys], torch.from_numpy(gradients), weight.shape,
                                              check_invariants=True)
        theirs.step()
    np.testing.assert_allclose(trained.read(range(20)), weight.detach().numpy(), atol=1e-12)


def test_a_scheduler_and_groups():
    one, two = (E.HashEmbedding(2, name=name, init=E.Zeros()) for name in ("one", "two"))
    optimizer = E.SGD([{"params": E.tables(one)}, {"params": E.tables(two), "lr": 0.5}], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        (one(torch.tensor([1])).sum() + two(torch.tensor([1])).sum()).backward()
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(one(torch.tensor([1])).detach(), [[-1.1, -1.1]], rtol=1e-6)
    np.testing.assert_allclose(two(torch.tensor([1])).detach(), [[-0.55, -0.55]], rtol=1e-6)
    assert optimizer.state_dict()["param_groups"][1]["lr"] == pytest.approx(0.005)

"""Embeddings by id on ranks: what a model looks up and trains is what one process with all the data would have."""
import embedding_oracles as oracles
import embedding_steps
import numpy as np
import pytest
import torch
from embedding_steps import DIM, KEYS, mine

import lightcc.torch as hvd
import ranks
from lightcc.torch import embedding as E

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def embedding(name, kind=E.HashEmbedding, dim=DIM, **options):
    return kind(dim, name=name, dtype=torch.float64, **{"init": E.Normal(0, 1), **options})


def read(module, keys):
    """Without a trace; on all ranks."""
    was = module.training
    module.eval()
    ids = torch.tensor(keys)
    values = module(ids if isinstance(module, E.HashEmbedding) else ids.reshape(-1, 1))
    module.train(was)
    return values.detach().numpy().copy()


def rows(module):
    """Of all ranks."""
    return int(hvd.allreduce(torch.tensor(len(module)), op=hvd.Sum))


def train(module, optimizer, steps, first=0, ahead=False):
    """Each key's rows get the gradients of mine()."""
    batches = [torch.tensor(mine(step)[0][0]) for step in range(first, first + steps)]
    for i, ids in enumerate(batches):
        output = module(ids)
        if ahead and i + 1 < steps:
            E.prefetch([(module, batches[i + 1])])
        output.backward(torch.tensor(mine(first + i)[0][1]))
        optimizer.step()


def trained_oracle(module, rule, steps, lr=1e-3, average=True):
    return embedding_steps.trained_oracle(read(module, KEYS), rule, steps, lr, average)


# Reading

def check_first_values_are_the_same_on_all_ranks_and_insert_nothing():
    user = embedding("first values")
    for values in (user(torch.tensor(KEYS)).detach(), torch.tensor(read(user, KEYS))):
        every = hvd.allgather(values.reshape(1, -1))
        assert (every == every[0]).all()
        assert len(values.unique()) == values.numel()
    assert rows(user) == 0


def check_shapes_and_kinds_of_ids():
    user = embedding("shapes")
    assert user(torch.zeros((2, 3, 0), dtype=torch.int64)).shape == (2, 3, 0, DIM)
    assert user(torch.tensor(5)).shape == (DIM,)
    expected = user(torch.tensor([[1, 2], [2, 1]])).detach()
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(user(torch.tensor([[1, 2], [2, 1]], dtype=dtype)), expected)
    for ids in (np.array([[1, 2], [2, 1]], np.uint16), [[1, 2], [2, 1]]):
        assert torch.equal(user(ids), expected)
    assert torch.equal(user(np.array([(1 << 64) - 1], np.uint64)), user(torch.tensor([-1])))


def check_constants():
    assert (read(embedding("constant", init=E.Constant(2.5)), KEYS) == 2.5).all()
    assert not read(embedding("zeros", init=E.Zeros()), KEYS).any()
    values = embedding("uniform", init=E.Uniform(1, 2))(torch.arange(500))
    assert 1 <= values.min() and values.max() < 2 and abs(values.mean() - 1.5) < 0.1
    values = embedding("normal", init=E.Normal(3, 2))(torch.arange(2000))
    assert abs(values.mean() - 3) < 0.2 and abs(values.std() - 2) < 0.1


def check_a_mask():
    user = embedding("mask", init=E.Constant(1.0))
    optimizer = E.SGD(E.tables(user), lr=1.0, op=hvd.Sum)
    ids, mask = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[True, True, False], [True, False, False]])
    output = user(ids, mask)
    assert torch.equal(output, mask.unsqueeze(-1).expand(2, 3, DIM).double())
    output.sum().backward()
    optimizer.step()
    assert rows(user) == 3
    assert (read(user, [1, 2, 3]) == 1 - hvd.size()).all() and (read(user, [0]) == 1).all()


def check_strings():
    user = embedding("strings", strings=True)
    optimizer = E.SGD(E.tables(user), lr=1.0, op=hvd.Sum)
    names = ["berlin", "", "łódź", "berlin", "x" * 1000]
    before = user(names).detach()
    assert torch.equal(before[0], before[3]) and not torch.equal(before[0], before[1])
    user(np.array(names)).sum().backward()
    optimizer.step()
    assert torch.allclose(user(names[:2]), before[:2] - hvd.size() * torch.tensor([[2.0], [1.0]]))
    assert rows(user) == 4


# Training

RULES = {
    "SGD": (E.SGD, oracles.SGD),
    "Adagrad": (lambda t, **o: E.Adagrad(t, rowwise=True, **o), lambda: oracles.Adagrad(rowwise=True)),
    "SparseAdam": (E.SparseAdam, oracles.SparseAdam),
    "GroupAdagrad": (lambda t, **o: E.GroupAdagrad(t, l1=0.1, l21=0.1, **o), lambda: oracles.GroupAdagrad(0.1, 0, 0.1)),
    "GroupAdam": (lambda t, **o: E.GroupAdam(t, l1=0.01, l2=0.1, **o), lambda: oracles.GroupAdam(l1=0.01, l2=0.1)),
}


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("name", RULES)
def check_training(name, op):
    make, rule = RULES[name]
    user = embedding(f"training {name} {op}")
    oracle = trained_oracle(user, rule(), 40, average=op == hvd.Average)
    train(user, make(E.tables(user), lr=1e-3, op=op), 40)
    np.testing.assert_allclose(read(user, KEYS), oracle.read(KEYS), rtol=1e-11, atol=1e-12)
    assert rows(user) == len(oracle.rows)


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def check_prefetch_and_a_second_run_give_the_same_bits(name):
    values = []
    for ahead in (False, True, False):
        user = embedding(f"again {name}")
        train(user, RULES[name][0](E.tables(user), lr=1e-3), 25, ahead=ahead)
        values.append(read(user, KEYS))
        user.table.close()
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])


def check_prefetched_lookups_are_the_next_ones():
    user, item = embedding("prefetched"), embedding("prefetched too")
    optimizer = E.SGD(E.tables(torch.nn.ModuleList([user, item])), lr=1.0, op=hvd.Sum)
    one, two = torch.tensor([1, 2]), torch.tensor([[3]])
    before = read(user, [1, 2]), read(item, [3])
    E.prefetch([(user, one), (item, two)])
    assert np.array_equal(read(user, [1, 2]), before[0])  # an evaluation comes between
    with pytest.raises(ValueError, match="table 'prefetched': other ids"):
        user(torch.tensor([5]))
    (user(one).sum() + item(two.clone()).sum()).backward()
    optimizer.step()
    assert np.allclose(read(user, [1, 2]), before[0] - hvd.size())
    assert np.allclose(read(item, [3]), before[1] - hvd.size())
    batch = E.prefetch([(user, one)])
    batch.drop()
    user(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert np.allclose(read(user, [1, 2]), before[0] - hvd.size())


@pytest.mark.parametrize("wire,error", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def check_rows_that_travel_in_half_precision(wire, error):
    user = embedding(f"wire {wire}", dim=8, wire=wire)
    whole = embedding("whole", dim=8, init=E.Constant(0.0))
    values = user(torch.tensor(KEYS)).detach().numpy()
    assert values.std() > 0.5
    optimizers = [E.SGD(E.tables(module), lr=1.0, op=hvd.Sum) for module in (user, whole)]
    for module, optimizer in zip((user, whole), optimizers):
        (module(torch.tensor(KEYS)) * torch.linspace(-1, 1, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
    difference = read(user, KEYS) - values - read(whole, KEYS)
    assert np.abs(difference).max() <= error * (np.abs(values).max() + hvd.size())


def check_gradients_add_up_until_step():
    user = embedding("accumulated", init=E.Zeros())
    optimizer = E.SGD(E.tables(user), lr=1.0)
    user(torch.tensor([1, 1])).sum().backward()
    user(torch.tensor([2, 1])).sum().backward()
    output = user(torch.tensor([3]))
    optimizer.step()
    assert read(user, [1, 2, 3])[:, 0].tolist() == [-3, -1, 0]
    output.sum().backward()  # of a lookup before the step
    optimizer.step()
    assert read(user, [1, 2, 3])[:, 0].tolist() == [-3, -1, -1]
    user(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert read(user, [1])[0, 0] == -3


def check_eval_and_no_grad_insert_nothing():
    user = embedding("not trained")
    optimizer = E.SparseAdam(E.tables(user))
    user.eval()
    assert not user(torch.tensor(KEYS)).requires_grad
    user.train()
    with torch.no_grad():
        assert not user(torch.tensor(KEYS)).requires_grad
    optimizer.step()
    assert rows(user) == 0


def check_modules_that_share_a_table():
    first = embedding("shared", init=E.Zeros())
    second = E.HashEmbeddingBag(mode="sum", table=first)
    assert len(E.tables(torch.nn.ModuleList([first, second, embedding("other")]))) == 2
    optimizer = E.SGD(E.tables(torch.nn.ModuleList([first, second])), lr=1.0)
    one, two = E.lookup([(first, torch.tensor([1, 2])), (second, torch.tensor([[1, 3]]))])
    (one.sum() + two.sum()).backward()
    optimizer.step()
    assert read(first, [1, 2, 3])[:, 0].tolist() == [-2, -1, -1]


# Bags

@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def check_bags(mode, weighted):
    if weighted and mode != "sum":
        return
    tags = embedding(f"bags {mode} {weighted}", E.HashEmbeddingBag, mode=mode)
    optimizer = E.SGD(E.tables(tags), lr=0.1, op=hvd.Sum)
    theirs = torch.nn.EmbeddingBag.from_pretrained(torch.tensor(read(tags, range(6))), freeze=False, mode=mode)
    ids, offsets = torch.tensor([1, 4, 1, 0, 5, 2, 4]), torch.tensor([0, 3, 3, 5])
    weights = [torch.linspace(-1, 2, 7, dtype=torch.float64).requires_grad_() if weighted else None for _ in range(2)]
    output, expected = tags(ids, offsets, weights[0]), theirs(ids, offsets, weights[1])
    torch.testing.assert_close(output, expected)
    gradient = torch.arange(4.0 * DIM, dtype=torch.float64).reshape(4, DIM)
    output.backward(gradient)
    expected.backward(gradient)
    if weighted:
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
    optimizer.step()
    expected = theirs.weight.detach() - 0.1 * hvd.size() * theirs.weight.grad
    np.testing.assert_allclose(read(tags, range(6)), expected, rtol=1e-12)
    matrix = torch.tensor([[1, 2], [3, 3]])
    torch.testing.assert_close(tags(matrix), tags(matrix.reshape(-1), torch.tensor([0, 2])))

"""register_local_var: gradients that stay on their rank."""
import copy

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, SAMPLES, data, expect_equal, loss_of, make_model, my_loss

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class WithHead(torch.nn.Module):
    """The shared model, and a head that is each rank's own."""

    def __init__(self, rank):
        super().__init__()
        self.body = make_model()
        torch.manual_seed(50 + rank)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x))


def wrap(model, kind="SGD", **options):
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **options)
    for p in model.head.parameters():
        optimizer.register_local_var(p)
    return optimizer


def part(rank):
    return slice(rank * SAMPLES, (rank + 1) * SAMPLES)


def train_alone(models, kind, steps, passes=1, scale=True):
    """The reference: all ranks' models in one process, their bodies with the mean of the gradients."""
    plain = [OPTIMIZERS[kind](model.parameters()) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            for i in range(passes):
                x, y = data(passes * step + i)
                loss_of(model, x[part(rank)], y[part(rank)]).backward()
        for same in zip(*[model.body.parameters() for model in models]):
            mean = sum(p.grad for p in same) / len(same)
            for p in same:
                p.grad = mean.clone()
        for model, optimizer in zip(models, plain):
            for p in model.head.parameters():
                p.grad /= len(models) if scale else 1
            optimizer.step()


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "as they are"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def check_equals_one_process(kind, passes, scale, set_to_none):
    references = [WithHead(rank) for rank in range(hvd.size())]
    model = copy.deepcopy(references[hvd.rank()])
    train_alone(references, kind, 4, passes, scale)
    optimizer = wrap(model, kind, backward_passes_per_step=passes)
    assert optimizer.scale_local_gradients is True
    optimizer.scale_local_gradients = scale
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(passes):
            my_loss(model, passes * step + i).backward()
        optimizer.step()
    expect_equal(model.body, references[hvd.rank()].body)
    for p, q in zip(model.head.parameters(), references[hvd.rank()].head.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)



def check_once_for_each_backward():
    """Not again by a second synchronize, nor by the step of a parameter that has no new gradient."""
    p, q = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.0))
    optimizer.register_local_var(p)
    optimizer.register_local_var(p)  # again: nothing new
    n = hvd.size()
    for i in range(3):
        optimizer.zero_grad()
        (p * n * (hvd.rank() + 1 + i)).backward()
        assert p.grad.item() == n * (hvd.rank() + 1 + i)
        for _ in range(2):
            optimizer.synchronize()
            assert p.grad.item() == hvd.rank() + 1 + i
        with optimizer.skip_synchronize():
            optimizer.step()
        assert p.grad.item() == hvd.rank() + 1 + i
        q.sum().backward()
        optimizer.step()
        assert p.grad.item() == hvd.rank() + 1 + i
    p.grad = torch.tensor([2.0 * n])  # by hand
    optimizer.step()
    assert p.grad.item() == 2.0
    p.grad.fill_(3.0 * n)
    optimizer.step()
    assert p.grad.item() == 3.0
    optimizer.zero_grad()
    optimizer.step()
    assert p.grad is None


def check_only_some_ranks_use_it():
    p, q = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
    optimizer.register_local_var(p)
    for step in range(2):
        optimizer.zero_grad()
        (q + (p * hvd.size() if hvd.rank() == step else 0)).backward()
        optimizer.step()
    assert p.item() == (0.0 if hvd.rank() < 2 else 1.0)
    assert q.item() == -1.0


def check_sparse_and_create_graph():
    table, p = torch.nn.Embedding(5, 2, sparse=True), torch.ones(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, p], lr=1.0))
    for parameter in (table.weight, p):
        optimizer.register_local_var(parameter)
    n = hvd.size()
    for _ in range(2):
        optimizer.zero_grad()
        (table(torch.tensor([hvd.rank(), hvd.rank()])).sum() * n + (p * p).sum() * n).backward(create_graph=n > 1)
        optimizer.synchronize()
        assert table.weight.grad.to_dense().sum(1).tolist() == [4.0 * (row == hvd.rank()) for row in range(5)]
        assert p.grad.item() == 2.0
        with optimizer.skip_synchronize(), torch.no_grad():
            before = p.clone()
            optimizer.step()
            p.copy_(before)


def check_while_training():
    """Registered between two steps; frozen, late and added parameters."""
    n = hvd.size()
    p, frozen, late = (torch.ones(1, requires_grad=grad) for grad in (True, False, True))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, frozen], lr=0.0))
    optimizer.register_local_var(frozen)

    def one_step(factor):
        optimizer.zero_grad(set_to_none=False)
        (factor * n * (p + frozen + late)).backward()
        optimizer.step()
        return [q.grad and q.grad.item() for q in (p, frozen, late)]

    mine, mean = hvd.rank() + 1, sum(range(1, n + 1))
    assert one_step(mine)[:2] == [mean, None]
    frozen.requires_grad_(True)
    assert one_step(mine)[:2] == [mean, mine]
    optimizer.register_local_var(p)
    optimizer.add_param_group({"params": [late]})
    optimizer.register_local_var(late)
    late.grad = None
    assert one_step(mine) == [mine, mine, mine]


def check_process_set():
    if hvd.size() == 1:
        return
    process_set = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [0])
    p = torch.ones(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), process_set=process_set)
    optimizer.register_local_var(p)
    (p * 6.0).backward()
    optimizer.step()
    assert p.grad.item() == 6.0 / (process_set.size() if process_set.included() else 1)
    hvd.remove_process_set(process_set)


def check_the_epoch_ends():
    model = WithHead(hvd.rank())
    optimizer = wrap(model)
    for _ in range(2):
        optimizer.zero_grad()
        my_loss(model, 0).backward()
        expected = [p.grad / hvd.size() for p in model.head.parameters()]
        optimizer.step()
        for p, grad in zip(model.head.parameters(), expected):
            assert torch.equal(p.grad, grad)
        hvd.shutdown()
        hvd.init()


def check_refusals():
    model = make_model()
    weight, other = model[0].weight, torch.ones(1, requires_grad=True)

    def optimizer(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(ValueError, match="not a parameter of the optimizer"):
        optimizer().register_local_var(other)
    with pytest.raises(ValueError, match="in a group"):
        optimizer(groups=2).register_local_var(weight)
    grouped = optimizer(groups=[[model[2].weight, model[2].bias]], named_parameters=model.named_parameters())
    with pytest.raises(ValueError, match="2.bias is in a group"):
        grouped.register_local_var(model[2].bias)
    grouped.register_local_var(weight)
    with pytest.raises(ValueError, match="Adasum"):
        optimizer(op=hvd.Adasum).register_local_var(weight)
    if hvd.size() > 1:
        again = make_model()
        late = hvd.DistributedOptimizer(torch.optim.SGD(again.parameters(), lr=0.1))
        my_loss(again, 0).backward()
        with pytest.raises(ValueError, match="on its way"):
            late.register_local_var(again[0].weight)
        late.step()
        late.register_local_var(again[0].weight)
    hvd.barrier()

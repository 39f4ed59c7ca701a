"""broadcast_parameters and broadcast_optimizer_state: what the root has, the others have afterwards, and no more."""
import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, data, expect_equal, loss_of, make_model, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def check_broadcast_parameters():
    for root in range(hvd.size()):
        for form in (lambda model: model.state_dict(), lambda model: model.named_parameters(),
                     lambda model: list(model.parameters())):
            model, reference = make_model(), make_model()
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters()):
                    p.add_(hvd.rank())
                    q.add_(root)
            hvd.broadcast_parameters(form(model), root_rank=root)
            expect_equal(model, reference, rtol=0, atol=0)
    norm = torch.nn.BatchNorm1d(3).to(torch.float64)
    norm.num_batches_tracked += hvd.rank()  # an int64 scalar
    hvd.broadcast_parameters(norm.state_dict(), root_rank=hvd.size() - 1)
    assert norm.num_batches_tracked == hvd.size() - 1
    strided = (torch.arange(6.0).view(2, 3) + hvd.rank()).t()
    hvd.broadcast_parameters([strided], root_rank=0)
    assert torch.equal(strided, torch.arange(6.0).view(2, 3).t())
    for wrong in (3, "weights", torch.ones(2), {"a": 1.0}, [("a", "b")]):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            hvd.broadcast_parameters(wrong, root_rank=0)


@pytest.mark.parametrize("root_has_state", [True, False], ids=["root has state", "root has none"])
@pytest.mark.parametrize("others_have_state", [True, False], ids=["others have state", "others have none"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def check_broadcast_optimizer_state(kind, root_has_state, others_have_state):
    root = hvd.size() - 1
    is_root = hvd.rank() == root

    def prepared(rank):
        model = make_model()
        optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01 * (1 + rank))
        if root_has_state if rank == root else others_have_state:
            for step in range(1 + rank):
                loss_of(model, *data(step)).backward()
                optimizer.step()
        return optimizer

    optimizer, reference = prepared(hvd.rank()), prepared(root)
    before = tensors_of(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert state.keys() == mine["state"][index].keys()
        for key, value in state.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(mine["state"][index][key], value), (index, key)
    if is_root:
        assert all(a is b for a, b in zip(before, tensors_of(optimizer)))


def tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def check_broadcast_state_of_distributed_optimizer():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["Adam"](model.parameters(), lr=0.01 * (1 + hvd.rank())))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    reference = make_model()
    train(model, optimizer, 3)
    train_alone(reference, OPTIMIZERS["Adam"](reference.parameters()), 3)
    expect_equal(model, reference)


def check_broadcast_of_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), root_rank=0)

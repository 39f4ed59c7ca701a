"""broadcast_parameters and broadcast_optimizer_state: what the root has, the others have afterwards, and no more."""
import copy
import inspect

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, data, expect_equal, loss_of, make_model, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# broadcast_parameters

def check_broadcast_parameters():
    for root in range(hvd.size()):
        for form in (lambda model: model.state_dict(), lambda model: model.named_parameters(),
                     lambda model: list(model.named_parameters()), lambda model: list(model.parameters())):
            model, reference = make_model(), make_model()
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters()):
                    p.add_(hvd.rank())
                    q.add_(root)
            before = [p.data_ptr() for p in model.parameters()]
            assert hvd.broadcast_parameters(form(model), root_rank=root) is None
            assert [p.data_ptr() for p in model.parameters()] == before
            expect_equal(model, reference, rtol=0, atol=0)
    norm = torch.nn.BatchNorm1d(3).to(torch.float64)
    norm.num_batches_tracked += hvd.rank()  # an int64 scalar
    hvd.broadcast_parameters(norm.state_dict(), root_rank=hvd.size() - 1)
    assert norm.num_batches_tracked == hvd.size() - 1


def check_broadcast_parameters_of_any_dtype_and_layout():
    ramp = torch.arange(12).view(3, 4)
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
              torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint32, torch.float8_e4m3fn)

    def tensors(rank):
        made = {str(dtype): ((ramp + rank) % 5).to(dtype) for dtype in dtypes}
        made["columns"] = (ramp.float() + rank).t()
        made["slice"] = (ramp.float() + rank)[:, ::2]
        made["scalar"] = torch.tensor(1.0 + rank)
        made["complex scalar"] = torch.tensor(1.0 + rank * 1j)
        made["empty"] = torch.empty(0, 3)
        made["parameter"] = torch.nn.Parameter(torch.ones(2) + rank)
        made[7] = torch.tensor([rank])
        return made

    root = hvd.size() - 1
    mine = tensors(hvd.rank())
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in mine.items()}
    hvd.broadcast_parameters(mine, root)
    for name, expected in tensors(root).items():
        assert (mine[name].data_ptr(), mine[name].stride()) == before[name]
        assert mine[name].dtype == expected.dtype
        assert (mine[name] == expected).all(), name


def check_what_broadcast_parameters_refuses():
    for wrong in (3, None, "weights", torch.ones(2), {"a": 1.0}, {"a": None}, [("a", "b")], ["ab"], (torch.ones(2),),
                  [("a", torch.ones(1), 2)], {torch.ones(2)}):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    with pytest.raises(ValueError, match="root"):
        hvd.broadcast_parameters({"x": torch.ones(2), "y": torch.ones(2)}, root_rank=hvd.size())
    for wrong, text in ((torch.eye(2).to_sparse(), "layout"), (torch.ones(2, device="meta"), "meta")):
        with pytest.raises(ValueError, match=text):
            hvd.broadcast_parameters([("x", torch.ones(2)), ("y", wrong)], root_rank=0)
    x = torch.full((2,), float(hvd.rank()))
    hvd.broadcast_parameters({"x": x, "y": torch.ones(2)}, root_rank=0)  # no name is in flight
    assert (x == 0).all()


# broadcast_optimizer_state

OPTIONS = {
    "ASGD": [{}, {"lambd": 0.01, "weight_decay": 0.1}],
    "Adadelta": [{}, {"rho": 0.8, "foreach": False}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}, {"fused": True}],
    "Adam": [{}, {"amsgrad": True, "betas": (0.8, 0.99)}, {"foreach": True, "maximize": True}, {"fused": True},
             {"lr": torch.tensor(0.02)}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "AdamW": [{}, {"amsgrad": True}, {"fused": True, "weight_decay": 0.1}, {"foreach": False, "eps": 1e-6}],
    "Adamax": [{}, {"betas": (0.7, 0.9), "foreach": True}],
    "Muon": [{}, {"nesterov": False, "ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": "match_rms_adamw"}],
    "NAdam": [{}, {"momentum_decay": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"foreach": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.5, "centered": True}],
    "Rprop": [{}, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 10.0)}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
            {"fused": True, "momentum": 0.5}, {"foreach": False, "maximize": True}],
    "SparseAdam": [{}, {"betas": (0.8, 0.9)}],
}


def kinds():
    """Every optimizer of this torch."""
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return {c.__name__ for c in classes if issubclass(c, torch.optim.Optimizer)} - {"Optimizer"}


class Bag(torch.nn.Module):
    """For optimizers with rules of their own: matrices alone, or sparse gradients alone."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(6, 3, sparse=sparse)
        self.last = torch.nn.Embedding(4, 3, sparse=sparse)

    def forward(self, x):
        words = (x * 100).long().abs()
        return self.words(words % 6).sum(1) + self.last(words % 4).mean(1)


def model_for(kind):
    return Bag(kind == "SparseAdam") if kind in ("SparseAdam", "Muon") else make_model()


def make_optimizer(kind, model, rank, **options):
    """With an option of its own for each rank, and two groups where the parameters are not sparse."""
    factor = 1 + rank
    options = {"lr": 0.01, **options}
    options["lr"] = options["lr"] * factor
    params = list(model.parameters())
    groups = params if kind == "SparseAdam" else [{"params": params[:1]}, {"params": params[1:], "lr": 0.03 * factor}]
    if isinstance(options["lr"], torch.Tensor):
        groups = params
    return getattr(torch.optim, kind)(groups, **options)


def trained(kind, rank, steps, options):
    """A model that is the same on all ranks, and an optimizer with so many steps of state."""
    model = model_for(kind)
    optimizer = make_optimizer(kind, model, rank, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *data(step + 10 * rank)).backward()
        optimizer.step()
    model.load_state_dict(model_for(kind).state_dict())
    return model, optimizer


def expect_same_state(mine, theirs):
    """Equal keys, values, types, dtypes and shapes in two state_dicts."""
    assert type(mine) is type(theirs), (mine, theirs)
    if isinstance(mine, torch.Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs), (mine, theirs)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            expect_same_state(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            expect_same_state(a, b)
    else:
        assert mine == theirs


def check_no_optimizer_is_forgotten():
    assert kinds() == set(OPTIONS) | {"LBFGS"}


@pytest.mark.parametrize("steps", [(2, 1), (2, 0), (0, 2), (0, 0)], ids=["all", "root alone", "all but root", "none"])
@pytest.mark.parametrize("kind, number", [(kind, i) for kind in OPTIONS for i in range(len(OPTIONS[kind]))])
def check_every_optimizer(kind, number, steps):
    root = hvd.size() - 1
    is_root = hvd.rank() == root
    model, optimizer = trained(kind, hvd.rank(), steps[0] if is_root else steps[1], OPTIONS[kind][number])
    reference, plain = trained(kind, root, steps[0], OPTIONS[kind][number])
    before = tensors_of(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root, model=model)
    expect_same_state(optimizer.state_dict(), plain.state_dict())
    if is_root:
        assert all(a is b for a, b in zip(before, tensors_of(optimizer)))
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p, q)
    distributed = hvd.DistributedOptimizer(optimizer, sparse_as_dense=kind != "SparseAdam")
    if kind != "SparseAdam":
        train(model, distributed, 2)
        train_alone(reference, plain, 2)
        expect_equal(model, reference, rtol=1e-3, atol=1e-4)


def tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def check_fresh_optimizers_get_gradients_of_zeros():
    model = make_model()
    model[0].weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    kept = model[0].bias.grad = torch.ones(8)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p, q)
        assert (p.grad is None) == (p is model[0].weight)
        assert p.grad is None or p.grad is kept or (p.grad == 0).all()
    assert optimizer.state_dict()["state"] == {}
    sparse = Bag(sparse=True)
    for made in (torch.optim.SparseAdam(sparse.parameters()), torch.optim.SGD(sparse.parameters(), lr=0.1)):
        sparse.zero_grad()
        hvd.broadcast_optimizer_state(made, 0, model=sparse)
        assert all(p.grad.is_sparse and p.grad.shape == p.shape for p in sparse.parameters())
        sparse(torch.ones(2, 3)).sum().backward()
        made.step()


def check_state_of_any_kind():
    """Options and state entries of every type; what the root has not is removed."""
    root = hvd.size() - 1
    is_root = hvd.rank() == root

    def made(here):
        p, q = torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([{"params": [p], "lr": torch.tensor(0.5)}, {"params": [q]}], lr=0.1)
        if here:
            optimizer.param_groups[0].update(initial_lr=0.5, names=["a", ("b", None)], on=True, at=2, limits=(1, 2.0))
            optimizer.state[p] = {"step": 3, "t": torch.tensor(3.0), "none": None, "half": torch.ones(3).half(),
                                  "nested": {"list": [torch.arange(4), 1]}, "flag": False, "t64": torch.tensor(7),
                                  "columns": torch.arange(6.0).view(2, 3).t(), "z": torch.ones(2) * 1j}
            optimizer.state["all"] = {"seen": 100}
        else:
            optimizer.param_groups[1]["extra"] = 1
            optimizer.state[p] = {"step": torch.tensor(3.0), "t": 3, "none": torch.ones(2), "half": torch.ones(3),
                                  "only here": 1}
            optimizer.state[q] = {"step": 5}
        return optimizer

    optimizer = made(is_root)
    rate = optimizer.param_groups[0]["lr"]
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert optimizer.param_groups[0]["lr"] is rate
    expect_same_state(optimizer.state_dict(), made(True).state_dict())
    columns = optimizer.state[optimizer.param_groups[0]["params"][0]]["columns"]
    assert columns.stride() == (1, 3)


def check_learning_rates_of_a_schedule():
    model = make_model()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if hvd.rank() == 0 else None
    for _ in range(2 if schedule else 0):
        optimizer.step()
        schedule.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    resumed = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=1)
    optimizer.step()
    resumed.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize("kind", sorted(set(OPTIONS) - {"SparseAdam", "Muon"}))
def check_resuming_from_a_checkpoint_of_the_root(kind):
    """Rank 0 alone has the checkpoint; training goes on as if there had been no break."""
    def optimizer_of(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01)

    reference = make_model()
    plain = optimizer_of(reference)
    train_alone(reference, plain, 2)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), named_parameters=model.named_parameters())
    if hvd.rank() == 0:
        model.load_state_dict(reference.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expect_same_state(optimizer.state_dict(), plain.state_dict())
    train(model, optimizer, 3)
    train_alone(reference, plain, 3)
    expect_equal(model, reference, rtol=1e-3, atol=1e-4)


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


def check_what_broadcast_optimizer_state_refuses():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), root_rank=0)
    if hvd.size() > 1:
        params = [torch.ones(1, requires_grad=True) for _ in range(1 + (hvd.rank() == 0))]
        with pytest.raises(ValueError, match=r"rank 0 \[2\], rank 1 \[1\]"):
            hvd.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1), root_rank=0)
    hvd.barrier()

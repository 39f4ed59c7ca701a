"""DistributedOptimizer: training on ranks equals training in one process on all their data; and all its options,
errors and promises about memory."""
import copy
import io
import warnings

import lightcc.torch as hvd
import pytest
import ranks
import torch
from lightcc import _core

pytestmark = pytest.mark.usefixtures("job")
SAMPLES = 4  # a rank and step


@pytest.mark.parametrize("np", (2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_on_one_rank():
    ranks.run_checks(__file__, 1, only="equals_one_process or broadcast")


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(),
                               torch.nn.Linear(6, 3))


def data(step):
    """Inputs and targets of all ranks."""
    torch.manual_seed(100 + step)
    return torch.randn(hvd.size() * SAMPLES, 5), torch.randn(hvd.size() * SAMPLES, 3)


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def my_loss(model, step):
    part = slice(hvd.rank() * SAMPLES, (hvd.rank() + 1) * SAMPLES)
    x, y = data(step)
    return loss_of(model, x[part], y[part])


def train_alone(model, optimizer, steps, passes=1, edit=lambda model: None):
    """The reference."""
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, *data(passes * step + i)).backward()
        edit(model)
        optimizer.step()


def train(model, optimizer, steps, passes=1, set_to_none=True):
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(passes):
            my_loss(model, passes * step + i).backward()
        optimizer.step()


def expect_equal(model, reference, rtol=1e-4, atol=1e-6):
    """Parameters are those of the reference, and have the same bits on all ranks."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        every = hvd.allgather(p.detach().reshape(1, -1).view(torch.uint8))
        assert (every == every[0]).all(), f"{name} differs between the ranks"


OPTIMIZERS = {
    "SGD": lambda params, lr=0.1: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params, lr=0.01: torch.optim.Adam(params, lr=lr),
    "AdamW": lambda params, lr=0.01: torch.optim.AdamW(params, lr=lr, amsgrad=True),
}

OPTIONS = {
    "default": lambda model: {},
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "one group": lambda model: {"groups": 1},
    "two groups": lambda model: {"groups": 2, "named_parameters": model.named_parameters()},
    "more groups than parameters": lambda model: {"groups": 100},
    "lists": lambda model: {"groups": [list(model[0].parameters()), [model[4].bias, model[2].weight]]},
    "predivided": lambda model: {"gradient_predivide_factor": 2.0 * hvd.size()},
    "compressed with none": lambda model: {"compression": hvd.Compression.none},
}


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def check_equals_one_process(kind, options, set_to_none):
    model, reference = make_model(), make_model()
    train_alone(reference, OPTIMIZERS[kind](reference.parameters()), 5)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **OPTIONS[options](model))
    train(model, optimizer, 5, set_to_none=set_to_none)
    expect_equal(model, reference)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def check_equals_one_process_about_with_compression(compression):
    model, reference = make_model(), make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 5)
    train(model, hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()),
                                          compression=getattr(hvd.Compression, compression)), 5)
    expect_equal(model, reference, rtol=0, atol=1e-2)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def check_equals_one_process_with_sum():
    model, reference = make_model(), make_model()
    train_alone(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 5)
    train(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum), 5)
    expect_equal(model, reference)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def check_equals_one_process_with_accumulation(set_to_none, groups):
    model, reference = make_model(), make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 4, passes=3)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), backward_passes_per_step=3, groups=groups)
    train(model, optimizer, 4, passes=3, set_to_none=set_to_none)
    expect_equal(model, reference)
    optimizer.set_backward_passes_per_step(1)
    plain = OPTIMIZERS["SGD"](reference.parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_alone(reference, plain, 2)
    train(model, optimizer, 2, set_to_none=set_to_none)
    expect_equal(model, reference)


def check_num_groups_is_deprecated():
    model = make_model()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), num_groups=2)
    reference = make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 2)
    train(model, optimizer, 2)
    expect_equal(model, reference)


def check_clipping_between_synchronize_and_step():
    model, reference = make_model(), make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 3,
                edit=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(), optimizer.skip_synchronize():
            warnings.simplefilter("error")
            optimizer.step()
    expect_equal(model, reference)


def check_step_after_synchronize_warns():
    model, reference = make_model(), make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 1)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    my_loss(model, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    expect_equal(model, reference)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def check_closure(kind):
    model, reference = make_model(), make_model()
    plain = OPTIMIZERS[kind](reference.parameters())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))

    def closure(model, optimizer, loss):
        optimizer.zero_grad()
        result = loss()
        result.backward()
        return result

    for step in range(3):
        expected = plain.step(lambda step=step: closure(reference, plain, lambda: loss_of(reference, *data(step))))
        mine = optimizer.step(lambda step=step: closure(model, optimizer, lambda: my_loss(model, step)))
        torch.testing.assert_close(hvd.allreduce(mine.detach()), expected.detach())
    expect_equal(model, reference)


def check_learning_rate_scheduler_and_state_dict():
    model, reference = make_model(), make_model()
    plain = OPTIMIZERS["SGD"](reference.parameters())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (plain, optimizer)]
    for _ in range(2):
        train_alone(reference, plain, 1)
        train(model, optimizer, 1)
        for scheduler in schedulers:
            scheduler.step()
    resumed = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 0.025
    train_alone(reference, plain, 1)
    train(model, resumed, 1)
    expect_equal(model, reference)


def check_it_is_the_optimizer():
    model = make_model()
    plain = OPTIMIZERS["Adam"](model.parameters())
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is plain.param_groups


# Which parameters have a gradient

class Branches(torch.nn.Module):
    """Uses one of its layers, or none of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in range(3))
        self.common = torch.nn.Linear(3, 3)

    def forward(self, x, which):
        return self.common(x[:, :3] if which is None else self.layers[which](x))


def check_parameters_without_gradient_count_as_zeros():
    model, reference = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    which = [0, None, 1]  # on ranks 0, 1, 2; layer 2 is used by nobody
    for step in range(3):
        x, y = data(step)
        optimizer.zero_grad()
        part = slice(hvd.rank() * SAMPLES, (hvd.rank() + 1) * SAMPLES)
        torch.nn.functional.mse_loss(model(x[part], which[hvd.rank()]), y[part]).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            part = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
            (torch.nn.functional.mse_loss(reference(x[part], which[rank]), y[part]) / hvd.size()).backward()
        plain.step()
    expect_equal(model, reference)
    assert (model.layers[2].weight.grad == 0).all()


def check_frozen_and_late_parameters():
    model, reference = make_model(), make_model()
    for m in (model, reference):
        m[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[:3].parameters(), lr=0.1))
    plain = torch.optim.SGD(reference[:3].parameters(), lr=0.1)
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    assert model[0].weight.grad is None
    for m, o in ((model, optimizer), (reference, plain)):
        m.zero_grad()
        m[0].requires_grad_(True)
        o.add_param_group({"params": m[4].parameters(), "lr": 0.05})
    train(model, optimizer, 3)
    train_alone(reference, plain, 3)
    expect_equal(model, reference)


def check_sparse_gradients():
    def make():
        torch.manual_seed(3)
        return torch.nn.Embedding(10, 4, sparse=True)
    model, reference = make(), make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=True)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), step])).sum().backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            (reference(torch.tensor([rank, step])).sum() / hvd.size()).backward()
        plain.step()
    expect_equal(model, reference)
    refused = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(refused.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="sparse_as_dense"):
        refused(torch.tensor([1])).sum().backward()
        optimizer.step()


def check_process_set():
    model, reference, own = make_model(), make_model(), make_model()
    process_set = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [0])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=process_set)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.step()
        plain.zero_grad()
        x, y = data(step)
        who = process_set.ranks if process_set.included() else [hvd.rank()]  # the others train alone
        for rank in who:
            part = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
            (loss_of(reference, x[part], y[part]) / len(who)).backward()
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q)
    del own
    hvd.remove_process_set(process_set)


# Gradients and their memory

def grads_of(model):
    return [p.grad for p in model.parameters()]


def mean_gradients(step):
    reference = make_model()
    loss_of(reference, *data(step)).backward()
    return grads_of(reference)


def expect_close(grads, expected):
    for grad, values in zip(grads, expected):
        torch.testing.assert_close(grad, values)


def check_create_graph():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model.load_state_dict(make_model().state_dict())
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: create_graph may leak
            my_loss(model, step).backward(create_graph=True)
        optimizer.synchronize()
        expect_close(grads_of(model), mean_gradients(step))
        with optimizer.skip_synchronize():
            optimizer.step()
    for p in model.parameters():
        p.grad = None  # ends the cycle through the graph


def check_channels_last():
    def make():
        torch.manual_seed(4)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).to(
            memory_format=torch.channels_last)

    def images(step):
        torch.manual_seed(step)
        return torch.randn(hvd.size(), 3, 8, 8).to(memory_format=torch.channels_last)

    model, reference = make(), make()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    plain = OPTIMIZERS["SGD"](reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(images(step)[hvd.rank():hvd.rank() + 1]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        reference(images(step)).square().mean().backward()
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def check_layouts_that_differ_are_an_error():
    model = torch.nn.Conv2d(3, 4, 2)
    if hvd.rank() == 0:
        model = model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="'weight'.*ranks disagree on shape"):
        optimizer.step()
    hvd.barrier()


def check_saved_gradient_holds_itself_alone():
    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 400)).sum().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(model[1].weight.grad, file)
    assert len(file.getvalue()) < 400 * 4 + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), model[1].weight.grad)
    assert torch.equal(copy.deepcopy(model[1].weight.grad), model[1].weight.grad)


def check_gradients_outlive_shutdown():
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    plain = OPTIMIZERS["SGD"](reference.parameters())
    for _ in range(3):
        train(model, optimizer, 2)
        train_alone(reference, plain, 2)
        before = [grad.clone() for grad in grads_of(model)]
        hvd.shutdown()
        for grad, values in zip(grads_of(model), before):
            assert torch.equal(grad, values)
            grad.add_(1)
        hvd.init()
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_gradient_that_the_user_replaced():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    my_loss(model, 0).backward()
    optimizer.synchronize()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    for p, old in zip(model.parameters(), before):
        torch.testing.assert_close(p, old - 0.7)
    model.load_state_dict(make_model().state_dict())
    optimizer.zero_grad()
    my_loss(model, 1).backward()
    optimizer.synchronize()
    expect_close(grads_of(model), mean_gradients(1))


def check_collectives_and_bytes_copied_per_step():
    """Gradients that are ready together travel together, from where they lie: the core copies none of them."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(30)])
    parameters = list(model.parameters())
    gradient_bytes = sum(4 * p.numel() for p in parameters)
    steps = 20
    for groups, most in ((1, 1), (None, len(parameters))):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), groups=groups)

        def train_some(steps, optimizer=optimizer):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
        train_some(3)
        before = _core.counters()
        train_some(steps)
        spent = {name: value - before[name] for name, value in _core.counters().items()}
        print(groups, spent)
        assert spent["collectives"] <= most * steps
        if groups is None:
            assert spent["fused_requests"] > 0 and spent["announced"] == 0
        assert spent["copied_bytes"] <= gradient_bytes * steps
        assert gradient_bytes * steps <= spent["payload_bytes"] < 1.1 * gradient_bytes * steps


# Errors

def check_zero_grad_between_backward_and_step():
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 1)
    my_loss(model, 0).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    expect_equal(model, reference)
    optimizer.zero_grad()
    my_loss(model, 0).backward()
    optimizer.synchronize()
    optimizer.zero_grad()


def check_too_many_backward_passes():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), backward_passes_per_step=2)
    my_loss(model, 0).backward()
    my_loss(model, 1).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        my_loss(model, 2).backward()
    optimizer.synchronize()
    hvd.barrier()


def check_wrong_arguments():
    model = make_model()
    parameters = list(model.parameters())

    def wrap(**options):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)

    named = list(model.named_parameters())
    for options, text in (
            ({"named_parameters": parameters}, "tuples"),
            ({"named_parameters": [("a", p) for p in parameters]}, "unique.*a"),
            ({"named_parameters": named[:-1]}, "1 of the optimizer's parameters"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
            ({"groups": -1}, "groups"),
            ({"groups": parameters}, "groups"),
            ({"groups": [["a"]]}, "groups"),
            ({"groups": [parameters[:2], parameters[1:]]}, "once"),
            ({"groups": "two"}, "groups")):
        with pytest.raises(ValueError, match=text):
            wrap(**options)
    with pytest.raises(NotImplementedError, match="Adasum"):
        wrap(op=hvd.Adasum)
    hvd.barrier()


def check_disagreement_in_step():
    model = make_model()
    extra = torch.ones(2 + hvd.rank(), requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), extra], lr=0.1),
                                         [*model.named_parameters(), ("extra", extra)])
    (my_loss(model, 0) + extra.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match="'extra'.*ranks disagree on shape: rank 0 has"):
        optimizer.step()
    again = make_model()
    train(again, hvd.DistributedOptimizer(OPTIMIZERS["SGD"](again.parameters()), again.named_parameters()), 1)
    reference = make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 1)
    expect_equal(again, reference)


# Broadcast of parameters and state

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
    momenta = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
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
        after = [value for state in optimizer.state.values() for value in state.values()
                 if isinstance(value, torch.Tensor)]
        assert all(a is b for a, b in zip(momenta, after))


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

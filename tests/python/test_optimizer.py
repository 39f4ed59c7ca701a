"""DistributedOptimizer: training on ranks equals training in one process on all their data, in all ways. Errors."""
import copy
import warnings

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, SAMPLES, data, expect_equal, loss_of, make_model, my_loss, train, train_alone

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", (2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_on_one_rank():
    ranks.run_checks(__file__, 1, only="equals_one_process")


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
@pytest.mark.parametrize("kind, options", [("SGD", options) for options in OPTIONS] +
                         [(kind, options) for kind in ("Adam", "AdamW") for options in ("default", "two groups")])
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
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), backward_passes_per_step=3,
                                         groups=groups)
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
    resumed = copy.deepcopy(model)
    again = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](resumed.parameters()))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.025
    train_alone(reference, plain, 1)
    train(resumed, again, 1)
    expect_equal(resumed, reference)


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


def check_sparse_gradients_as_dense():
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


def check_process_set():
    model, reference = make_model(), make_model()
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
    hvd.remove_process_set(process_set)


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
            ({"gradient_predivide_factor": 2.0, "op": hvd.Adasum}, "gradient_predivide_factor"),
            ({"groups": -1}, "groups"),
            ({"groups": parameters}, "groups"),
            ({"groups": [["a"]]}, "groups"),
            ({"groups": [parameters[:2], parameters[1:]]}, "once"),
            ({"groups": "two"}, "groups")):
        with pytest.raises(ValueError, match=text):
            wrap(**options)
    hvd.barrier()


def check_disagreement_in_step():
    model = make_model()
    extra = torch.ones(2 + hvd.rank(), requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), extra], lr=0.1),
                                         [*model.named_parameters(), ("extra", extra)])
    (my_loss(model, 0) + extra.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"'extra(\.\d+)?'.*ranks disagree on shape: rank 0 has"):
        optimizer.step()
    again = make_model()
    train(again, hvd.DistributedOptimizer(OPTIMIZERS["SGD"](again.parameters()), again.named_parameters()), 1)
    reference = make_model()
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 1)
    expect_equal(again, reference)


def check_first_of_several_errors_in_step():
    """The others are waited for: afterwards no name is in flight."""
    def step(sizes):
        parameters = [torch.ones(size, requires_grad=True) for size in sizes]
        names = [(f"several.{i}", p) for i, p in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), names)
        optimizer.step()  # sends zeros, the last parameter first
        return parameters

    with pytest.raises(hvd.HorovodInternalError, match="'several.3'.*ranks disagree on shape"):
        step([2, 2 + hvd.rank(), 2, 2 + hvd.rank(), 2])
    for p in step([2, 2, 2, 2, 2]):
        assert (p.grad == 0).all()


def check_dtypes_and_a_parameter_that_is_empty():
    shapes = {torch.float64: (3,), torch.float32: (2, 2), torch.bfloat16: (4,), torch.float16: (0,)}
    parameters = [torch.ones(shape, dtype=dtype, requires_grad=True) for dtype, shape in shapes.items()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        sum((p.double() * (1 + step)).sum() for p in parameters).backward()
        optimizer.synchronize()
        for p in parameters:
            assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
            assert (p.grad == hvd.size() * (1 + step)).all()
        with optimizer.skip_synchronize():
            optimizer.step()

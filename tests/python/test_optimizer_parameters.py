"""DistributedOptimizer with parameters and gradients of every kind: dtypes, shapes, layouts, shared, frozen and
replaced ones, and such as get their gradient in unusual ways."""
import copy
import warnings

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import data, expect_equal, loss_of, make_model, my_loss, sgd, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def expect_mean_gradients(make, loss, steps=2, **options):
    """The gradients of loss(module, rank, step), reduced, are their mean over the ranks; for any number of steps."""
    module, reference = make(), make()
    optimizer = hvd.DistributedOptimizer(sgd(module), module.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss(module, hvd.rank(), step).backward()
        optimizer.synchronize()
        reference.zero_grad()
        for rank in range(hvd.size()):
            (loss(reference, rank, step) / hvd.size()).backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters()):
            if p.requires_grad and hvd.size() == 1:  # a plain optimizer
                assert (p.grad is None) == (q.grad is None)
            elif p.requires_grad:
                expected = torch.zeros_like(q) if q.grad is None else q.grad
                assert (p.grad.dtype, p.grad.shape) == (p.dtype, p.shape), name
                torch.testing.assert_close(p.grad, expected, rtol=1e-2 if p.element_size() < 4 else 1e-5, atol=1e-6)
            else:
                assert p.grad is None, name
    return module, optimizer


class Values(torch.nn.Module):
    """Parameters as they are given."""

    def __init__(self, *tensors):
        super().__init__()
        self.values = torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in tensors)

    def forward(self, scale):
        return sum((p.double() * p.double()).sum() * scale * (1 + i) for i, p in enumerate(self.values))


def check_dtypes_and_shapes():
    def make():
        torch.manual_seed(7)
        return Values(*(torch.rand(shape).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32,
                                                                  torch.float64)
                        for shape in ((), (0,), (1,), (3, 4), (0, 5), (2, 1, 3))))

    for options in ({}, {"groups": 1}, {"groups": 5}):
        module, _ = expect_mean_gradients(make, lambda module, rank, step: module(1.0 + rank + step), **options)
        assert len(list(module.parameters())) == 24


def check_layouts():
    def make():
        torch.manual_seed(7)
        return Values(torch.rand(3, 4).t(), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
                      torch.rand(4, 6)[:, ::2], torch.rand(1).expand(3).clone(), torch.rand(4, 2)[1:3],
                      torch.rand(2, 2, 2, 2, 2).to(memory_format=torch.channels_last_3d))

    for options in ({}, {"groups": 1}, {"compression": hvd.Compression.none}):
        module, optimizer = expect_mean_gradients(make, lambda module, rank, step: module(1.0 + rank + step), **options)
        with optimizer.skip_synchronize():
            optimizer.step()


def check_parameters_of_integers_are_left_alone():
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.nn.Parameter(torch.tensor([1, 3]), requires_grad=False)
            self.weights = torch.nn.Parameter(torch.arange(4.0))

        def forward(self, x):
            return self.weights[self.rows] * x

    expect_mean_gradients(Chosen, lambda module, rank, step: module(1.0 + rank).sum())


def check_complex_parameters_are_refused():
    for place in ("backward", "step"):
        parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("phases", parameter)])
        if hvd.size() > 1:
            with pytest.raises(ValueError, match="phases.*complex64"):
                (parameter * parameter.conj()).real.sum().backward() if place == "backward" else optimizer.step()
    hvd.barrier()


def check_shared_parameters():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(8)
            self.words = torch.nn.Embedding(5, 3)
            self.out = torch.nn.Linear(3, 5, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x))

    module, optimizer = expect_mean_gradients(
        Tied, lambda module, rank, step: module(torch.tensor([rank % 5, step])).square().sum())
    assert len(optimizer.param_groups[0]["params"]) == 1
    twice = list(Tied().named_parameters(remove_duplicate=False))
    assert len(twice) == 2
    hvd.DistributedOptimizer(torch.optim.SGD([twice[0][1]], lr=0.1), twice)


def check_unused_parameters_on_some_ranks():
    class Choice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(9)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

    def loss(module, rank, step):
        return module.layers[(rank + step) % 2](torch.ones(2, 3)).square().sum()  # the third is nobody's

    for options in ({}, {"groups": 2}, {"groups": 1}):
        module, _ = expect_mean_gradients(Choice, loss, 3, **options)
        assert hvd.size() == 1 or (module.layers[2].weight.grad == 0).all()


def check_freezing_and_unfreezing():
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(reference)
    for frozen in ((), (0, 2), (4,), (0, 2, 4), ()):
        for m in (model, reference):
            for i in (0, 2, 4):
                m[i].requires_grad_(i not in frozen)
        if len(frozen) < 3:
            train(model, optimizer, 1)
            train_alone(reference, plain, 1)
        else:
            optimizer.zero_grad()
            plain.zero_grad()
            optimizer.step()
        assert all(p.grad is None for i in frozen for p in model[i].parameters())
    expect_equal(model, reference)


def check_a_parameter_frozen_on_one_rank():
    """It adds zeros to what the others make of it, and stays as it is there."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Sum)
    train(model, optimizer, 1)
    last = hvd.rank() == hvd.size() - 1
    for p in model[2].parameters():
        p.requires_grad_(not last)
    before = model[2].weight.detach().clone()
    optimizer.zero_grad()
    alone = copy.deepcopy(model)
    my_loss(alone, 1).backward()
    my_loss(model, 1).backward()
    optimizer.step()
    assert torch.equal(model[2].weight, before) == last
    for p, q in zip(model[2].parameters(), alone[2].parameters()):
        total = hvd.allreduce(torch.zeros_like(q) if last else q.grad, op=hvd.Sum)
        assert p.grad is None if last else torch.allclose(p.grad, total)


def check_groups_of_parameters_added_later():
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[:1].parameters(), lr=0.1), groups=1)
    plain = torch.optim.SGD(reference[:1].parameters(), lr=0.1)
    for part in (2, 4):
        for m, o in ((model, optimizer), (reference, plain)):
            m.zero_grad()
            o.add_param_group({"params": list(m[part].parameters()), "lr": 0.01 * part})
        train(model, optimizer, 2)
        train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_parameters_that_get_other_data():
    """Another dtype or shape is followed; what is changed in place is used."""
    for convert in (lambda p: p.mul_(0.5), lambda p: p.clone() * 0.5, lambda p: p.double(), lambda p: p.bfloat16(),
                    lambda p: torch.cat([p, p]), lambda p: p[:, :2].clone(), lambda p: p.t().contiguous().t()):
        for options in ({}, {"groups": 1}, {"compression": hvd.Compression.bf16}):
            parameters = [torch.nn.Parameter(torch.full((2, 3), 2.0)) for _ in range(3)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), **options)
            for step in range(4):
                if step == 2:
                    with torch.no_grad():
                        parameters[1].data = convert(parameters[1].data)
                        parameters[2].data = convert(parameters[2].data)
                optimizer.zero_grad()
                used = parameters[:2] if step < 3 else parameters
                sum((p * p).sum() * (1.0 + hvd.rank()) for p in used).backward()
                optimizer.step()
                for p in parameters:
                    if hvd.size() > 1 or p.grad is not None:
                        assert (p.grad.dtype, p.grad.shape) == (p.dtype, p.shape)
                for p in used:
                    mean = (1 + hvd.size()) / 2
                    torch.testing.assert_close(p.grad, 2 * p.detach() * mean, rtol=1e-2, atol=0)


def check_precision_of_parameters_that_became_doubles():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
    for dtype, value in ((torch.float32, 1.0), (torch.float64, 1.0 + 1e-12)):
        parameter.data = parameter.data.to(dtype)
        optimizer.zero_grad()
        (parameter * value).sum().backward()
        optimizer.step()
    assert (parameter.grad == value).all()


class InFloat32(torch.autograd.Function):
    """Has a float32 gradient, whatever its input is."""

    @staticmethod
    def forward(ctx, x):
        return x.float()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Doubled:
    """A user's compressor."""

    @staticmethod
    def compress(tensor):
        return tensor * 2, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor / 2


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has gradients of one dtype alone")
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"compression": Doubled}], ids=["plain", "group", "own"])
def check_gradients_of_another_dtype_than_their_parameters(options):
    """Float32 gradients of bfloat16 parameters; one parameter has none but on one rank."""
    everywhere, on_one = parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    for p in parameters:
        p.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), op=hvd.Sum, **options)
    value = 1 + 2.0 ** -20
    for _ in range(2):
        optimizer.zero_grad()
        loss = InFloat32.apply(everywhere).mul(value).sum()
        if hvd.rank() == 0:
            loss = loss + InFloat32.apply(on_one).mul(value).sum()
        loss.backward()
        optimizer.synchronize()
        assert on_one.grad.dtype == everywhere.grad.dtype == torch.float32
        assert on_one.grad.tolist() == [value] * 3
        torch.testing.assert_close(everywhere.grad, torch.full((3,), value * hvd.size()), rtol=1e-7, atol=0)


def check_gradients_set_to_none_and_replaced():
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    for step in range(2):
        for m, o, loss in ((model, optimizer, lambda: my_loss(model, step)),
                           (reference, plain, lambda: loss_of(reference, *data(step)))):
            for p in m.parameters():
                p.grad = None
            loss().backward()
            if o is optimizer:
                o.synchronize()
            m[0].weight.grad = None
            m[2].bias.grad = torch.ones(6)
            if o is optimizer:
                with o.skip_synchronize():
                    o.step()
            else:
                o.step()
    expect_equal(model, reference)


def check_retained_graphs_and_second_derivatives():
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
    plain = sgd(reference)
    for o, loss in ((optimizer, my_loss(model, 0)), (plain, loss_of(reference, *data(0)))):
        loss.backward(retain_graph=True)
        loss.backward()
        o.step()
    expect_equal(model, reference)
    x, y = data(1)
    optimizer.set_backward_passes_per_step(1)
    for m, o, rows in ((model, optimizer, slice(hvd.rank(), None, hvd.size())), (reference, plain, slice(None))):
        o.zero_grad()
        inputs = x[rows].clone().requires_grad_()
        loss = torch.nn.functional.mse_loss(m(inputs), y[rows])
        (slope,) = torch.autograd.grad(loss * len(inputs), inputs, create_graph=True)
        (slope.square().sum(1).mean() + loss).backward()  # a gradient penalty
        o.step()
    expect_equal(model, reference)


def check_parts_without_gradients_and_inference():
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    for step in range(3):
        with torch.no_grad():
            my_loss(model, step)
        with torch.inference_mode():
            assert not my_loss(model, step).requires_grad
        train(model, optimizer, 1)
        train_alone(reference, plain, 1)
        with torch.no_grad():
            for m in (model, reference):
                m[0].weight.clamp_(-0.3, 0.3)
    expect_equal(model, reference)


@pytest.mark.parametrize("reentrant", [True, False])
def check_checkpointed_activations(reentrant):
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    x, y = data(0)
    rows = slice(hvd.rank(), None, hvd.size())
    for _ in range(2):
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(model[:3], x[rows].clone().requires_grad_(), use_reentrant=reentrant)
        torch.nn.functional.mse_loss(model[3:](hidden), y[rows]).backward()
        optimizer.step()
        train_alone(reference, plain, 1)
    expect_equal(model, reference)


def check_mixed_precision():
    """torch.autocast: activations in bfloat16, parameters and gradients in float32."""
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = my_loss(model, step)
        loss.backward()
        optimizer.step()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        plain.zero_grad()
        loss_of(reference, *data(step)).backward()
        plain.step()
    expect_equal(model, reference, rtol=0, atol=2e-2)


def check_models_that_are_copied_and_averaged():
    """What stays from torch's own tools: a deep copy of a wrapped model is plain, averaged weights follow."""
    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (model, reference)]
    for _ in range(2):
        train(model, optimizer, 1)
        train_alone(reference, plain, 1)
        for average, m in zip(averages, (model, reference)):
            average.update_parameters(m)
    expect_equal(averages[0], averages[1])
    alone = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        my_loss(alone, hvd.rank()).backward()  # nothing is sent
    hvd.barrier()

"""Gradients in the memory that ranks share: any layout, saved and read at any time, copied once."""
import copy
import gc
import io
import warnings
import weakref

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.core import lib, request
from training import OPTIMIZERS, data, expect_equal, loss_of, make_model, my_loss, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


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
    with pytest.raises(hvd.HorovodInternalError, match=r"'weight(\.\d+)?'.*ranks disagree on shape"):
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


def check_gradients_move_into_their_slots_in_backward():
    """Their own memory is given back at once, and who holds p.grad already sees the reduced values."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    my_loss(model, 0).backward()
    held = grads_of(model)
    addresses = [grad.data_ptr() for grad in held]
    optimizer.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held))
    expect_close(held, mean_gradients(0))
    for step in (1, 2):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        assert [grad.data_ptr() for grad in grads_of(model)] == addresses
        optimizer.step()
        expect_close(grads_of(model), mean_gradients(step))


class Halved:
    """A user's compressor, which decompresses in the memory that it is given."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.mul_(2)


def check_an_expanded_gradient_of_the_program_is_replaced():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.tensor([2.0]).expand(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for step in (1, 2):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        assert parameter.grad.tolist() == [2, 2, 2] and parameter.tolist() == [-2 * step] * 3


def flat_gradients(parameters):
    """One buffer for all gradients."""
    parameters = list(parameters)
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)
    return flat


OF_PARTS = {"plain": {}, "group": {"groups": 1}, "fp16": {"compression": hvd.Compression.fp16},
            "own compressor": {"compression": Halved}, "passes": {"backward_passes_per_step": 2}}


@pytest.mark.parametrize("options", OF_PARTS)
@pytest.mark.parametrize("wide", [3, 20000], ids=["small", "large"])
def check_gradients_that_are_parts_of_a_buffer_stay_there(options, wide):
    model = torch.nn.Linear(wide, 2)
    flat = flat_gradients(model.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **OF_PARTS[options])
    passes = OF_PARTS[options].get("backward_passes_per_step", 1)
    for _ in range(3):
        flat.zero_()  # what the program does with the buffer
        for _ in range(passes):
            model(torch.full((1, wide), hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        mean = passes * (hvd.size() + 1) / 2
        expect_close(flat.split([2 * wide, 2]), [torch.full((2 * wide,), mean), torch.full((2,), 1.0 * passes)])
        before = model.weight.detach().clone()
        flat.mul_(0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(model.weight, before - mean / 2)


def check_two_optimizers_over_parts_of_one_buffer():
    """That the one's gradients come back into it is no change of the other's, which are on their way."""
    model = make_model()
    flat = flat_gradients(model.parameters())
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0),
                                           [(f"{i}.{name}", p) for name, p in layer.named_parameters()])
                  for i, layer in enumerate(model) if list(layer.parameters())]
    for step in range(2):
        flat.zero_()
        my_loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(flat, torch.cat([grad.flatten() for grad in mean_gradients(step)]))


@pytest.mark.parametrize("again", ["before the step", "before the next step", "before the next backward"])
def check_shutdown_between_backward_and_step(again):
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()))
    plain = OPTIMIZERS["SGD"](reference.parameters())
    train(model, optimizer, 1)
    train_alone(reference, plain, 1)
    optimizer.zero_grad()
    my_loss(model, 5).backward()
    hvd.barrier()
    hvd.shutdown()
    if again == "before the step":
        hvd.init()
    if again != "before the next backward":
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            optimizer.step()
    hvd.init()
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_model_and_optimizer_are_freed():
    for steps in (0, 2):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, steps)
        last = weakref.ref(model[0].weight), weakref.ref(optimizer), weakref.ref(optimizer._reducer)
        weight = model[4].weight
        del model, optimizer
        gc.collect()
        assert [reference() for reference in last] == [None] * 3
        weight.grad = None
        weight.sum().backward()
        assert (weight.grad == 1).all()


def check_optimizer_that_is_gone_with_gradients_in_flight():
    """What the core still reads and writes stays until it is done."""
    before = set(request._pending)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    my_loss(model, 0).backward()
    count = len(grads_of(model))
    del model, optimizer
    gc.collect()
    left = set(request._pending) - before
    assert len(left) == count
    for handle in left:
        hvd.synchronize(handle)
    model, reference = make_model(), make_model()
    train(model, hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters())), 2)
    train_alone(reference, OPTIMIZERS["SGD"](reference.parameters()), 2)
    expect_equal(model, reference)


def check_collectives_and_bytes_copied_per_step():
    """Gradients that are ready together travel together, from where they lie: the core copies none of them."""
    steps = 20
    for groups in (1, None):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(30)])
        parameters = list(model.parameters())
        gradient_bytes = sum(4 * p.numel() for p in parameters)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), groups=groups)

        def train_some(steps, optimizer=optimizer, model=model):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
        train_some(3)
        before = lib.counters()
        train_some(steps)
        spent = {name: value - before[name] for name, value in lib.counters().items()}
        print(groups, spent)
        assert spent["collectives"] <= steps * (groups or len(parameters))
        if groups is None:
            assert spent["fused_requests"] > 0 and spent["announced"] == 0
        assert spent["copied_bytes"] <= gradient_bytes * steps
        assert gradient_bytes * steps <= spent["payload_bytes"] < 1.1 * gradient_bytes * steps

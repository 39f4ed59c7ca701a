"""Tensors that a program changes between the start of an operation and its end: an error on the rank that does it, the
end of the job on the others; and what may be changed all the same."""
import contextlib

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import data, expect_equal, loss_of, make_model, my_loss, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@contextlib.contextmanager
def last_of_its_world():
    """The job has ended in it, on all ranks: the others hear who has changed what."""
    yield
    with pytest.raises(hvd.HorovodInternalError, match="rank 0 has changed what it was sending") as told:
        hvd.barrier()
    assert "its own error says what to do" in str(told.value)
    hvd.shutdown()
    hvd.init()


def distributed(model, kind=torch.optim.SGD, **options):
    return hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters(), **options)


# Gradients

def replace(model):
    model[2].weight.grad = 2 * model[2].weight.grad


def take_away(model):
    model[2].weight.grad = None


def give_other_memory(model):
    model[2].weight.grad.data = 2 * model[2].weight.grad


CHANGES = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "mul_": lambda model: model[2].weight.grad.mul_(2),
    "a view's mul_": lambda model: model[2].weight.grad[0].mul_(2),
    "zero_": lambda model: model[2].weight.grad.zero_(),
    "module.zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 2.0),
    "replace": replace, "None": take_away, "data": give_other_memory,
}
OPTIONS = {"default": lambda model: {}, "fp16": lambda model: {"compression": hvd.Compression.fp16},
           "a group": lambda model: {"groups": 1}, "int8": lambda model: {"compression": hvd.Compression.int8()}}


@pytest.mark.parametrize("change, options", [*((change, "default") for change in CHANGES),
                                             *(("mul_", options) for options in list(OPTIONS)[1:]),
                                             ("replace", "fp16"), ("None", "a group")])
def check_a_gradient_on_its_way_is_changed(change, options):
    """On rank 0, which is told what to write."""
    model = make_model()
    optimizer = distributed(model, **OPTIONS[options](model))
    train(model, optimizer, 1)
    optimizer.zero_grad()
    my_loss(model, 1).backward()
    with last_of_its_world():
        if hvd.rank() == 0:
            with torch.no_grad():
                CHANGES[change](model)
            with pytest.raises(RuntimeError, match=r"(?s)2\.weight.*changed on rank 0.*optimizer\.synchronize\(\)\n"
                               r".*clip_grad_norm_.*\n *with optimizer\.skip_synchronize\(\): optimizer\.step\(\)\n"):
                optimizer.step()


def check_a_sparse_gradient_on_its_way_is_changed():
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = distributed(model)
    for step in range(2):  # in the first the form is settled, so that the second sends at once
        model(torch.tensor([hvd.rank()])).sum().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with last_of_its_world():
        if hvd.rank() == 0:
            model.weight.grad._values().mul_(2)
            with pytest.raises(RuntimeError, match="weight was changed on rank 0"):
                optimizer.step()


def check_a_gradient_is_clipped_beside_grad_scaler():
    model = make_model()
    optimizer, scaler = distributed(model), torch.amp.GradScaler("cpu")
    train(model, optimizer, 1)
    scaler.scale(my_loss(model, 0)).backward()
    with last_of_its_world():
        if hvd.rank() == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(RuntimeError, match=r"(?s)scaler\.unscale_\(optimizer\).*GradScaler.*clip_grad_norm_.*"
                               r"with optimizer\.skip_synchronize\(\): scaler\.step\(optimizer\)"):
                scaler.step(optimizer)


def check_one_of_joined_weights_is_changed():
    """Their gradients share a count, with which backward goes on."""
    model, optimizer = joined()
    for step in range(2):  # in the first the form is settled, for which both ranks must come
        joined_loss(model).backward()
        joined_loss(model).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with last_of_its_world():
        if hvd.rank() == 0:
            model[0].grad.mul_(2)
            with pytest.raises(RuntimeError, match="p.grad of [01], [01] was changed on rank 0"):
                optimizer.step()


def joined():
    model = torch.nn.ParameterList([torch.ones(3), torch.ones(3)])
    return model, distributed(model, backward_passes_per_step=2)


def joined_loss(model):
    return torch.cat(list(model)).square().sum()


# No change

def check_weights_that_forward_has_joined():
    model, optimizer = joined()
    for set_to_none in (True, False):
        joined_loss(model).backward()
        joined_loss(model).backward()
        assert model[0].grad._version == model[1].grad._version
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert (model[0] == model[1]).all()


def check_gradients_that_are_views_of_one_tensor():
    model, reference = make_model(), make_model()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad = part.view_as(p)
    train(model, distributed(model), 3, set_to_none=False)
    train_alone(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 3)
    expect_equal(model, reference)


def double(parameter):
    parameter.grad.mul_(2)


def check_a_hook_that_changes_gradients_first():
    model, reference = make_model(), make_model()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(double)
    train(model, distributed(model), 2)
    train_alone(reference, torch.optim.SGD(reference.parameters(), lr=0.2), 2)
    expect_equal(model, reference)


@pytest.mark.parametrize("options", OPTIONS)
def check_changes_after_synchronize(options):
    model = make_model()
    optimizer = distributed(model, **OPTIONS[options](model))
    for change in (*CHANGES.values(), lambda model: None):
        optimizer.zero_grad()
        my_loss(model, 0).backward()
        optimizer.synchronize()
        with torch.no_grad():
            change(model)
        with optimizer.skip_synchronize():
            optimizer.step()


def check_changes_after_the_handle_was_waited_for():
    model = make_model()
    optimizer = distributed(model)
    for _ in range(2):
        my_loss(model, 0).backward()
        for p, (handle, ctx) in optimizer._handles.items():
            p.grad.copy_(hvd.Compression.none.decompress(hvd.synchronize(handle), ctx))
        optimizer.step()
        optimizer.zero_grad()


def check_a_parameter_that_is_frozen_on_the_way():
    model = make_model()
    optimizer = distributed(model)
    my_loss(model, 0).backward()
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    optimizer.step()


def check_gradients_of_inference_mode():
    model = make_model()
    optimizer = distributed(model)
    with torch.inference_mode():
        grads = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad
    optimizer.step()


def check_adasum_sends_no_gradients():
    model = make_model()
    optimizer = distributed(model, op=hvd.Adasum)
    for change in (*CHANGES.values(), lambda model: None):
        my_loss(model, 0).backward()
        with torch.no_grad():
            change(model)
        optimizer.step()
        optimizer.zero_grad()


# GradScaler

@pytest.mark.parametrize("kind, options", [(torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True})],
                         ids=["SGD", "fused Adam"])
@pytest.mark.parametrize("recipe", ["plain", "unscale_", "synchronize"])
def check_grad_scaler(recipe, kind, options):
    """Without a warning. In one step the loss of one rank is infinite, and all leave it out."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1, **options))
    plain = kind(reference.parameters(), lr=0.1, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(4):
        for one, used, scaler in ((model, optimizer, scalers[0]), (reference, plain, scalers[1])):
            used.zero_grad()
            loss = my_loss(one, step) if used is optimizer else loss_of(one, *data(step))
            if step == 1 and (used is plain or hvd.rank() == 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            waits = contextlib.nullcontext()
            if recipe == "synchronize" and used is optimizer:
                optimizer.synchronize()
                waits = optimizer.skip_synchronize()
            if recipe != "plain":
                scaler.unscale_(used)
                torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            with waits:
                scaler.step(used)
            scaler.update()
    expect_equal(model, reference)
    assert scalers[0].get_scale() == scalers[1].get_scale()


# Operations with a handle

STARTS = {
    "allreduce_async": lambda x: hvd.allreduce_async(x, name="x"),
    "allreduce_async_": lambda x: hvd.allreduce_async_(x, name="x"),
    "grouped_allreduce_async": lambda x: hvd.grouped_allreduce_async([torch.ones(1), x], name="x"),
    "grouped_allreduce_async_": lambda x: hvd.grouped_allreduce_async_((torch.ones(1), x), name="x"),
    "allgather_async": lambda x: hvd.allgather_async(x, name="x"),
    "grouped_allgather_async": lambda x: hvd.grouped_allgather_async([torch.ones(1), x], name="x"),
    "broadcast_async": lambda x: hvd.broadcast_async(x, 0, name="x"),
    "broadcast_async_": lambda x: hvd.broadcast_async_(x, 0, name="x"),
    "alltoall_async": lambda x: hvd.alltoall_async(x, name="x"),
    "reducescatter_async": lambda x: hvd.reducescatter_async(x, name="x"),
    "grouped_reducescatter_async": lambda x: hvd.grouped_reducescatter_async([torch.ones(2), x], name="x"),
}


@pytest.mark.parametrize("start", STARTS)
def check_a_tensor_in_flight_is_changed(start):
    x = torch.ones(4)
    handle = STARTS[start](x)
    with last_of_its_world():
        if hvd.rank() == 0:
            x.mul_(2)
            operation = start.split("_async")[0].replace("_", " ")
            with pytest.raises(RuntimeError, match=f"{operation} of tensor 'x': the tensor was changed on rank 0"):
                hvd.synchronize(handle)


@pytest.mark.parametrize("start", STARTS)
def check_a_tensor_may_change_when_its_operation_is_polled_as_done(start):
    x = torch.ones(4)
    handle = STARTS[start](x)
    hvd.barrier()  # so it is done, or will be by itself
    while not hvd.poll(handle):
        hvd.barrier()
    x.mul_(2)
    hvd.synchronize(handle)


def check_tensors_without_a_count():
    """Of inference_mode, and NumPy's."""
    with torch.inference_mode():
        x = torch.ones(4)
        handle = hvd.allreduce_async_(x)
        hvd.synchronize(handle)
    array = x.clone().numpy()
    assert (hvd.synchronize(hvd.allreduce_async(array)) == 1).all()


def check_parameters_that_are_views_of_each_other_are_broadcast():
    whole = torch.full((2, 3), float(hvd.rank()))
    hvd.broadcast_parameters({"a": whole.t(), "b": whole}, root_rank=0)
    assert (whole == 0).all()

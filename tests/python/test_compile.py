"""torch.compile around DistributedOptimizer: each gradient is still sent when it is ready, and training is the same as
without compiling, whatever is compiled: the model, backward with it, or the whole step."""
import shutil

import pytest
import torch
import torch.distributed as dist

import lightcc.torch as hvd
import ranks
from lightcc.core import lib, ops, request
from lightcc.torch import ddp
from lightcc.torch.compiling import functions_of
from training import data, expect_equal, loss_of, make_model, my_loss, train_alone

STEPS = 3
BACKENDS = ("eager", "aot_eager")
ALL_BACKENDS = (*BACKENDS, *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else []))


@pytest.mark.parametrize("np", ranks.SIZES[:2])
def test_on_ranks(np):
    ranks.run_checks(__file__, np, deadline_s=400)


@pytest.fixture(autouse=True)
def afresh(job):
    torch._dynamo.reset()


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def reference():
    model = make_model()
    train_alone(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), STEPS)
    return model


def part(step):
    """This rank's inputs and targets."""
    x, y = data(step)
    rows = slice(len(x) // hvd.size() * hvd.rank(), len(x) // hvd.size() * (hvd.rank() + 1))
    return x[rows], y[rows]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def check_compiled_model(backend):
    model = make_model()
    compiled, optimizer = torch.compile(model, backend=backend), distributed(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        my_loss(compiled, step).backward()
        optimizer.step()
    expect_equal(model, reference())


@pytest.mark.parametrize("backend", BACKENDS)
def check_optimizer_before_compile(backend):
    """hvd wraps what torch.compile has made, whose names have a prefix."""
    model = make_model()
    compiled = torch.compile(model, backend=backend)
    optimizer = distributed(compiled)
    for step in range(STEPS):
        optimizer.zero_grad()
        my_loss(compiled, step).backward()
        optimizer.step()
    expect_equal(model, reference())


@pytest.mark.parametrize("backend, what", [*((backend, "zero_grad and step") for backend in ALL_BACKENDS),
                                           ("aot_eager", "step"), ("aot_eager", "closure")])
def check_compiled_step_function(backend, what):
    model = make_model()
    optimizer = distributed(model)

    def train_step(x, y):
        if what == "closure":
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss
            return optimizer.step(closure)
        if what == "zero_grad and step":
            optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = torch.compile(train_step, backend=backend)
    for step in range(STEPS):
        if what == "step":
            optimizer.zero_grad()
        before = lib.counters()["collectives"]
        loss = compiled(*part(step))
        assert loss.isfinite()
        assert hvd.size() == 1 or lib.counters()["collectives"] > before, "nothing was sent"
    expect_equal(model, reference())


@pytest.mark.parametrize("backend", BACKENDS)
def check_gradients_leave_while_backward_goes_on(backend):
    """Nothing is left to step(), as without compiling."""
    def sent_in_backward(model, network):
        optimizer = distributed(model)
        my_loss(network, 0).backward()
        sent = sum(gradient.sent for gradient in optimizer._gradients.values()) if hvd.size() > 1 else 0
        optimizer.step()
        return sent
    model, other = make_model(), make_model()
    sent = sent_in_backward(model, torch.compile(model, backend=backend))
    assert sent == sent_in_backward(other, other) == (len(list(model.parameters())) if hvd.size() > 1 else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def check_clipping_and_other_options(backend):
    """synchronize, skip_synchronize, groups, compression and several passes inside a compiled function."""
    model = make_model()
    optimizer = distributed(model, groups=2, compression=hvd.Compression.bf16, backward_passes_per_step=2)

    def train_step(x, y):
        for i in range(2):
            loss_of(model, x[i], y[i]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

    compiled = torch.compile(train_step, backend=backend)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [part(2 * step + i) for i in range(2)]
        compiled([x for x, _ in batches], [y for _, y in batches])
    every = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).unsqueeze(0))
    assert (every == every[0]).all()
    plain = make_model()
    train_alone(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), STEPS, passes=2,
                edit=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    expect_equal(model, plain, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def check_collectives_in_a_compiled_function(backend):
    def metric(x):
        return hvd.allreduce(x * 2, name="metric", op=hvd.Sum) + 1

    x = torch.ones(3, requires_grad=True)
    y = torch.compile(metric, backend=backend)(x)
    assert y.tolist() == [2.0 * hvd.size() + 1] * 3
    y.sum().backward()
    assert x.grad.tolist() == [2.0 * hvd.size()] * 3


def check_nothing_of_lightcc_is_compiled():
    model = make_model()
    optimizer = distributed(model)

    @torch.compile(backend="eager")
    def train_step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss")

    for step in range(STEPS):
        train_step(*part(step))
    compiled = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    for module in (hvd.mpi_ops, hvd.differentiable, hvd.gradient_reducer, hvd.optimizer, request, ops, lib):
        functions = list(functions_of(module))
        assert functions and not [f.__qualname__ for f in functions if compiled(f.__code__)]
    assert compiled(loss_of.__code__) or compiled(train_step.__wrapped__.__code__)  # but it is this that was compiled


@pytest.mark.parametrize("default", ("gloo", "lightcc"))
def check_distributed_data_parallel(default):
    """torch.compile knows DistributedDataParallel; its buckets go through the hook, or the group."""
    dist.init_process_group(default)
    model = make_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if default == "gloo":
        wrapped.register_comm_hook(None, ddp.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="aot_eager")
    def train_step(x, y):
        optimizer.zero_grad()
        loss_of(wrapped, x, y).backward()
        optimizer.step()

    for step in range(STEPS):
        train_step(*part(step))
    expect_equal(model, reference())
    dist.destroy_process_group()


def check_compiled_autograd():
    model = make_model()
    optimizer = distributed(model)

    def train_step(x, y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(train_step, backend="aot_eager")
        for step in range(STEPS):
            compiled(*part(step))
    expect_equal(model, reference())

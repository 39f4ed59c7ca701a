"""torch.compile around a DistributedOptimizer with parameters on a real GPU: the steps are those of a model on the CPU
that is not compiled. Every rank runs it, as check_collectives.py."""
import shutil

import pytest
import torch
from check_training import TOLERANCE, new_model, trained

import lightcc.torch as hvd

BACKENDS = ("eager", "aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else []))


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


def trained_compiled(device, backend, what, steps=6):
    """check_training.trained, where `what` is compiled: the model, or the step with the optimizer in it."""
    model = new_model(f"cuda:{device}")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                                         named_parameters=model.named_parameters())
    forward = torch.compile(model, backend=backend) if what == "model" else model

    def step(x):
        forward(x).square().mean().backward()
        optimizer.step()
    if what == "step":
        step = torch.compile(step, backend=backend)
    generator = torch.Generator().manual_seed(hvd.rank())
    for number in range(steps):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        step(torch.randn(5, 6, generator=generator).to(f"cuda:{device}"))
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("what", ["model", "step"])
@pytest.mark.parametrize("backend", BACKENDS)
def check_compiled_training_is_that_on_the_cpu(device, backend, what):
    torch.testing.assert_close(trained_compiled(device, backend, what), trained("cpu"), **TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def check_collectives_in_a_compiled_function(device, backend):
    @torch.compile(backend=backend)
    def metric(x):
        return hvd.allreduce(x * 2, op=hvd.Sum, name="metric") + 1
    x = torch.full((1000,), hvd.rank() + 1.0, device=f"cuda:{device}")
    for _ in range(3):
        assert (metric(x) == hvd.size() * (hvd.size() + 1) + 1).all()

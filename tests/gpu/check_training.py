"""DistributedOptimizer with parameters on a real GPU: the steps are those on the CPU. Every rank runs it, as
check_collectives.py."""
import pytest
import torch

import lightcc.torch as hvd

# Sums of the GPU's matrix products are made in another order than the CPU's.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
OPTIONS = {"plain": {}, "groups": {"groups": 2}, "factors": {"gradient_predivide_factor": 2.0},
           "two passes": {"backward_passes_per_step": 2}, "fp16": {"compression": hvd.Compression.fp16},
           "adasum": {"op": hvd.Adasum}}


def new_model(place):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2)).to(place)


def trained(place, steps=6, **options):
    """The parameters after training."""
    model = new_model(place)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                                         named_parameters=model.named_parameters(), **options)
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(options.get("backward_passes_per_step", 1)):
            model(torch.randn(5, 6, generator=generator).to(place)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def gradients_are_exchanged(monkeypatch, job):
    """By a single rank too: without this its optimizer is a plain one."""
    if hvd.size() == 1:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.parametrize("stream", ["default", "another"])
@pytest.mark.parametrize("options", OPTIONS)
def check_training_is_that_on_the_cpu(double, device, options, stream):
    expected = trained("cpu", **OPTIONS[options])
    with double.on(device, double.new_stream(device) if stream == "another" else 0):
        found = trained(f"cuda:{device}", **OPTIONS[options])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    start = [parameter.detach() for parameter in new_model("cpu").parameters()]
    assert any((x - y).abs().max() > 0.01 for x, y in zip(found, start)), "something was learned"


def check_state_comes_from_the_root(device):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(7, 3).to(f"cuda:{device}")
    plain = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    model(torch.ones(2, 7, device=f"cuda:{device}")).sum().backward()
    plain.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    state = [*model.parameters(), *(value for one in plain.state.values() for value in one.values())]
    for tensor in state:
        mine = tensor.detach().double().cpu().flatten()
        every = hvd.allgather(mine[None])
        assert (every == every[0]).all()
    assert plain.param_groups[0]["lr"] == 0.1
    assert all(p.is_cuda for p in model.parameters())

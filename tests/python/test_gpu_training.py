"""DistributedOptimizer with parameters on a GPU: the double's, whose memory torch's CPU operations use.

Such an operation is done when it returns, and so the stream of a program is here the host itself: it must wait before
it uses what lightcc has written, where a GPU's stream would only be ordered.
"""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import contextlib

import gpu_frameworks
import numpy as np
import pytest
from gpu_fixtures import KINDS, device, double, job, no_faults  # noqa: F401

import ranks
from lightcc.core.adapter import MixedDevicesError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch_sizes,
              pytest.mark.skipif("torch" not in KINDS, reason="torch is not among the frameworks")]


@pytest.mark.parametrize("np", {3}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture
def on_gpu(monkeypatch, double, device):
    """Makes a tensor of the GPU like one of the CPU; optimizers take such parameters for CUDA tensors."""
    from lightcc.torch import slot_stream, slots

    class HostStream(slot_stream.SlotStream):
        followed = 0
        current = True

        def __init__(self, slot):
            self.place = slot_stream.adapter_of(slot).describe(slot.detach().as_strided((1,), (1,)))[3]

        def is_current(self):
            return self.current

        def follow(self):
            HostStream.followed += 1

        def lead(self):
            double.read(device, 0, np.empty(0))

    monkeypatch.setattr(slots, "device_of", lambda tensor: tensor.device if gpu_frameworks.memory_of(tensor) is None
                        else torch.device("cuda", device))
    monkeypatch.setattr(slots, "new_slab", lambda count, _: gpu_frameworks.new_tensor(
        torch, double, device, (count,), torch.uint8))
    monkeypatch.setattr(slot_stream, "SlotStream", HostStream)

    def make(tensor):
        if gpu_frameworks.memory_of(tensor) is not None:
            return tensor
        made = gpu_frameworks.new_tensor(torch, double, device, tensor.shape, tensor.dtype)
        double.read(device, 0, np.empty(0))  # the stream may still read what was there before
        made = made.as_strided(tensor.shape, tensor.stride()).data  # a tensor of its own, as autograd makes them
        made.copy_(tensor.detach())
        return made

    make.stream = HostStream
    return make


def trained(hvd, on_gpu=None, steps=4, wrap="DistributedOptimizer", **options):
    """The parameters after training, as lists; on_gpu: where they are."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2))
    if on_gpu is not None:
        for parameter in model.parameters():
            parameter.data = on_gpu(parameter)
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", on_gpu(p.grad)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = getattr(hvd, wrap)(optimizer, named_parameters=model.named_parameters(), **options)
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}],
                         ids=["plain", "groups", "factors"])
@pytest.mark.parametrize("current", [True, False], ids=["stream of the slots", "another stream"])
def check_training_is_that_on_the_cpu(job, on_gpu, options, current):
    import lightcc.torch as hvd
    expected = trained(hvd, **options)
    on_gpu.stream.current = current
    found = trained(hvd, on_gpu, **options)
    for mine, cpu in zip(found, expected):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(cpu))
    if not current:
        assert on_gpu.stream.followed >= 4 * 4, "each gradient of each step"
    elif "groups" not in options:
        assert on_gpu.stream.followed == 0, "gradients are copied together, by the stream that makes them"


@pytest.mark.parametrize("options", [{"wrap": "DelayedGradients"},
                                     {"wrap": "DelayedGradients", "delay": 2, "compensation": 0.5},
                                     {"wrap": "LocalSGD", "sync_every": 2},
                                     {"wrap": "LocalSGD", "sync_every": 3, "delay": 1}], ids=str)
def check_training_with_fewer_exchanges_is_that_on_the_cpu(job, on_gpu, options):
    import lightcc.torch as hvd
    on_gpu.stream.current = False
    for mine, cpu in zip(trained(hvd, on_gpu, 6, **options), trained(hvd, None, 6, **options)):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(cpu))
    assert on_gpu.stream.followed > 0


LAYOUTS = {
    "plain": lambda on_gpu, values: on_gpu(values),
    "of one column": lambda on_gpu, values: on_gpu(values).view(5, 1, 3).as_strided((5, 1, 3), (3, 7, 1)),
    "transposed": lambda on_gpu, values: on_gpu(values.t().contiguous().t()),
    "expanded": lambda on_gpu, values: on_gpu(values[0]).expand(5, 3),
    "negative": lambda on_gpu, values: on_gpu(values)._neg_view(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def check_a_gradient_of_any_layout_reaches_its_slot(job, on_gpu, layout):
    import lightcc.torch as hvd
    values = torch.arange(1.0, 16).view(5, 3)
    grad = LAYOUTS[layout](on_gpu, values).data  # a tensor of its own, as autograd makes them
    expected = grad.tolist()
    parameter = torch.nn.Parameter(on_gpu(torch.zeros(grad.shape)))
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", grad))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), named_parameters=[("p", parameter)])
    parameter.sum().backward()
    gradient, = optimizer._reducer.gradients
    assert gradient.copied_late and gradient.sent
    optimizer.step()
    assert parameter.grad.data_ptr() == gradient.address
    assert parameter.grad.tolist() == expected
    assert (gradient.layout is not None) == (layout in ("plain", "of one column"))


def check_a_model_that_moves_gets_other_slots(job, on_gpu):
    import lightcc.torch as hvd
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), named_parameters=[("p", parameter)])
    for place in (lambda x: x, on_gpu, lambda x: x):
        parameter.data = place(torch.ones(3))
        parameter.grad = None
        (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert parameter.tolist() == [1 - (hvd.size() + 1) / 2] * 3
        slot, = (gradient.slot for gradient in optimizer._reducer.gradients)
        assert (gpu_frameworks.memory_of(slot) is None) == (place is not on_gpu)


def check_one_optimizer_has_one_device(job, on_gpu):
    import lightcc.torch as hvd
    here, there = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(on_gpu(torch.ones(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([here, there], lr=1.0),
                                         named_parameters=[("here", here), ("there", there)])
    with pytest.raises(MixedDevicesError, match="must be on one device; here are .*here on cpu.*there on cuda:"):
        (here + there).sum().backward()
    optimizer.zero_grad()


class Stream:
    """What lightcc uses of torch.cuda.Stream: its number, and which streams it waits for."""

    def __init__(self, number):
        self.cuda_stream, self.waits = number, []

    def wait_stream(self, other):
        self.waits.append(other)


def check_streams_are_ordered_around_a_request(job, on_gpu, monkeypatch):
    from lightcc.torch import slot_stream
    stream, other = Stream(1), Stream(2)
    current = [stream]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(slot_stream, "_current_stream", lambda index: current[0].cuda_stream)
    monkeypatch.setattr(slot_stream, "SlotStream", on_gpu.stream.__bases__[0])
    entered = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(entered.append(stream)))
    slots_stream = slot_stream.stream_of(on_gpu(torch.ones(2, 2)))
    with slots_stream.as_current():
        assert slots_stream.is_current() and not entered
    slots_stream.follow()
    slots_stream.lead()
    assert stream.waits == other.waits == []
    current[0] = other
    slots_stream.follow()
    assert (stream.waits, other.waits) == ([other], [])
    slots_stream.lead()
    assert (stream.waits, other.waits) == ([other], [stream])
    with slots_stream.as_current():
        assert entered == [stream]


def check_state_is_received_where_the_parameter_is(job):
    from lightcc.torch import functions
    parameter = torch.ones(2, device="meta")
    root = {"options": [{"lr": 1.0}], "state": {0: {"step": functions._Tensor((), (), torch.float32, True),
                                                    "momentum": functions._Tensor((2,), (1,), torch.float32, False)}}}
    mine = {"options": [], "state": {0: {"momentum": torch.ones(2)}}}
    state = functions._received_into(root, mine, [parameter])["state"][0]
    assert (state["step"].device.type, state["momentum"].device.type) == ("cpu", "meta")

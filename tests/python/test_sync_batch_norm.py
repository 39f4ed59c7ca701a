"""SyncBatchNorm: on ranks it is torch.nn.BatchNorm on the batches of all ranks, one after the other."""
import copy
import itertools
import random

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.torch import batch_norm_kernels, sync_batch_norm

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


CHANNELS = 3
SHAPES = {"2D": (), "3D": (5,), "4D": (3, 2), "5D": (2, 3, 2), "channels last": (3, 2)}
LAYERS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
ROWS = {"even": lambda rank: 4, "uneven": lambda rank: 2 + 3 * rank, "none on rank 0": lambda rank: 4 if rank else 0,
        "only on the last": lambda rank: 5 if rank == hvd.size() - 1 else 0, "one": lambda rank: 1}
OPTIONS = {"default": {}, "no affine": {"affine": False}, "cumulative": {"momentum": None},
           "no running statistics": {"track_running_stats": False}, "eps and momentum": {"eps": 0.1, "momentum": 0.3}}


def batch(rank, step, form, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(97 * rank + step)
    x = torch.randn((rows(rank), CHANNELS, *SHAPES[form]), generator=generator, dtype=torch.float64)
    x = ((1.0 + rank) * x + torch.arange(CHANNELS).view(1, -1, *[1] * len(SHAPES[form])) - rank).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if form == "channels last" else x


def mine_of(whole, rows):
    first = sum(rows(rank) for rank in range(hvd.rank()))
    return whole[first:first + rows(hvd.rank())]


def make(form, dtype=torch.float64, **options):
    """The layer and its reference, with parameters that are not just ones and zeros."""
    reference = LAYERS[2 + len(SHAPES[form])](CHANNELS, **options).to(dtype)
    layer = hvd.SyncBatchNorm(CHANNELS, **options).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(reference.parameters()):
            p.copy_(torch.linspace(0.5 + i, 2.0, CHANNELS))
    layer.load_state_dict(reference.state_dict())
    return layer, reference


def one_step(layer, reference, step, form, rows, dtype=torch.float64, tolerance=None):
    """Forward and backward on both, compared."""
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-9}
    every = [batch(rank, step, form, rows, dtype) for rank in range(hvd.size())]
    whole = torch.cat(every).requires_grad_()
    x = every[hvd.rank()].clone().requires_grad_()
    y, expected = layer(x), reference(whole)
    assert y.dtype == x.dtype and y.shape == x.shape
    assert form != "channels last" or not x.numel() or y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, mine_of(expected, rows), **tolerance)
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
    (expected.square() * weight).sum().backward()
    (y.square() * mine_of(weight, rows)).sum().backward()
    torch.testing.assert_close(x.grad, mine_of(whole.grad, rows), **tolerance)
    for (name, p), q in zip(layer.named_parameters(), reference.parameters()):
        torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad, **tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")
    expect_same_buffers(layer, reference, tolerance)


def expect_same_buffers(layer, reference, tolerance):
    assert set(layer.state_dict()) == set(reference.state_dict())
    for (name, buffer), q in zip(layer.named_buffers(), reference.buffers()):
        torch.testing.assert_close(buffer, q, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        every = hvd.allgather(buffer.reshape(1, -1))
        assert (every == every[0]).all(), f"{name} differs between the ranks"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", SHAPES)
def check_equals_the_whole_batch(form, rows, options):
    rows = ROWS[rows]
    total = sum(rows(rank) for rank in range(hvd.size()))
    if total < 2:
        return
    layer, reference = make(form, **OPTIONS[options])
    for step in range(3):
        layer.zero_grad()
        reference.zero_grad()
        one_step(layer, reference, step, form, rows)
    layer.eval()
    reference.eval()
    if options == "no running statistics":
        reference = copy.deepcopy(reference)  # in evaluation its statistics are of this rank's batch
    x = batch(hvd.rank(), 9, form, ROWS["even"])
    torch.testing.assert_close(layer(x), reference(x))


# Memory formats

FORMATS = [(n, c, *rest) for dims in (1, 2, 3) for n in (1, 4) for c in (1, 5)
           for rest in itertools.product((1, 3), repeat=dims)]
PAIRS = 4  # of formats of input and gradient that are tried of each shape


def formats(shape):
    """The strides of all orders of dimensions in memory."""
    orders = itertools.permutations(range(len(shape)))
    return sorted({torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))]).stride()
                   for order in orders})


def some_formats(shape, seed=3):
    """Pairs of strides, the same on all ranks."""
    pairs = list(itertools.product(formats(shape), repeat=2))
    return random.Random(seed).sample(pairs, min(PAIRS, len(pairs)))


def values(shape, strides, seed, dtype=torch.float64):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + seed % 7
    return torch.empty_strided(shape, strides, dtype=dtype).copy_(made)


def written_out(x, grad, weight, bias, eps, statistics=None):
    """Output and gradients of x, weight and bias in float64, from sums that are written out."""
    x, weight, bias = (value.detach().cpu().double().contiguous().requires_grad_() for value in (x, weight, bias))
    others = [i for i in range(x.dim()) if i != 1]
    def shaped(value):
        return value.view(1, -1, *[1] * (x.dim() - 2))
    if statistics is None:
        mean = x.mean(others, keepdim=True)
        variance = (x - mean).square().mean(others, keepdim=True)
    else:
        mean, variance = (shaped(value.cpu().double()) for value in statistics)
    y = (x - mean) / torch.sqrt(variance + eps) * shaped(weight) + shaped(bias)
    y.backward(grad.cpu().double())
    return y.detach(), x.grad, weight.grad, bias.grad


def expect_written_out(layer, every, grads, place="cpu", statistics=None, **tolerance):
    """every, grads: the inputs of all ranks and the gradients of the outputs, on the CPU."""
    mine = hvd.rank()
    layer.zero_grad()
    x = every[mine].to(place).detach().requires_grad_()
    y = layer(x)
    y.backward(grads[mine].to(place))
    if layer.training and hvd.size() > 1 and x.numel() and (x.is_contiguous() or x.movedim(1, -1).is_contiguous()):
        assert y.stride() == x.stride()
    assert y.dtype == x.grad.dtype == x.dtype
    weight, bias = (torch.ones(x.shape[1]), torch.zeros(x.shape[1])) if layer.weight is None else layer.parameters()
    expected = written_out(torch.cat(every), torch.cat(grads), weight, bias, layer.eps, statistics)
    rows = [len(one) for one in every]
    y_all, x_grad = (part.split(rows)[mine] for part in expected[:2])
    what = f"of shape {tuple(x.shape)}, strides {x.stride()}, gradient {grads[mine].stride()}, {x.dtype}, {x.device}"
    pairs = {"the output": (y, y_all), "the input's gradient": (x.grad, x_grad)}
    if layer.weight is not None:
        pairs.update((name, (hvd.allreduce(p.grad.double(), op=hvd.Sum), grad))
                     for (name, p), grad in zip(layer.named_parameters(), expected[2:]))
    for name, (found, right) in pairs.items():
        torch.testing.assert_close(found.detach().cpu().double(), right, **tolerance,
                                   msg=lambda text, name=name: f"{name}, {what}: {text}")


def new_layer(channels, **options):
    layer = hvd.SyncBatchNorm(channels, **options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(torch.linspace(0.5 + i, 2.0, channels))
        layer.running_mean.copy_(torch.linspace(-1.0, 1.0, channels))
        layer.running_var.copy_(torch.linspace(0.5, 1.5, channels))
    return layer


def check_every_format():
    """Sizes of one have strides that say nothing: with them PyTorch takes input and gradient for what they are not."""
    for shape in FORMATS:
        if shape[0] * shape[2:].count(3) * hvd.size() < 2:
            continue
        layer = new_layer(shape[1]).double()
        for strides, of_grad in some_formats(shape):
            every, grads = ([values(shape, how, seed + 10 * rank) for rank in range(hvd.size())]
                            for how, seed in ((strides, 1), (of_grad, 2)))
            layer.train()
            expect_written_out(layer, every, grads, rtol=1e-7, atol=1e-7)
            layer.eval()
            expect_written_out(layer, every, grads, statistics=(layer.running_mean, layer.running_var), rtol=1e-7,
                               atol=1e-7)


def check_a_change_in_place_of_the_output():
    layer, reference = make("channels last")
    every = [batch(rank, 0, "channels last", ROWS["even"]) for rank in range(hvd.size())]
    x, whole = every[hvd.rank()].clone().requires_grad_(), torch.cat(every).requires_grad_()
    for module, value in ((layer, x), (reference, whole)):
        torch.relu_(module(value)).square().sum().backward()
    torch.testing.assert_close(x.grad, mine_of(whole.grad, ROWS["even"]))


# The functions of a GPU

class Recorded:
    """PyTorch's functions of a GPU on the CPU, with what the real ones demand of their arguments."""

    def __init__(self):
        self.called = set()
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        for name in ("stats", "elemt", "backward_reduce", "backward_elemt"):
            self._library.impl(f"batch_norm_{name}", getattr(self, name))

    def end(self):
        self._library._destroy()

    def _begin(self, name, tensors, wide):
        self.called.add(name)
        assert all(t.is_contiguous() and t.dim() in (2, 3) and t.dtype == tensors[0].dtype for t in tensors)
        expected = torch.float32 if tensors[0].element_size() == 2 else tensors[0].dtype
        assert all(t is None or t.dtype == expected for t in wide)

    @staticmethod
    def _of(x, value):
        return value.double().view(-1, *[1] * (x.dim() - 2))

    @staticmethod
    def _sum(x):
        return x.double().sum([i for i in range(x.dim()) if i != 1])

    def stats(self, x, eps):
        self._begin("stats", [x], [])
        mean = self._sum(x) / (x.numel() // x.shape[1])
        variance = self._sum((x.double() - self._of(x, mean)).square()) / (x.numel() // x.shape[1])
        wide = torch.float32 if x.element_size() == 2 else x.dtype
        return mean.to(wide), torch.rsqrt(variance + eps).to(wide)

    def elemt(self, x, weight, bias, mean, invstd, eps):
        self._begin("elemt", [x], [weight, bias, mean, invstd])
        y = (x.double() - self._of(x, mean)) * self._of(x, invstd)
        return (y if weight is None else y * self._of(x, weight) + self._of(x, bias)).to(x.dtype)

    def backward_reduce(self, grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
        self._begin("backward_reduce", [grad, x], [mean, invstd, weight])
        assert input_g and (weight is not None or not (weight_g or bias_g))
        projected = self._sum(grad.double() * (x.double() - self._of(x, mean)))
        none = mean.new_empty(0)
        return self._sum(grad).to(mean.dtype), projected.to(mean.dtype), none, none.clone()

    def backward_elemt(self, grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        self._begin("backward_elemt", [grad, x], [mean, invstd, weight, sum_dy, sum_dy_xmu])
        assert count.dtype == torch.int32
        scale = self._of(x, invstd)
        of_x = (x.double() - self._of(x, mean)) * scale.square() * self._of(x, sum_dy_xmu) / count.sum()
        result = (grad.double() - self._of(x, sum_dy) / count.sum() - of_x) * scale
        return (result if weight is None else result * self._of(x, weight)).to(x.dtype)


@pytest.fixture
def recorded(monkeypatch):
    functions = Recorded()
    monkeypatch.setattr(sync_batch_norm, "kernels_of", lambda x: batch_norm_kernels.Cuda)
    yield functions
    functions.end()


def check_the_functions_of_a_gpu(recorded):
    """In each format and dtype, with and without weights, by ranks that have rows and that have none."""
    if hvd.size() == 1:
        return
    tolerances = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
    for dtype, tolerance in tolerances.items():
        for shape in ((4, 5), (4, 5, 3), (2, 5, 3, 2), (1, 5, 3, 1), (2, 5, 2, 1, 3)):
            for (strides, of_grad), affine in zip(some_formats(shape), (True, True, False, False)):
                layer = new_layer(shape[1], affine=affine).to(batch_norm_kernels.wide(dtype))
                every, grads = ([values(shape, how, seed + 10 * rank, dtype) for rank in range(hvd.size())]
                                for how, seed in ((strides, 1), (of_grad, 2)))
                every[0], grads[0] = (one[0][:int(shape[0] > 2)] for one in (every, grads))
                expect_written_out(layer, every, grads, rtol=tolerance, atol=tolerance)
    rows = hvd.allgather(torch.tensor([len(every[hvd.rank()])]))
    assert not rows[0] and recorded.called == (
        {"stats", "elemt", "backward_reduce", "backward_elemt"} if hvd.rank() else recorded.called)


def check_autocast():
    torch.manual_seed(hvd.rank())
    x = torch.randn(4, 2, 5, 5).contiguous(memory_format=torch.channels_last)
    gradients = []
    for cast in (True, False):
        torch.manual_seed(8)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, CHANNELS, 3), hvd.SyncBatchNorm(CHANNELS), torch.nn.Flatten())
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = model(x.clone())
            assert y.dtype == (torch.bfloat16 if cast else torch.float32)
            (y.float().square() * torch.linspace(-1, 1, 27)).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)


TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
              torch.float16: {"rtol": 4e-3, "atol": 1e-2}}


@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def check_dtypes(dtype, parameters):
    """Beside float32: half precision is only of inputs and outputs, not of what is computed between."""
    for form in SHAPES:
        for rows in (ROWS["uneven"], ROWS["none on rank 0"]):
            if not sum(rows(rank) for rank in range(hvd.size())):
                continue
            layer, reference = make(form, torch.float32)
            layer.to(dtype if parameters == "same" else torch.float32)
            every = [batch(rank, 0, form, rows, dtype) for rank in range(hvd.size())]
            whole = torch.cat(every).float().requires_grad_()
            x = every[hvd.rank()].clone().requires_grad_()
            y, expected = layer(x), reference(whole)
            assert y.dtype == dtype
            torch.testing.assert_close(y.float(), mine_of(expected, rows), **TOLERANCES[dtype])
            weight = torch.arange(whole.numel()).reshape(whole.shape) % 7 - 3.0
            (expected * weight).sum().backward()
            (y * mine_of(weight, rows).to(dtype)).sum().backward()
            assert x.grad.dtype == dtype and layer.weight.grad.dtype == layer.weight.dtype
            torch.testing.assert_close(x.grad.float(), mine_of(whole.grad, rows), **TOLERANCES[dtype])
            assert layer.running_var.dtype == layer.weight.dtype
            torch.testing.assert_close(layer.running_var.float(), reference.running_var, **TOLERANCES[dtype])


def check_a_mean_far_from_zero():
    """The square of the mean is a million times the variance: in float32 a tenth of the variance would be left."""
    torch.manual_seed(hvd.rank())
    x = torch.randn(64, CHANNELS) + 1000.0
    layer = hvd.SyncBatchNorm(CHANNELS, momentum=1.0, affine=False)
    layer(x)
    whole = hvd.allgather(x).double()
    torch.testing.assert_close(layer.running_mean.double(), whole.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), whole.var(0), rtol=2e-4, atol=0)


def check_a_constant_channel():
    layer = hvd.SyncBatchNorm(CHANNELS)
    y = layer(torch.full((4, CHANNELS), 0.1, requires_grad=True))
    assert y.abs().max() < 1e-3
    y.sum().backward()


def check_numerical_gradient():
    """Of the sum of all ranks' losses with respect to one value at a time of one rank."""
    layer, _ = make("3D")
    for rank in range(hvd.size()):
        x = batch(hvd.rank(), 0, "3D", lambda rank: 2).requires_grad_()

        def loss(x):
            return (layer(x) ** 3).sum()

        loss(x).backward()
        for index in ((0, 0, 0), (1, 2, 3)):
            step = torch.zeros_like(x)
            step[index] = 1e-6 if hvd.rank() == rank else 0
            with torch.no_grad():
                slope = hvd.allreduce((loss(x + step) - loss(x - step)) / 2e-6, op=hvd.Sum)
            analytic = hvd.broadcast(x.grad[index].clone(), rank)
            torch.testing.assert_close(slope, analytic, rtol=1e-5, atol=1e-5)


def check_inputs_that_need_no_gradient():
    layer, reference = make("4D")
    every = [batch(rank, 0, "4D", ROWS["uneven"]) for rank in range(hvd.size())]
    layer(every[hvd.rank()]).square().sum().backward()
    reference(torch.cat(every)).square().sum().backward()
    for p, q in zip(layer.parameters(), reference.parameters()):
        torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), q.grad)
    with torch.no_grad():
        assert not layer(every[hvd.rank()]).requires_grad
    for p in layer.parameters():
        p.requires_grad_(False)
    x = every[hvd.rank()].clone().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.abs().max() < 1e-9 if x.numel() else True


def check_gradients_that_are_views():
    """sum() has an expanded gradient, a transposed output another layout."""
    layer, reference = make("4D")
    every = [batch(rank, 0, "4D", ROWS["uneven"]) for rank in range(hvd.size())]
    x, whole = every[hvd.rank()].clone().requires_grad_(), torch.cat(every).requires_grad_()
    weight = torch.arange(2.0, dtype=torch.float64)
    for module, value in ((layer, x), (reference, whole)):
        y = module(value.transpose(2, 3))
        (y.sum() + (y.permute(1, 0, 3, 2) @ torch.ones(2, 2, dtype=torch.float64) * weight).square().sum()).backward()
    torch.testing.assert_close(x.grad, mine_of(whole.grad, ROWS["uneven"]))


def check_training_with_distributed_optimizer():
    def make_model(norm):
        torch.manual_seed(8)
        return torch.nn.Sequential(torch.nn.Conv2d(2, CHANNELS, 3), norm(CHANNELS), torch.nn.ReLU(),
                                   torch.nn.Conv2d(CHANNELS, 2, 2), norm(2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    mine, reference = make_model(hvd.SyncBatchNorm), make_model(torch.nn.BatchNorm2d)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters())
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(hvd.size() * 4, 2, 5, 5)
        part = slice(hvd.rank() * 4, hvd.rank() * 4 + 4)
        for model, o, inputs in ((reference, plain, x), (mine, optimizer, x[part])):
            o.zero_grad()
            model(inputs).square().mean().backward()
            o.step()
    for (name, p), q in zip(mine.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def check_join():
    """A rank that has joined adds no values."""
    layer = hvd.SyncBatchNorm(CHANNELS, momentum=1.0)
    for turn in range(hvd.rank() + 2):
        present = [rank for rank in range(hvd.size()) if rank + 2 > turn]
        every = [batch(rank, turn, "2D", ROWS["even"], torch.float32) for rank in present]
        x = batch(hvd.rank(), turn, "2D", ROWS["even"], torch.float32).requires_grad_()
        layer(x).square().sum().backward()
        torch.testing.assert_close(layer.running_var, torch.cat(every).var(0), rtol=1e-4, atol=1e-5)
    hvd.join()


def check_convert():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, eps=0.5, momentum=None), torch.nn.ModuleDict({
        "a": torch.nn.BatchNorm1d(2, affine=False), "b": torch.nn.BatchNorm3d(2, track_running_stats=False)}),
        torch.nn.Linear(1, 1)).double()
    model[1]["a"].eval()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    layers = model[0], model[1]["a"], model[1]["b"]
    assert all(type(layer) is hvd.SyncBatchNorm for layer in layers) and type(model[2]) is torch.nn.Linear
    assert [(layer.eps, layer.momentum) for layer in layers] == [(0.5, None), (1e-5, 0.1), (1e-5, 0.1)]
    assert [layer.training for layer in layers] == [True, False, True]
    assert layers[0].running_mean.dtype == layers[0].weight.dtype == torch.float64
    assert layers[1].weight is None and layers[2].running_mean is None
    plain = torch.nn.BatchNorm1d(4)
    single = hvd.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert single.weight is plain.weight and single.running_var is plain.running_var
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(single) is single


def check_errors():
    layer = hvd.SyncBatchNorm(CHANNELS)
    for training in (True, False):
        layer.train(training)
        for x in (torch.ones(3), torch.tensor(1.0)):
            with pytest.raises(ValueError, match="at least 2 dimensions"):
                layer(x)
        with pytest.raises(ValueError, match="3 channels"):
            layer(torch.ones(2, CHANNELS + 1))
    layer.train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(int(hvd.rank() == hvd.size() - 1), CHANNELS))
    assert layer.num_batches_tracked == (0 if hvd.size() > 1 else layer.num_batches_tracked)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="not 0 on all ranks"):
            layer(torch.ones(0, CHANNELS))
        with pytest.raises(hvd.HorovodInternalError, match="'sync_batch_norm.forward'.*disagree"):
            hvd.SyncBatchNorm(2 + (hvd.rank() == 0))(torch.ones(2, 2 + (hvd.rank() == 0)))
        x = torch.ones(2, CHANNELS, requires_grad=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            layer(x * 2).sum().backward(create_graph=True)
    hvd.barrier()


def check_evaluation_needs_no_other_rank():
    layer = hvd.SyncBatchNorm(CHANNELS).eval()
    if hvd.rank() == 0:
        x = torch.randn(1, CHANNELS)
        torch.testing.assert_close(layer(x), x / (1 + 1e-5) ** 0.5)
    hvd.barrier()

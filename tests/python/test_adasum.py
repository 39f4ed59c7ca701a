"""Adasum: allreduce in every form against the definition, and DistributedOptimizer(op=Adasum) against ranks that are
simulated in one process."""
import copy
import warnings

import numpy as np
import pytest
import torch
from cases import FLOATS, FRAMEWORKS, INTEGERS, TOLERANCE, Case

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, SAMPLES, data, loss_of, make_model, my_loss

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# The oracle

def two(a, b):
    ab, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def adasum(parts):
    """Pairs of neighbours, pairs of pairs; first as many pairs as there are ranks beyond a power of two."""
    parts = [np.asarray(part, np.float64) for part in parts]
    power = 1 << (len(parts).bit_length() - 1)
    extras = len(parts) - power
    parts = [two(parts[2 * i], parts[2 * i + 1]) for i in range(extras)] + parts[2 * extras:]
    while len(parts) > 1:
        parts = [two(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


SHAPES = [(), (0,), (1,), (5, 3), (1031,), (70_001,)]


def numbers(shape, rank):
    """What the ranks have is half alike; rank 2 has nothing in one-dimensional tensors."""
    def normal(seed):
        return np.random.default_rng(seed).standard_normal(shape)
    return (normal(1) + normal(10 + rank)) * (not (rank == 2 and len(shape) == 1))


@pytest.fixture(params=[(name, dtype) for name in ("numpy", "torch") for dtype in FLOATS
                        if (name, dtype) != ("numpy", "bfloat16")], ids="-".join)
def case(request, job):
    return Case(FRAMEWORKS[request.param[0]](), request.param[1])


def all_rounded(case, shape, who=None):
    """What every rank has, as it is in the dtype."""
    who = range(hvd.size()) if who is None else who
    return [case.framework.values(case.tensor(numbers(shape, rank))) for rank in who]


def expect_near(case, tensor, values):
    assert case.framework.dtype(tensor) == case.dtype
    got = case.framework.values(tensor)
    assert got.shape == np.shape(values)
    room = 8 * TOLERANCE[case.dtype] * max(np.abs(values).max(initial=0), 1)
    np.testing.assert_allclose(got, values, rtol=0, atol=room)


# Allreduce

def check_all_forms(case):
    hvd, how = case.hvd, case.hvd.Adasum
    inputs = [case.tensor(numbers(shape, hvd.rank())) for shape in SHAPES]
    outputs = [adasum(all_rounded(case, shape)) for shape in SHAPES]

    def wait(handles):
        return [hvd.synchronize(handle) for handle in handles]

    for run in (lambda xs: [hvd.allreduce(x, op=how) for x in xs],
                lambda xs: wait([hvd.allreduce_async(x, op=how) for x in xs]),
                lambda xs: hvd.grouped_allreduce(xs, op=how),
                lambda xs: hvd.synchronize(hvd.grouped_allreduce_async(xs, op=how)),
                lambda xs: [hvd.allreduce_(x, op=how) for x in xs],
                lambda xs: wait([hvd.allreduce_async_(x, op=how) for x in xs]),
                lambda xs: hvd.grouped_allreduce_(xs, op=how),
                lambda xs: hvd.synchronize(hvd.grouped_allreduce_async_(xs, op=how))):
        results = run([copy.deepcopy(x) for x in inputs])
        for result, values in zip(results, outputs):
            expect_near(case, result, values)
    for result in results[2:]:
        case.framework.expect_identical(result)


def check_factors(case):
    x = case.tensor(numbers((37,), case.hvd.rank()))
    values = adasum(all_rounded(case, (37,)))
    for before, after in ((0.5, 1.0), (1.0, 0.25), (0.5, 4.0)):
        result = case.hvd.allreduce(x, op=case.hvd.Adasum, prescale_factor=before, postscale_factor=after)
        expect_near(case, result, values * before * after)


def check_a_burst_of_tensors_each_for_itself(case):
    """They travel together; one of them is NaN on one rank, which the others must not feel."""
    hvd, count = case.hvd, 60
    shapes = [(1 + 17 * i % 301,) for i in range(count)]
    tensors = [case.tensor(numbers(shape, hvd.rank()) * (i + 1)) for i, shape in enumerate(shapes)]
    if hvd.rank() == 0:
        tensors[count // 2][0] = float("nan")
    handles = [hvd.allreduce_async_(tensor, op=hvd.Adasum, name=f"burst.{i}") for i, tensor in enumerate(tensors)]
    for i, (handle, shape) in enumerate(zip(handles, shapes)):
        result = hvd.synchronize(handle)
        if i == count // 2:
            # Alone, nothing is combined.
            assert np.isnan(case.framework.values(result)).sum() in ((1,) if hvd.size() == 1 else (shape[0],))
            continue
        parts = [case.framework.values(case.tensor(numbers(shape, rank) * (i + 1))) for rank in range(hvd.size())]
        got, values = case.framework.values(result), adasum(parts)
        np.testing.assert_allclose(got, values, rtol=0, atol=8 * TOLERANCE[case.dtype] * max(np.abs(values).max(), 1))


def check_group_of_several_dtypes():
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32]
    tensors = [torch.tensor(numbers((9,), hvd.rank()), dtype=dtype) for dtype in dtypes]
    results = hvd.grouped_allreduce(tensors, op=hvd.Adasum)
    for dtype, result in zip(dtypes, results):
        assert result.dtype == dtype
        parts = [torch.tensor(numbers((9,), rank), dtype=dtype).double().numpy() for rank in range(hvd.size())]
        np.testing.assert_allclose(result.double().numpy(), adasum(parts), rtol=0,
                                   atol=64 * torch.finfo(dtype).eps)


def check_equal_tensors_stay_and_orthogonal_ones_add_up():
    x = torch.tensor(numbers((1000,), 0), dtype=torch.float32)
    assert (hvd.allreduce(x, op=hvd.Adasum) == x).all()
    mine = torch.zeros(1000)
    mine[hvd.rank()] = 3
    expected = torch.zeros(1000)
    expected[:hvd.size()] = 3
    assert (hvd.allreduce(mine, op=hvd.Adasum) == expected).all()
    assert (hvd.allreduce(x * 0, op=hvd.Adasum) == 0).all()


def check_process_sets(case):
    hvd = case.hvd
    if hvd.size() < 3:
        return
    for members in ([0, hvd.size() - 1], list(range(1, hvd.size()))):
        process_set = hvd.add_process_set(members)
        if process_set.included():
            x = case.tensor(numbers((300,), hvd.rank()))
            got = case.framework.values(hvd.allreduce(x, op=hvd.Adasum, process_set=process_set))
            values = adasum(all_rounded(case, (300,), members))
            np.testing.assert_allclose(got, values, rtol=0,
                                       atol=8 * TOLERANCE[case.dtype] * max(np.abs(values).max(), 1))
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("dtype", INTEGERS + ("bool",))
def check_a_dtype_without_fractions_is_this_ranks_error(framework, dtype):
    hvd = framework.hvd
    x = framework.tensor([1, 2], dtype)
    if hvd.rank() == 0:
        for call in (lambda: hvd.allreduce(x, op=hvd.Adasum), lambda: hvd.allreduce_async_(x, op=hvd.Adasum),
                     lambda: hvd.grouped_allreduce([framework.tensor([1.0], "float32"), x], op=hvd.Adasum)):
            with pytest.raises(ValueError, match=f"rank 0: Adasum combines .*not {dtype}"):
                call()
    framework.expect(hvd.allreduce(framework.tensor([2.0], "float32"), op=hvd.Adasum), [2.0], "float32")


def check_ranks_that_disagree_hear_of_it():
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="ranks disagree on reduce op.*adasum"):
            hvd.allreduce(torch.ones(3), op=hvd.Adasum if hvd.rank() else hvd.Sum, name="quarrel")


def check_gradient_of_the_result():
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Adasum).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


# The optimizer

# Adam's first steps are nearly signs, and those of two ranks may be opposite: what is left of their sum is rounding,
# yet it has a direction, by which the next level of the tree goes. A large eps keeps steps and gradients in proportion.
PLAIN = {"SGD": OPTIMIZERS["SGD"],
         "Adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1),
         "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, eps=0.1, amsgrad=True)}


def combine(starts, models):
    """Gives each of the simulated ranks' models the same parameters: the starts plus Adasum of the changes."""
    for start, *parameters in zip(starts, *[model.parameters() for model in models]):
        delta = torch.from_numpy(adasum([(p.detach() - start).double().numpy() for p in parameters]))
        for p in parameters:
            p.data.copy_(start + delta)


class Simulated:
    """All ranks in one process: a model and an optimizer for each."""

    def __init__(self, kind, who=None):
        self.who = range(hvd.size()) if who is None else who
        self.models = [make_model() for _ in self.who]
        self.optimizers = [PLAIN[kind](model.parameters()) for model in self.models]

    def step(self, step, passes=1):
        starts = [p.detach().clone() for p in self.models[0].parameters()]
        for rank, model, optimizer in zip(self.who, self.models, self.optimizers):
            optimizer.zero_grad()
            for i in range(passes):
                part = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
                x, y = data(passes * step + i)
                loss_of(model, x[part], y[part]).backward()
            optimizer.step()
        if len(self.models) > 1:
            combine(starts, self.models)

    def expect(self, model, rtol=1e-4, atol=5e-6):
        for p, q in zip(model.parameters(), self.models[0].parameters()):
            torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
            every = hvd.allgather(p.detach().reshape(1, -1).view(torch.uint8))
            assert len(self.who) < hvd.size() or (every == every[0]).all()


OPTIONS = {
    "default": lambda model: {},
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "one group": lambda model: {"groups": 1},
    "lists": lambda model: {"groups": [list(model[0].parameters()), [model[4].bias, model[2].weight]]},
}


@pytest.mark.parametrize("kind, options", [("SGD", options) for options in OPTIONS] +
                         [("Adam", "default"), ("AdamW", "one group")])
def check_optimizer_equals_simulated_ranks(kind, options):
    model, simulated = make_model(), Simulated(kind)
    optimizer = hvd.DistributedOptimizer(PLAIN[kind](model.parameters()), op=hvd.Adasum,
                                         **OPTIONS[options](model))
    for step in range(4):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.step()
        simulated.step(step)
    simulated.expect(model)


def check_accumulation():
    model, simulated = make_model(), Simulated("SGD")
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum,
                                         backward_passes_per_step=3)
    for step in range(2):
        optimizer.zero_grad()
        for i in range(3):
            my_loss(model, 3 * step + i).backward()
        optimizer.step()
        simulated.step(step, passes=3)
    simulated.expect(model)
    if hvd.size() == 1:
        return
    for i in range(3):
        my_loss(model, i).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        my_loss(model, 3).backward()
    hvd.barrier()


class Doubling:
    """A compressor of a user's own: what travels is twice what there is."""

    @staticmethod
    def compress(tensor):
        return tensor.double() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).to(ctx)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "own"])
def check_compression(compression):
    model, simulated = make_model(), Simulated("SGD")
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum,
                                         compression=getattr(hvd.Compression, compression, Doubling))
    for step in range(3):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.step()
        simulated.step(step)
    simulated.expect(model, rtol=0, atol=1e-5 if compression == "own" else 1e-2)


def check_gradients_may_be_clipped_before_step():
    model, simulated = make_model(), Simulated("SGD")
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum)
    for call_synchronize in (False, True):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        my_loss(model, 0).backward()
        if call_synchronize:
            optimizer.synchronize()
        for p in model.parameters():
            p.grad.zero_()
        for group in optimizer.param_groups:
            group.update(momentum=0, weight_decay=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        for p, q in zip(model.parameters(), before):
            assert (p == q).all()
    simulated.expect(model)


def check_skip_synchronize_and_zero_grad():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum)
    with pytest.raises(AssertionError, match="skip_synchronize.*Adasum"):
        with optimizer.skip_synchronize():
            optimizer.step()
    my_loss(model, 0).backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def check_closure():
    model, simulated = make_model(), Simulated("SGD")
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum)
    for step in range(2):
        def closure(step=step):
            optimizer.zero_grad()
            loss = my_loss(model, step)
            loss.backward()
            return loss
        assert optimizer.step(closure).ndim == 0
        simulated.step(step)
    simulated.expect(model)


def check_what_has_no_gradient_on_a_rank_adds_nothing():
    shared, own = torch.zeros(3, requires_grad=True), [torch.zeros(2, requires_grad=True) for _ in range(hvd.size())]
    frozen = torch.ones(2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([shared, *own, frozen], lr=1.0), op=hvd.Adasum)
    (-shared.sum() - 2 * own[hvd.rank()].sum()).backward()
    optimizer.step()
    assert shared.tolist() == [1, 1, 1] and frozen.tolist() == [1, 1]
    assert [p.tolist() for p in own] == [[2, 2]] * hvd.size()


def check_sparse_gradients():
    torch.manual_seed(3)
    model = torch.nn.Embedding(10, 4, sparse=True)
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    model(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    start[:hvd.size()] -= 0.5  # rows of their own: orthogonal
    torch.testing.assert_close(model.weight.detach(), start)


def check_process_set_of_the_optimizer():
    if hvd.size() == 1:
        return  # there is no other set
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    process_set = hvd.add_process_set(members)
    model = make_model()
    simulated = Simulated("SGD", members if process_set.included() else [hvd.rank()])
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum,
                                         process_set=process_set)
    for step in range(2):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.step()
        simulated.step(step)
    for p, q in zip(model.parameters(), simulated.models[0].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-6)
    hvd.remove_process_set(process_set)


def check_a_failed_exchange_leaves_the_parameters_as_they_were():
    if hvd.size() == 1:
        return
    model = make_model()
    extra = torch.ones(2 + hvd.rank(), requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), extra], lr=0.1),
                                         [*model.named_parameters(), ("extra", extra)], op=hvd.Adasum)
    (my_loss(model, 0) + extra.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"'extra(\.\d+)?'.*ranks disagree on shape: rank 0 has"):
        optimizer.step()
    for p, q in zip(model.parameters(), make_model().parameters()):
        assert (p == q).all()
    assert (extra == 1).all()


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def check_least_squares_converge(kind):
    """Each rank sees its own rows of one problem that has an exact solution."""
    torch.manual_seed(7)
    solution = torch.randn(6)
    torch.manual_seed(100 + hvd.rank())
    rows = torch.randn(40, 6)
    x = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.05) if kind == "SGD" else torch.optim.Adam([x], lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, [("x", x)], op=hvd.Adasum)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first = float((rows @ (x.detach() - solution)).square().mean())
    for _ in range(400):
        optimizer.zero_grad()
        (rows @ (x - solution)).square().mean().backward()
        optimizer.step()
    last = float((rows @ (x.detach() - solution)).square().mean())
    assert last < 1e-6 * first, f"from {first} to {last}"

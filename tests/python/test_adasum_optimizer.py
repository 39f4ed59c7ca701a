"""DistributedOptimizer(op=Adasum) against ranks that are simulated in one process."""
import warnings

import pytest
import torch
from test_adasum import adasum

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, SAMPLES, data, loss_of, make_model, my_loss

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def check_gradient_of_the_result():
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Adasum).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("clipped", [False, True], ids=["", "unscaled and clipped"])
@pytest.mark.parametrize("set_to_none", [False, True])
def check_a_grad_scaler_leaves_the_same_steps_out_on_all_ranks(clipped, set_to_none):
    """A step that overflows on one rank; one more in the step after it, on another rank."""
    model, simulated = make_model(), Simulated("SGD")
    optimizer = hvd.DistributedOptimizer(PLAIN["SGD"](model.parameters()), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    overflows = {1: hvd.size() - 1, 2: 0}
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = my_loss(model, step)
        if overflows.get(step) == hvd.rank():
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()
        if step not in overflows:
            simulated.step(step)
        simulated.expect(model)
    assert scaler.get_scale() == 256.0


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

"""lightcc.torch.amp on ranks: each step in one precision everywhere, weights with the same bits, one loss scale."""
import copy
import math
import re
from pathlib import Path

import compressed
import numpy as np
import pytest
import torch
import torch.distributed as dist

import lightcc.torch as hvd
import ranks
from lightcc.amp.policy import Always, HoldAfterLearningRateChange, Policy, Warmup
from lightcc.torch import ddp
from training import data, expect_equal, loss_of, make_model, my_loss

pytestmark = pytest.mark.torch_sizes
MixedPrecision = hvd.amp.MixedPrecision
LEVELS = ("float32", "bfloat16", "float16")
STEPS = 12


@pytest.mark.parametrize("np", ranks.SIZES[:3])
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Listed(Policy):
    """The levels of the steps, as they stand in a list."""

    def __init__(self, *levels):
        self.steps, self.levels = levels, tuple(dict.fromkeys(levels))

    def decide(self, state):
        return self.steps[min(state.step, len(self.steps) - 1)]


class Random(Policy):
    levels = LEVELS

    def __init__(self):
        self._rng = np.random.default_rng(hvd.rank())

    def decide(self, state):
        return str(self._rng.choice(LEVELS, p=[0.1, 0.3, 0.6]))


@pytest.fixture(autouse=True)
def started(job):
    pass


def distributed(model, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                    model.named_parameters(), **options)


def train(model, optimizer, precision, steps=STEPS, passes=1, factor=lambda step: 1.0, schedule=None):
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            with precision:
                loss = my_loss(model, passes * step + i) * factor(step)
            precision.backward(loss)
        precision.step()
        if schedule is not None:
            schedule.step()


def reference(levels, passes=1):
    """The same on one process, by torch's own means, float16 without a scale."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, level in enumerate(levels):
        optimizer.zero_grad()
        for i in range(passes):
            with torch.autocast("cpu", dtype=getattr(torch, level) if level != "float32" else torch.bfloat16,
                                enabled=level != "float32"):
                loss = loss_of(model, *data(passes * step + i))
            loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("passes", (1, 2))
@pytest.mark.parametrize("levels, rtol", ((["float32"], 1e-4), (["bfloat16", "float32"] * 6, 0.1),
                                          (["float16", "float16", "float32"] * 4, 0.02)), ids=("full", "bf16", "fp16"))
def check_steps_are_those_of_torch_alone(levels, rtol, passes):
    model = make_model()
    optimizer = distributed(model, backward_passes_per_step=passes)
    precision = MixedPrecision(optimizer, Listed(*levels), scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    train(model, optimizer, precision, passes=passes)
    levels = (levels * STEPS)[:STEPS]
    assert precision.history().levels() == levels
    expect_equal(model, reference(levels, passes), rtol, 1e-6 if rtol < 1e-3 else 0.02)


def check_weights_are_equal_where_policies_disagree():
    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, Random(), clip=1.0)
    train(model, optimizer, precision, steps=40)
    expect_equal(model, copy.deepcopy(model))
    assert {*precision.history().steps} == {*LEVELS}
    scales = hvd.allgather_object(precision.scaler.get_scale())
    assert len(set(scales)) == 1


def check_an_overflow_on_one_rank_leaves_the_step_out_on_all():
    model = make_model()
    optimizer = distributed(model)
    seen = []

    class Look(Listed):
        def decide(self, state):
            seen.append((state.overflows, state.overflows_in_a_row))
            return super().decide(state)

    levels = ["float16"] * 3 + ["float32"] * 3 + ["float16"] * 3
    precision = MixedPrecision(optimizer, Look(*levels), scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    bad, scales, moved = (2, 7), [], []
    for step in range(len(levels)):
        before = model[0].weight.detach().clone()
        train(model, optimizer, precision, 1,
              factor=lambda _, step=step: math.inf if step in bad and hvd.rank() == hvd.size() - 1 else 1.0)
        moved.append(not torch.equal(before, model[0].weight))
        scales.append(precision.scaler.get_scale())
    assert moved == [step not in bad for step in range(len(levels))]
    assert scales == [64, 64, 32, 32, 32, 32, 32, 16, 16]  # it stays across full steps
    assert seen[-1] == (2, 1)  # decided in step 8, on step 9
    assert hvd.allgather_object(scales) == [scales] * hvd.size()
    expect_equal(model, copy.deepcopy(model))


@pytest.mark.parametrize("others", ("have it", "do not use it", "do not have it"))
def check_a_gradient_that_stays_here_may_overflow(others):
    model = make_model()
    last, own = hvd.rank() == hvd.size() - 1, torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), *([own] if last or others != "do not have it" else [])], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer)
    if last or others != "do not have it":
        optimizer.register_local_var(own)
    precision = MixedPrecision(optimizer, Always("float16"), scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    if last:
        own.register_hook(lambda grad: grad * (math.inf if step < 2 else 1.0))
    before = copy.deepcopy(model)
    for step in range(3):
        optimizer.zero_grad()
        with precision:
            loss = my_loss(model, step) + (own.sum() if last or others == "have it" else 0.0)
        precision.backward(loss)
        precision.step()
        assert precision.scaler.get_scale() == (32 if step == 0 else 16)
        assert step == 2 or all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
    assert not torch.equal(model[0].weight, before[0].weight)
    expect_equal(model, copy.deepcopy(model))


def check_what_stays_here_is_clipped_for_itself():
    norms = []

    class Look(Always):
        def decide(self, state):
            norms.append(state.gradient_norm)
            return super().decide(state)

    model, own = make_model(), torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), own], lr=0.1))
    optimizer.register_local_var(own)
    precision = MixedPrecision(optimizer, Look("float32"), clip=0.1, norm=True)
    for step in range(3):
        optimizer.zero_grad()
        with precision:
            loss = my_loss(model, step) + own.sum() * 1000 * hvd.rank()
        precision.backward(loss)
        precision.step()
    expect_equal(model, copy.deepcopy(model))
    assert norms[-1] < 100 and hvd.allgather_object(norms) == [norms] * hvd.size()
    assert float(own.detach()) == pytest.approx(1.0 if hvd.rank() == 0 else 0.97, abs=1e-4)


def check_clipping_comes_after_the_scale():
    norms = []

    class Look(Listed):
        def decide(self, state):
            norms.append(state.gradient_norm)
            return super().decide(state)

    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, Look("float32", "float16"), clip=0.1, norm=True,
                               scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    for _ in range(3):
        before = copy.deepcopy(model)
        optimizer.param_groups[0]["momentum"] = 0
        train(model, optimizer, precision, 1, factor=lambda step: 10.0)  # the norm is above 0.1 on any number of ranks
        moved = torch.cat([(p - q).detach().flatten() for p, q in zip(model.parameters(), before.parameters())])
        assert 0.09 < float(moved.norm() / 0.1) < 0.101
    assert norms[:2] == [None, None] and all(0.1 < norm < 30 for norm in norms[2:])


def check_a_hold_follows_the_scheduler():
    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, HoldAfterLearningRateChange(hold_step=3))
    train(model, optimizer, precision, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 5))
    # The rate is new in steps 5 and 10.
    assert precision.history().levels() == ["bfloat16"] * 6 + ["float32"] * 3 + ["bfloat16"] * 2 + ["float32"]
    assert [switch.reason for switch in precision.history().switches[1:]] == [
        "the learning rate went from 0.1 to 0.01", "HoldAfterLearningRateChange: nothing asks for float32",
        "the learning rate went from 0.01 to 0.001"]


def check_state_goes_on_from_a_checkpoint():
    def made():
        model = make_model()
        optimizer = distributed(model)
        return model, optimizer, MixedPrecision(optimizer, Random())
    model, optimizer, precision = made()
    train(model, optimizer, precision, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict()))
    train(model, optimizer, precision, 5)
    again, its_optimizer, its_precision = made()
    for one, state in zip((again, its_optimizer, its_precision), saved):
        one.load_state_dict(state)
    train(again, its_optimizer, its_precision, 5)
    assert its_precision.history() == precision.history()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))


def check_a_rank_that_joins_catches_up():
    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, Listed(*["float16", "bfloat16"] * 3, "float16", "float32", "float16"),
                               scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    train(model, optimizer, precision, 3 if hvd.rank() == 0 else 5,
          factor=lambda step: math.inf if step == 4 else 1.0)  # which rank 0 does not see
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), last)
    hvd.broadcast_optimizer_state(optimizer, last)
    train(model, optimizer, precision, 4)
    seen = precision.level, precision.scaler.get_scale(), sum(precision.history().steps.values())
    assert seen == (("float16", 32.0, 9) if hvd.size() > 1 else ("float16", 64.0, 7))
    assert hvd.allgather_object(seen) == [seen] * hvd.size()
    expect_equal(model, copy.deepcopy(model))


def check_the_hook_of_ddp(tmp_path_factory):
    where = hvd.broadcast_object(str(tmp_path_factory.mktemp("ddp") / "rendezvous"), 0)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=hvd.rank(), world_size=hvd.size())
    try:
        model = make_model()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, ddp.comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        precision = MixedPrecision(optimizer, Listed(*["float32", "bfloat16"] * 6), clip=10.0)
        train(wrapped, optimizer, precision)
        expect_equal(model, reference(["float32", "bfloat16"] * 6), 0.1, 0.02)
    finally:
        dist.destroy_process_group()


def check_a_process_set_votes_alone():
    if hvd.size() == 1:
        return
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = MixedPrecision(optimizer, Random(), process_set=sets[hvd.rank()])
    train(model, optimizer, precision, 3 + 2 * hvd.rank())
    alone = Random()
    assert precision.history().levels() == [alone.decide(None) for _ in range(3 + 2 * hvd.rank())]
    with pytest.raises(ValueError, match="that of the DistributedOptimizer, which counts, is"):
        MixedPrecision(distributed(model), Random(), process_set=sets[hvd.rank()])
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


def check_torch_compile_makes_a_graph_for_each_level():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, Listed(*["float32", "bfloat16"] * 6))
    train(torch.compile(model, backend=backend), optimizer, precision)
    assert len(graphs) == 2 and len(precision.history().switches) == STEPS
    torch._dynamo.reset()


def padded(size):
    """The power of two that holds so many."""
    return 1 << (size - 1).bit_length()


@pytest.mark.parametrize("agreed", (True, False))
def check_shapes_that_change_compile_in_the_same_steps_with_an_agreed_bucket(agreed):
    steps, graphs, seen = 40, 0, set()

    def backend(module, _):
        nonlocal graphs
        graphs += 1
        return module.forward

    def run(distribute):
        nonlocal graphs
        graphs, found = 0, []
        torch._dynamo.reset()
        model = make_model()
        optimizer = distributed(model) if distribute else torch.optim.SGD(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend=backend, dynamic=False)
        rng = np.random.default_rng(hvd.rank())
        for _ in range(steps):
            size = int(rng.integers(1, 33))
            if agreed:
                size = int(hvd.allreduce(torch.tensor(size), op=hvd.Max))
            seen.add(padded(size))
            before = graphs
            optimizer.zero_grad()
            forward(torch.ones(padded(size), 5)).sum().backward()
            optimizer.step()
            found.append(graphs > before)
        return found

    compiled = run(True)
    assert compiled == run(False)  # lightcc adds no compilation
    assert sum(compiled) == len(seen) > 1
    if agreed:
        assert all(its == compiled for its in hvd.allgather_object(compiled))
    torch._dynamo.reset()


def check_the_program_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "amp.md").read_text()
    namespace = {}
    exec(re.search(r"## PyTorch\n.*?```python\n(.*?)```", page, re.DOTALL)[1], namespace)
    steps = namespace["precision"].history().steps
    assert f"# {steps}\n" in page and sum(steps.values()) == 50
    exec(re.search(r"## Policies\n.*?```python\n(.*?)```", page, re.DOTALL)[1], namespace)
    model = make_model()
    precision = MixedPrecision(distributed(model), namespace["FullEveryTenth"]())
    train(model, precision._optimizer, precision, 12)
    assert precision.history().levels() == ["float32", *["bfloat16"] * 9, "float32", "bfloat16"]


@pytest.mark.parametrize("groups", (None, 2))
def check_each_level_has_its_compression_on_the_wire(groups):
    model, steps = make_model(), ["float32", "bfloat16"] * 6
    optimizer = distributed(model, groups=groups)
    precision = MixedPrecision(optimizer, Listed(*steps), compression={"bfloat16": hvd.Compression.bf16})
    dtypes, slabs = [], set()
    for _ in steps:
        train(model, optimizer, precision, 1)
        if optimizer._reducer is not None:
            dtypes.append({gradient.slot.dtype for gradient in optimizer._reducer.gradients})
            slabs.add(optimizer._reducer.gradients[0].address)
    expect_equal(model, copy.deepcopy(model))
    assert precision.history().levels() == steps
    if hvd.size() > 1:
        assert dtypes == [{torch.float32}, {torch.bfloat16}] * 6
        assert len(slabs) == 2  # they are kept


@pytest.fixture
def a_node_for_each_rank():
    compressed.begin(1)
    yield
    compressed.end()
    hvd.init()


@pytest.mark.parametrize("groups", (None, 1))
@pytest.mark.usefixtures("a_node_for_each_rank")
def check_what_top_k_leaves_behind_stays_in_full_steps(groups):
    topk = hvd.Compression.topk(0.25)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    optimizer = distributed(model, compression=topk, groups=groups)
    precision = MixedPrecision(optimizer, Listed(*["bfloat16", "float32"] * 3), compression={
        "float32": hvd.Compression.none, "bfloat16": topk})
    saved = []
    for _ in range(6):
        optimizer.zero_grad()
        with precision:
            loss = model(torch.ones(1, 128)).sum()
        precision.backward(loss)
        precision.step()
        saved.append(optimizer.state_dict().get("lightcc_residuals"))
    if hvd.size() > 1:
        assert [{its["steps"] for its in one["tensors"].values()} for one in saved] == [{1}, {1}, {2}, {2}, {3}, {3}]
        assert all({*one["tensors"]} == {"0.weight", "1.weight"} for one in saved)
        for low, full in zip(saved[::2], saved[1::2]):
            assert values_of(low) == values_of(full)
        assert any(any(values) for values in values_of(saved[-1]))


def values_of(saved):
    """What was left behind, piece by piece."""
    return [piece["values"].tolist() for its in saved["tensors"].values() for piece in its["pieces"]]


def check_compression_that_cannot_be():
    optimizer = distributed(make_model())
    plain = torch.optim.SGD(make_model().parameters(), lr=0.1)
    for its, compression, message in (
            (optimizer, {"fp16": hvd.Compression.fp16}, "compression has 'fp16', and the policy's levels are float32"),
            (plain, {"float32": hvd.Compression.fp16}, "compression= is for a DistributedOptimizer")):
        with pytest.raises(ValueError, match=message):
            MixedPrecision(its, Always("float32"), compression=compression)
    with pytest.raises(ValueError, match="keeps what it leaves behind"):
        optimizer.use_compression(hvd.Compression.int8())


def check_wrong_arguments():
    model = make_model()
    optimizer = distributed(model)
    for policy, message in (
            (Always("tf32"), "may choose tf32, but it is for NVIDIA GPUs. There are float32, bfloat16, float16 here"),
            (Always("fp8"), "may choose fp8, but it is for NVIDIA GPUs"), ("bfloat16", "is no lightcc.amp.policy")):
        with pytest.raises(ValueError, match=message):
            MixedPrecision(optimizer, policy)
    with pytest.raises(ValueError, match="must be torch.bfloat16 or torch.float16"):
        MixedPrecision(optimizer, Always("float32"), dtype=torch.float64)
    with pytest.raises(ValueError, match="device_type='tpu' must be 'cuda' or 'cpu'"):
        MixedPrecision(optimizer, Always("float32"), device_type="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU here"):
            MixedPrecision(optimizer, Always("float32"), device_type="cuda")
    half = make_model().bfloat16()
    with pytest.raises(ValueError, match="cast to half precision.*Leave model.bfloat16"):
        MixedPrecision(torch.optim.SGD(half.parameters(), lr=0.1), Always("float32"))


def check_a_step_out_of_order():
    model = make_model()
    optimizer = distributed(model)
    precision = MixedPrecision(optimizer, Warmup(1))
    with pytest.raises(RuntimeError, match="comes after `with precision:`"):
        precision.backward(torch.ones(()))
    with pytest.raises(RuntimeError, match="comes after backward"):
        precision.step()
    with precision:
        loss = my_loss(model, 0)
    for wrong, message in ((torch.ones(2), r"of shape \(2,\); give a tensor with one"), (1.0, "a float; give")):
        with pytest.raises(ValueError, match=message):
            precision.backward(wrong)
    precision.backward(loss)
    with pytest.raises(ValueError, match="a GradScaler of the program has been given the optimizer, too"):
        torch.amp.GradScaler("cpu").step(optimizer)
    precision.step()
    optimizer.zero_grad()
    with precision:
        loss = my_loss(model, 0)
    precision.backward(loss)
    optimizer.step()
    with pytest.raises(RuntimeError, match="optimizer.step\\(\\) was called. Call precision.step"):
        with precision:
            pass


def check_an_error_inside_leaves_autocast():
    optimizer = distributed(make_model())
    precision = MixedPrecision(optimizer, Always("bfloat16"))
    with pytest.raises(KeyError), precision:
        assert torch.is_autocast_enabled("cpu")
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


def check_a_full_step_is_full_inside_of_autocast():
    model = make_model()
    precision = MixedPrecision(distributed(model), Always("float32"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with precision:
            assert model(data(0)[0]).dtype == torch.float32
        assert model(data(0)[0]).dtype == torch.bfloat16


def check_flags_of_tf32_are_set_and_restored():
    optimizer = distributed(make_model())
    precision = MixedPrecision(optimizer, Always("float32"))
    precision._flags = hvd.amp._flags()
    read = [getattr(where, name) for where, name, _ in precision._flags]
    for level in ("tf32", "float32", "bfloat16"):
        precision._set_flags(level)
        if level != "bfloat16":
            assert [getattr(where, name) for where, name, _ in precision._flags] == [
                values[level] for _, _, values in precision._flags]
        precision._restore_flags()
        assert [getattr(where, name) for where, name, _ in precision._flags] == read

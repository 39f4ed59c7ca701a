"""LocalSGD and DiLoCo against a plain loop over the ranks' models in one process, by schedules drawn at random."""
import copy
import io
import random

import pytest
import torch
from compressed import COMPRESSED, begin, end, gradient
from exchange_loop import INNER, OUTER, Loop, loss_of_rank

import lightcc.torch as hvd
import ranks
from lightcc.compress.residuals import KEY as RESIDUALS
from lightcc.core.exchange_schedule import in_fragments
from training import data, expect_equal, make_model, my_loss, train, train_alone

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.torch_sizes]
SCHEDULES = {3: 50}  # by the number of ranks


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def double_model():
    return make_model().double()


def step_here(model, optimizer, step):
    optimizer.zero_grad()
    loss_of_rank(model, step, hvd.rank()).backward()
    optimizer.step()


def check_diloco_equals_the_loop_by_random_schedules():
    generator = random.Random(47)
    for _ in range(SCHEDULES.get(hvd.size(), 12)):
        sync_every = generator.randrange(1, 7)
        fragments = generator.randrange(1, sync_every + 1)
        delay = generator.choice([0, generator.randrange(sync_every)])
        alpha = generator.choice([None, 0.0, 0.25, 1.0])
        inner, outer = generator.choice(list(INNER)), generator.choice(list(OUTER))
        steps = generator.randrange(1, 4 * sync_every)
        model = double_model()
        parameters = list(model.parameters())
        if generator.random() < 0.5:
            parts = in_fragments([p.numel() for p in parameters], fragments)
            given = fragments
        else:
            order = generator.sample(range(len(parameters)), len(parameters))
            parts = [order[i::fragments] for i in range(fragments)]
            given = [[parameters[i] for i in part] for part in parts]
        optimizer = hvd.DiLoCo(model, INNER[inner](model.parameters()), OUTER[outer], sync_every, given, delay, alpha)
        loop = Loop(INNER[inner], sync_every, delay, OUTER[outer], parts,
                    alpha if alpha is not None else 0.5 if delay else 0.0)
        for step in range(steps):
            step_here(model, optimizer, step)
            loop.step()
        loop.expect(model)


def check_local_sgd_equals_the_loop_by_random_schedules():
    generator = random.Random(48)
    for _ in range(SCHEDULES.get(hvd.size(), 12) // 2):
        sync_every = generator.randrange(1, 7)
        delay = generator.choice([0, generator.randrange(sync_every)])
        inner = generator.choice(list(INNER))
        model = double_model()
        optimizer = hvd.LocalSGD(INNER[inner](model.parameters()), sync_every, model.named_parameters(), delay)
        loop = Loop(INNER[inner], sync_every, delay)
        for step in range(generator.randrange(1, 4 * sync_every)):
            step_here(model, optimizer, step)
            loop.step()
        loop.expect(model)


# Identities

def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def check_an_exchange_after_each_step_is_distributed_optimizer(kind):
    model, reference = make_model(), make_model()
    if kind == "LocalSGD":
        optimizer = hvd.LocalSGD(plain_sgd(model), 1)
    else:
        optimizer = hvd.DiLoCo(model, plain_sgd(model), OUTER["plain"], sync_every=1)
    train(model, optimizer, 6)
    train_alone(reference, plain_sgd(reference), 6)
    expect_equal(model, reference)


class Apart(torch.nn.Module):
    """Parts that know nothing of each other."""

    def __init__(self, which):
        super().__init__()
        torch.manual_seed(5)
        made = [torch.nn.Linear(5, 3) for _ in range(2)]
        self.parts = torch.nn.ModuleList([made[i] for i in which])

    def forward(self, x):
        return sum(part(x).square().mean() for part in self.parts)


def check_fragments_are_as_one_fragment_each():
    def trained(which, fragments, steps_before):
        model = Apart(which)
        parts = [list(part.parameters()) for part in model.parts] if fragments > 1 else 1
        optimizer = hvd.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=0.02), sync_every=4, fragments=parts)
        optimizer._periodic.steps = steps_before
        for step in range(9):
            optimizer.zero_grad()
            model(data(step)[0][hvd.rank() * 4:hvd.rank() * 4 + 4]).backward()
            optimizer.step()
        return model
    both = trained([0, 1], 2, 0)
    for which, steps_before in ((0, 2), (1, 0)):  # the first has its turn two steps earlier
        alone = trained([which], 1, steps_before)
        for p, q in zip(both.parts[which].parameters(), alone.parameters()):
            assert torch.equal(p, q)


def check_exchange_now_averages():
    for make in (lambda model: hvd.DiLoCo(model, INNER["AdamW"](model.parameters()), sync_every=4, fragments=2),
                 lambda model: hvd.LocalSGD(INNER["AdamW"](model.parameters()), 4)):
        model = double_model()
        optimizer = make(model)
        for step in range(6):
            step_here(model, optimizer, step)
        average = hvd.allreduce(bits(model), name="bits")
        before = getattr(optimizer, "outer_optimizer", None) and copy.deepcopy(optimizer.outer_optimizer.state_dict())
        for _ in range(2):
            optimizer.exchange_now()
            torch.testing.assert_close(bits(model), average, rtol=1e-12, atol=1e-14)
        hvd.check_weights(model)
        if before:
            torch.testing.assert_close(optimizer.outer_optimizer.state_dict(), before, rtol=0, atol=0)


# Checkpoints

MAKE = {
    "DiLoCo": lambda model: hvd.DiLoCo(model, INNER["AdamW"](model.parameters()), sync_every=4, fragments=2, delay=3,
                                       alpha=0.25),
    "LocalSGD": lambda model: hvd.LocalSGD(INNER["AdamW"](model.parameters()), 4, delay=3),
}


def bits(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def saved_and_loaded(*states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("at", (0, 5, 7))
def check_a_resumed_run_is_the_unbroken_one_bit_for_bit(kind, at):
    model = double_model()
    optimizer = MAKE[kind](model)
    for step in range(at):
        step_here(model, optimizer, step)
    of_model, of_optimizer = saved_and_loaded(model.state_dict(), optimizer.state_dict())
    for step in range(at, 13):
        step_here(model, optimizer, step)
    resumed = double_model()
    other = MAKE[kind](resumed)
    resumed.load_state_dict(of_model)
    other.load_state_dict(of_optimizer)
    for step in range(at, 13):
        step_here(resumed, other, step)
    assert torch.equal(bits(model), bits(resumed))
    INNER["AdamW"](make_model().double().parameters()).load_state_dict(of_optimizer)


@pytest.mark.parametrize("kind", MAKE)
def check_the_state_is_broadcast_between_two_steps(kind):
    for at in (5, 7):
        model = double_model()
        optimizer = MAKE[kind](model)
        for step in range(at):
            step_here(model, optimizer, step)
        outer = getattr(optimizer, "outer_optimizer", None)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert getattr(optimizer, "outer_optimizer", None) is outer, "a scheduler may have it"
        for step in range(at, 12):
            step_here(model, optimizer, step)
        optimizer.exchange_now()
        hvd.check_weights(model)


@pytest.mark.parametrize("kind", MAKE)
def check_a_plain_state_begins_anew(kind):
    models = [double_model(), double_model()]
    used, fresh = [MAKE[kind](model) for model in models]
    plain = INNER["AdamW"](models[0].parameters()).state_dict()
    for step in range(5):
        step_here(models[0], used, step)
    used.load_state_dict(plain)
    models[0].load_state_dict(double_model().state_dict())
    for model, optimizer in zip(models, (used, fresh)):
        for step in range(9):
            step_here(model, optimizer, step)
    assert torch.equal(bits(models[0]), bits(models[1]))


def check_a_state_of_other_settings(caplog):
    model = double_model()
    local = MAKE["LocalSGD"](model)
    for step in range(5):
        step_here(model, local, step)
    of_local = local.state_dict()
    model = double_model()
    other = hvd.LocalSGD(INNER["AdamW"](model.parameters()), 4)
    other.load_state_dict(of_local)
    assert "is on its way in this state was sent with another sync_every, delay or fragments" in caplog.text
    for step in range(5, 8):
        step_here(model, other, step)
    hvd.check_weights(model)

    model = double_model()
    diloco = MAKE["DiLoCo"](model)
    for step in range(5):
        step_here(model, diloco, step)
    of_diloco = diloco.state_dict()
    other = hvd.DiLoCo(model, INNER["AdamW"](model.parameters()), sync_every=4, delay=1)
    other.load_state_dict(of_diloco)
    for p, q in zip(diloco.outer_optimizer.param_groups[0]["params"], other.outer_optimizer.param_groups[0]["params"]):
        assert torch.equal(p, q)
    for step in range(5, 9):
        step_here(model, other, step)
    other.exchange_now()
    hvd.check_weights(model)
    with pytest.raises(ValueError, match="hvd.DiLoCo: this is a state of hvd.LocalSGD"):
        other.load_state_dict(of_local)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="outer parameters of other parameters .* here: '0.bias' is in it alone"):
        MAKE["DiLoCo"](model).load_state_dict(of_diloco)


@pytest.mark.parametrize("kind", MAKE)
def check_all_ranks_go_on_from_rank_0(kind):
    model = double_model()
    optimizer = MAKE[kind](model)
    for step in range(7 if hvd.rank() == 0 else 0):
        if hvd.size() == 1:
            step_here(model, optimizer, step)
    if hvd.size() > 1:
        for step in range(7):
            step_here(model, optimizer, step)
        state = optimizer.state_dict()
        model, there = double_model(), model
        optimizer = MAKE[kind](model)
        if hvd.rank() == 0:
            model.load_state_dict(there.state_dict())
            optimizer.load_state_dict(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.check_weights(model)
    for step in range(7, 12):
        step_here(model, optimizer, step)
    optimizer.exchange_now()
    hvd.check_weights(model)


def check_what_was_on_its_way_is_dropped_in_another_epoch():
    for kind in MAKE:
        model = double_model()
        optimizer = MAKE[kind](model)
        for step in range(5):
            step_here(model, optimizer, step)
        hvd.barrier()  # what is on its way is so on all ranks
        hvd.shutdown()
        hvd.init()
        for step in range(5, 12):
            step_here(model, optimizer, step)
        optimizer.exchange_now()
        hvd.check_weights(model)
        assert bits(model).isfinite().all()


# Together with others

def check_a_step_that_a_grad_scaler_leaves_out_counts():
    last = hvd.size() - 1
    model, loop = double_model(), Loop(INNER["SGD"], 3, 0, OUTER["Nesterov"])
    optimizer = hvd.DiLoCo(model, INNER["SGD"](model.parameters()), sync_every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(8):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of_rank(model, step, hvd.rank()))
        (loss * (float("inf") if step in (0, 5) and hvd.rank() == last else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        loop.step(left_out_by=[last] if step in (0, 5) else ())
    loop.expect(model)


def check_ranks_of_a_host_train_together():
    """Ranks 0 and 1 average gradients; with three ranks, rank 2 is by itself."""
    hosts = {1: [[0]], 2: [[0, 1]], 3: [[0, 1], [2]]}[hvd.size()]
    sets = [hvd.global_process_set if len(host) == hvd.size() else hvd.add_process_set(host) for host in hosts]
    mine = next(i for i, host in enumerate(hosts) if hvd.rank() in host)
    model = double_model()
    plain = INNER["SGD"](model.parameters())
    optimizer = hvd.DiLoCo(model, plain, sync_every=2, inner_set=sets[mine])
    models = [double_model() for _ in hosts]
    inner = [INNER["SGD"](m.parameters()) for m in models]
    outer = [torch.nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    outer_optimizer = OUTER["Nesterov"](outer)
    for step in range(5):
        step_here(model, optimizer, step)
        for host, m, o in zip(hosts, models, inner):
            o.zero_grad()
            (sum(loss_of_rank(m, step, rank) for rank in host) / len(host)).backward()
            o.step()
        if step % 2 == 1:
            with torch.no_grad():
                for p, *of_hosts in zip(outer, *[m.parameters() for m in models]):
                    p.grad = sum(len(host) * (p.detach() - q) for host, q in zip(hosts, of_hosts)) / hvd.size()
                outer_optimizer.step()
                for p, *of_hosts in zip(outer, *[m.parameters() for m in models]):
                    for q in of_hosts:
                        q.copy_(p)
    for p, q in zip(model.parameters(), models[mine].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    step_here(model, optimizer, 5)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.1, "the scheduler's optimizer shares the groups"
    optimizer.exchange_now()
    hvd.check_weights(model)
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("compression", (hvd.Compression.topk(0.05), hvd.Compression.int8(), hvd.Compression.int4()),
                         ids=str)
def check_compression_loses_nothing(compression):
    begin(1)
    try:
        model = torch.nn.Module()
        for name in COMPRESSED:
            zeros = torch.zeros(gradient(name, 0, 0).shape)
            model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(zeros))
        parameters = list(model.parameters())
        optimizer = hvd.DiLoCo(model, torch.optim.SGD(parameters, lr=1.0), OUTER["plain"], sync_every=3, fragments=3,
                               compression=compression)
        for step in range(12):
            optimizer.zero_grad()
            sum((p * gradient(name, step, hvd.rank())).sum() for name, p in zip(COMPRESSED, parameters)).backward()
            optimizer.step()
        saved = hvd.gather_residuals(optimizer)
        if hvd.size() == 1:
            return
        assert hvd.compression_stats(optimizer)["ratio"] < 0.6
        assert optimizer.state_dict()[RESIDUALS]["tensors"] == saved["tensors"]
        outer = optimizer.outer_optimizer.param_groups[0]["params"]
        for i, (name, p) in enumerate(zip(COMPRESSED, outer)):
            left = torch.zeros(p.numel())
            for piece in saved["tensors"][f"{name.replace('.', '_')}.outer"]["pieces"]:
                left[piece["first"]:piece["first"] + len(piece["values"])] += piece["values"]
            last = (12 - (i + 1)) // 3 * 3 + i + 1  # steps until its last turn
            expected = sum(gradient(name, step, rank) for step in range(last) for rank in range(hvd.size()))
            torch.testing.assert_close(-p.detach() * hvd.size() + left.view_as(p), expected, rtol=0, atol=1e-3)
    finally:
        end()
        hvd.init()


# What is refused

def check_bad_input():
    model = make_model()
    parameters = list(model.parameters())

    def diloco(**options):
        return hvd.DiLoCo(model, plain_sgd(model), **options)
    for options, text in (({"sync_every": 0}, "sync_every=0: give an int, 1 or more"), ({"sync_every": 2.0}, "2.0"),
                          ({"fragments": 0}, "fragments=0"), ({"fragments": 5, "sync_every": 4}, "at most as many"),
                          ({"delay": -1}, "delay=-1"), ({"delay": 4, "sync_every": 4}, "smaller delay"),
                          ({"alpha": 1.5}, "alpha=1.5: give a number, from 0 to 1"), ({"alpha": -0.1}, "alpha"),
                          ({"outer_optimizer": plain_sgd(model)}, "outer_optimizer must be a function"),
                          ({"fragments": [parameters[:2], parameters[1:]]}, "twice"),
                          ({"fragments": 2.0}, "fragments=2.0: give an int"),
                          ({"fragments": parameters}, r"fragments\[0\] is a Parameter: give lists"),
                          ({"fragments": [parameters, [torch.ones(1)]]}, r"fragments\[1\]\[0\] is not a parameter")):
        with pytest.raises(ValueError, match=text):
            diloco(**options)
    for wrong in (-1, 0, 1.5, True, "4"):
        with pytest.raises(ValueError, match="hvd.LocalSGD: sync_every="):
            hvd.LocalSGD(plain_sgd(model), wrong)
    for made in (hvd.LocalSGD(plain_sgd(model), 2), hvd.DistributedOptimizer(plain_sgd(model))):
        with pytest.raises(ValueError, match="exchanges with other ranks already"):
            hvd.LocalSGD(made, 2)
    optimizer = diloco(fragments=[parameters[:2]])
    with pytest.raises(ValueError, match="2.weight is in none"):
        my_loss(model, 0).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="6 parameters require gradients, which cannot be cut into 7"):
        diloco(fragments=7).step()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(diloco())


@pytest.mark.parametrize("kind", MAKE)
def check_join_is_refused_while_there_is_one(kind):
    model = double_model()
    optimizer = MAKE[kind](model)
    step_here(model, optimizer, 0)
    with pytest.raises(ValueError, match=f"hvd.join: hvd.{kind} averages over all ranks"):
        hvd.join()
    del optimizer
    hvd.join()


def check_parameters_that_come_later():
    model = make_model()
    parameters = list(model.parameters())
    local = hvd.LocalSGD(torch.optim.SGD(parameters[:-1], lr=0.1), 2)
    train(model, local, 1)
    local.load_state_dict(local.state_dict())
    local.add_param_group({"params": parameters[-1:]})
    with pytest.raises(ValueError, match="parameter 5 has come to require a gradient, or to the optimizer"):
        train(model, local, 1)
    model = make_model()
    model[0].bias.requires_grad_(False)
    optimizer = hvd.DiLoCo(model, plain_sgd(model), sync_every=2)
    frozen = model[0].bias.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].bias, frozen)
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="0.bias has come to require a gradient"):
        train(model, optimizer, 2)


def check_ranks_that_differ():
    if hvd.size() == 1:
        return
    mine = hvd.rank() % 2
    for text, make in (("sync_every is 2 on", lambda model: hvd.LocalSGD(plain_sgd(model), 2 + mine)),
                       ("delay is 0 on", lambda model: hvd.DiLoCo(model, plain_sgd(model), delay=mine)),
                       ("outer_optimizer is", lambda model: hvd.DiLoCo(
                           model, plain_sgd(model), lambda params: torch.optim.SGD(params, lr=1.0 + mine))),
                       ("compression is", lambda model: hvd.DiLoCo(
                           model, plain_sgd(model),
                           compression=hvd.Compression.int8() if mine else hvd.Compression.none))):
        model = make_model()
        optimizer = make(model)
        for _ in range(2):  # the second step must not go on
            with pytest.raises(ValueError, match=f"the ranks have different settings: .*{text}"):
                train(model, optimizer, 1)
    model = make_model()
    with torch.no_grad():
        model[0].bias += mine
    optimizer = hvd.DiLoCo(model, plain_sgd(model))
    with pytest.raises(ValueError, match="hvd.DiLoCo: the ranks do not go on from the same place: digest of the outer "
                                         "parameters is .* Call broadcast_parameters and broadcast_optimizer_state"):
        train(model, optimizer, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 1)
    optimizer.exchange_now()
    hvd.check_weights(model)

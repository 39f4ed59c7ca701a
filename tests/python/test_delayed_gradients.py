"""DelayedGradients against a loop in one process, which keeps gradients for as many steps."""
import io
import itertools

import pytest
import torch
from compressed import COMPRESSED, begin, end, gradient

import lightcc.torch as hvd
import ranks
from lightcc.compress.residuals import KEY as RESIDUALS
from training import OPTIMIZERS, data, expect_equal, loss_of, make_model, my_loss

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.torch_sizes]


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Reference:
    """A model and its optimizer, whose gradients wait."""

    def __init__(self, make, delay, compensation=0.0, warmup=0):
        self.model = make_model()
        self.optimizer = make(self.model.parameters())
        self.delay, self.compensation, self.warmup = delay, compensation, warmup
        self.waiting = []
        self.steps = 0

    def step(self, losses, edit=lambda grads: True):
        """losses: of this step. edit: what is done to the gradients that are applied, and whether they are."""
        self.optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        self.waiting.append((grads, [p.detach().clone() for p in parameters]))
        delay = self.delay if self.steps >= self.warmup else 0
        self.steps += 1
        if len(self.waiting) <= delay:
            return
        grads, weights = self.waiting.pop(0)
        for p, grad, then in itertools.zip_longest(parameters, grads, weights):  # one that came since has none
            p.grad = None if grad is None else grad + self.compensation * grad * grad * (p.detach() - then)
        if edit([p.grad for p in parameters]):
            self.optimizer.step()

    def train(self, steps, passes=1):
        for step in range(self.steps, self.steps + steps):
            self.step([loss_of(self.model, *data(passes * step + i)) for i in range(passes)])
        return self


def train(model, optimizer, steps, passes=1, set_to_none=True):
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(passes):
            my_loss(model, passes * step + i).backward()
        optimizer.step()


def bits(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", ({}, {"compression": hvd.Compression.fp16}, {"groups": 2}), ids=str)
def check_no_delay_is_distributed_optimizer_bit_for_bit(kind, options):
    results = []
    for wrap in (hvd.DistributedOptimizer, lambda *args, **named: hvd.DelayedGradients(*args, delay=0, **named)):
        model = make_model()
        optimizer = wrap(OPTIMIZERS[kind](model.parameters()), named_parameters=model.named_parameters(), **options)
        train(model, optimizer, range(5))
        results.append(bits(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind, delay, compensation, warmup, passes, set_to_none", [
    ("SGD", 1, 0.0, 0, 1, True), ("SGD", 1, 0.3, 0, 1, False), ("SGD", 2, 0.3, 0, 2, True),
    ("Adam", 1, 0.0, 3, 1, True), ("AdamW", 3, 0.0, 0, 1, True), ("SGD", 2, 0.3, 2, 1, False)])
def check_equals_the_loop(kind, delay, compensation, warmup, passes, set_to_none):
    model, reference = make_model(), Reference(OPTIMIZERS[kind], delay, compensation, warmup)
    optimizer = hvd.DelayedGradients(OPTIMIZERS[kind](model.parameters()), delay, compensation, warmup,
                                     backward_passes_per_step=passes)
    train(model, optimizer, range(8), passes, set_to_none)
    expect_equal(model, reference.train(8, passes).model)


@pytest.mark.parametrize("delay", (1, 2))
@pytest.mark.parametrize("saved", (False, True))
def check_parameters_that_are_unfrozen_or_added_later(delay, saved):
    models = [make_model(), make_model()]
    for model in models:
        model[0].requires_grad_(False)
    made = [OPTIMIZERS["SGD"](model[:4].parameters()) for model in models]
    optimizer, reference = hvd.DelayedGradients(made[0], delay, 0.3), Reference(lambda _: made[1], delay, 0.3)
    reference.model = models[1]
    train(models[0], optimizer, range(3))
    reference.train(3)
    if saved:
        optimizer.state_dict()  # which waits for what is under way
    for model, one in zip(models, (optimizer, made[1])):
        model[0].requires_grad_(True)
        one.add_param_group({"params": list(model[4].parameters())})
        model[4].zero_grad()  # these have no gradient of the steps before
    train(models[0], optimizer, range(3, 7))
    expect_equal(models[0], reference.train(4).model)


def check_the_first_steps_apply_nothing():
    model = make_model()
    before = bits(model)
    optimizer = hvd.DelayedGradients(OPTIMIZERS["Adam"](model.parameters()), delay=2)
    train(model, optimizer, range(2))
    assert torch.equal(bits(model), before) and not optimizer.state
    train(model, optimizer, range(2, 3))
    assert not torch.equal(bits(model), before) and len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("delay", (1, 2))
@pytest.mark.parametrize("who", ("each rank", "rank 0"))
def check_a_resumed_run_is_the_unbroken_one_bit_for_bit(delay, who):
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["Adam"](model.parameters()), delay, compensation=0.5)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(4, 8))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(7)
    resumed = torch.nn.Sequential(*[type(layer)(*([layer.in_features, layer.out_features] if hasattr(
        layer, "in_features") else [])) for layer in make_model()])
    other = hvd.DelayedGradients(OPTIMIZERS["Adam"](resumed.parameters()), delay, compensation=0.5)
    if who == "each rank" or hvd.rank() == 0:
        resumed.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
    if who == "rank 0":
        hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(other, root_rank=0)
    train(resumed, other, range(4, 8))
    assert torch.equal(bits(model), bits(resumed))
    plain = OPTIMIZERS["Adam"](make_model().parameters())
    plain.load_state_dict(saved[1])  # a plain one does not look at what is under way


def check_the_state_is_broadcast_between_two_steps():
    model, reference = make_model(), Reference(OPTIMIZERS["Adam"], 1)
    optimizer = hvd.DelayedGradients(OPTIMIZERS["Adam"](model.parameters()))
    for steps in (range(3), range(3, 6)):
        train(model, optimizer, steps)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expect_equal(model, reference.train(6).model)


def check_a_state_of_another_delay_is_dropped(caplog):
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()), 2)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    other = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()), 1)
    other.load_state_dict(state)
    assert "delay=2, and the optimizer has delay=1" in caplog.text
    before = bits(model)
    train(model, other, range(1))
    assert torch.equal(bits(model), before)


@pytest.mark.parametrize("explicitly", (False, True))
def check_a_grad_scaler_skips_later_on_all_ranks(explicitly):
    """The loss of step 3 is infinite on one rank. The scale grows and shrinks meanwhile."""
    model, reference = make_model(), Reference(OPTIMIZERS["SGD"], 1)
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(9):
        optimizer.zero_grad()
        loss = scaler.scale(my_loss(model, step))
        (loss * (float("inf") if step == 3 and hvd.rank() == hvd.size() - 1 else 1)).backward()
        if explicitly:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        reference.step([loss_of(reference.model, *data(step))], lambda grads, step=step: step != 4)
    assert scales == [8, 16, 16, 32, 16, 16, 32, 32, 64], "it was step 4 that found step 3's gradient"
    expect_equal(model, reference.model)


@pytest.mark.parametrize("explicitly", (False, True))
def check_gradients_of_a_loss_scaled_by_zero_are_not_applied(explicitly):
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()), compensation=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=0.0)
    weights = [bits(model)]
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(my_loss(model, step)).backward()
        if explicitly:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update(8.0)
        weights.append(bits(model))
    assert [torch.equal(weights[0], other) for other in weights[1:]] == [True, True, False]
    hvd.check_weights(model)


def check_clipped_between_synchronize_and_step():
    model, reference = make_model(), Reference(OPTIMIZERS["SGD"], 1)
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()))

    def clip(grads):
        norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
        for grad in grads:
            grad.mul_(min(1.0, 0.1 / (norm + 1e-6)))
        return True
    for step in range(5):
        optimizer.zero_grad()
        my_loss(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.step([loss_of(reference.model, *data(step))], clip)
    expect_equal(model, reference.model)


@pytest.mark.parametrize("saved", [False, True], ids=["", "arrived for a checkpoint"])
def check_gradients_that_are_parts_of_a_buffer_stay_there(saved):
    weight = torch.nn.Parameter(torch.zeros(2))
    flat = torch.zeros(3)
    weight.grad = flat[1:]
    optimizer = hvd.DelayedGradients(torch.optim.SGD([weight], lr=1.0))
    for step in range(4):
        flat.zero_()
        (weight * (step + 1) * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        mean = step * (hvd.size() + 1) / 2
        assert flat.tolist() == [0, mean, mean]
        before = weight.detach().clone()
        flat.mul_(2)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(weight.detach(), before - 2 * mean)
        if saved:
            optimizer.state_dict()


def check_sparse_gradients():
    weights = []
    for delayed in (True, False):
        table = torch.nn.Embedding(6, 3, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        if delayed:
            optimizer = hvd.DelayedGradients(optimizer, compensation=0.2)
        waiting = []
        for step in range(4):
            optimizer.zero_grad()
            who = [hvd.rank()] if delayed else range(hvd.size())
            for rank in who:
                loss = table(torch.tensor([(rank + step) % 6, rank])).square().sum()
                (loss if delayed else loss / hvd.size()).backward()
            if delayed and step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            if not delayed:
                waiting.append((table.weight.grad.coalesce().to_dense(), table.weight.detach().clone()))
                if step == 0:
                    continue
                grad, then = waiting.pop(0)
                table.weight.grad = grad + 0.2 * grad * grad * (table.weight.detach() - then)
            optimizer.step()
        weights.append(table.weight.detach())
    torch.testing.assert_close(*weights)


def check_what_was_under_way_is_dropped_in_another_epoch():
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()))
    train(model, optimizer, range(2))
    if hvd.rank() == 0:
        optimizer.state_dict()  # which has it here, and not elsewhere
    hvd.barrier()  # what is on its way is so on all ranks
    hvd.shutdown()
    hvd.init()
    before = bits(model)
    train(model, optimizer, range(2, 3))
    assert torch.equal(bits(model), before)
    train(model, optimizer, range(3, 4))
    hvd.check_weights(model)
    assert not torch.equal(bits(model), before)


def expect_a_new_beginning(model, optimizer, step):
    """Nothing is under way: the next step applies nothing, and then all ranks go on alike."""
    before = bits(model)
    train(model, optimizer, range(step, step + 1))
    assert torch.equal(bits(model), before)
    train(model, optimizer, range(step + 1, step + 4))
    hvd.check_weights(model)


def check_what_was_under_way_is_dropped_after_a_join():
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()))
    train(model, optimizer, range(3 + hvd.rank()))
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expect_a_new_beginning(model, optimizer, 5)


def check_a_join_soon_after_a_load():
    model = make_model()
    optimizer = hvd.DelayedGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1 + hvd.rank()))
    hvd.broadcast_parameters(model.state_dict(), hvd.join())
    expect_a_new_beginning(model, optimizer, 4)


def check_a_warmup_goes_on_after_a_join():
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()), warmup=4 + hvd.size())
    train(model, optimizer, range(1 + hvd.rank()))
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), last)
    applied = []
    for step in range(6):
        before = bits(model)
        train(model, optimizer, range(step, step + 1))
        applied.append(not torch.equal(before, bits(model)))
    assert applied == [True, True, True, True, False, True], "of the warmup's steps the last rank had made size()"
    optimizer.state_dict()  # waits for what is under way: the next check ends the job, maybe before other ranks step


@pytest.mark.parametrize("compression", (hvd.Compression.topk(0.05), hvd.Compression.int8()), ids=str)
def check_compression_loses_nothing(compression):
    """What was delivered, is under way and is left behind add up to all gradients."""
    begin(1)
    try:
        model = {name: torch.nn.Parameter(torch.zeros(gradient(name, 0, 0).shape)) for name in COMPRESSED}
        optimizer = hvd.DelayedGradients(torch.optim.SGD(model.values(), lr=1.0), named_parameters=model.items(),
                                         compression=compression, op=hvd.Sum, delay=2)
        total = {name: torch.zeros_like(p) for name, p in model.items()}
        for step in range(6):
            optimizer.zero_grad()
            sum((p * gradient(name, step, hvd.rank())).sum() for name, p in model.items()).backward()
            optimizer.step()
            for name in model:
                total[name] += sum(gradient(name, step, rank) for rank in range(hvd.size()))
        saved = hvd.gather_residuals(optimizer)
        state = optimizer.state_dict()
        if hvd.size() > 1:
            assert hvd.compression_stats(optimizer)["ratio"] < 0.6 and state[RESIDUALS]["tensors"] == saved["tensors"]
            assert len(saved["tensors"]) == 3 * len(COMPRESSED), "each slot keeps its own"
        under_way = state["lightcc_delayed"]["under_way"]
        assert len(under_way) == 2
        for i, (name, p) in enumerate(model.items()):
            left = torch.zeros(p.numel())
            for slot in ("", ".slot1", ".slot2"):
                for piece in saved["tensors"][name + slot]["pieces"] if saved else ():
                    left[piece["first"]:piece["first"] + len(piece["values"])] += piece["values"]
            arrived = sum(slot["gradients"][i] for slot in under_way)
            torch.testing.assert_close(arrived - p.detach() + left.view_as(p), total[name], rtol=0, atol=1e-3)
    finally:
        end()
        hvd.init()


def check_process_set():
    first = hvd.add_process_set([0]) if hvd.size() == 3 else hvd.global_process_set
    if first is not hvd.global_process_set:
        rest = hvd.add_process_set([1, 2])
        mine = first if hvd.rank() == 0 else rest
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DelayedGradients(torch.optim.SGD([weight], lr=1.0), process_set=mine)
        for step in range(3):
            optimizer.zero_grad()
            (weight * (hvd.rank() + step)).sum().backward()
            optimizer.step()
        assert weight.item() == (-1 if hvd.rank() == 0 else -(1.5 + 2.5))
        hvd.remove_process_set(rest)
        hvd.remove_process_set(first)


def check_bad_input():
    def made(**options):
        return hvd.DelayedGradients(torch.optim.SGD(make_model().parameters(), lr=0.1), **options)
    for options, text in (({"delay": -1}, "delay=-1: give an int, 0 or more"), ({"delay": 1.0}, "delay=1.0"),
                          ({"delay": True}, "delay=True"), ({"warmup": -1}, "warmup=-1"),
                          ({"compensation": -0.1}, "compensation=-0.1"), ({"compensation": float("nan")}, "nan"),
                          ({"op": hvd.Adasum}, "Adasum"), ({"op": 99}, "op must be")):
        with pytest.raises(ValueError, match=text):
            made(**options)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DelayedGradients(torch.optim.LBFGS(make_model().parameters()))
    with pytest.raises(ValueError, match="already"):
        hvd.DelayedGradients(made())
    model = make_model()
    for periodic in (hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 2),
                     hvd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1))):
        for wrap in (hvd.DelayedGradients, hvd.DistributedOptimizer):
            with pytest.raises(ValueError, match="one of LocalSGD or DiLoCo already"):
                wrap(periodic)
    optimizer = made()
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="register_local_var"):
        optimizer.register_local_var(next(iter(optimizer.param_groups[0]["params"])))
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match="after synchronize"):
        optimizer.step()


def check_ranks_that_differ():
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()), delay=1 + hvd.rank() % 2)
    with pytest.raises(ValueError, match=r"hvd.DelayedGradients: the ranks have different settings: delay is 1 on "
                                         r"rank.* 2 on rank 1. Give"):
        train(model, optimizer, range(1))
    hvd.barrier()


def check_a_gradient_that_is_changed_on_its_way():
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = hvd.DelayedGradients(OPTIMIZERS["SGD"](model.parameters()))
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    my_loss(model, 2).backward()
    hvd.barrier()
    with pytest.raises((RuntimeError, hvd.HorovodInternalError), match="changed"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    hvd.shutdown()
    hvd.init()

"""DistributedOptimizer in a script: schedulers, hooks, closures, loss scaling, and the order of calls."""
import contextlib
import copy
import warnings

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import data, expect_equal, loss_of, make_model, my_loss, pair, sgd, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Schedulers, hooks, scaling, closures

@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def check_schedulers(before, op):
    def make(optimizer):
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2])

    with no_warnings():
        model, reference = make_model(), make_model()
        plain, theirs = sgd(reference), sgd(model)
        schedule = make(plain)
        mine = make(theirs) if before else None
        optimizer = hvd.DistributedOptimizer(theirs, op=getattr(hvd, op))
        mine = mine or make(optimizer)
        for step in range(4):
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer, 1)
            train_alone(reference, plain, 1)
            mine.step()
            schedule.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == mine.get_last_lr()[0]
        if op == "Average":
            expect_equal(model, reference)


def check_scheduler_before_the_first_step_warns_as_ever():
    for before in (True, False):
        plain = sgd(make_model())
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1) if before else None
        optimizer = hvd.DistributedOptimizer(plain)
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.warns(UserWarning, match="lr_scheduler.step"):
            schedule.step()


def check_step_hooks_run_once_and_see_reduced_gradients():
    model, reference = make_model(), make_model()
    plain = sgd(model)
    seen = []
    plain.register_step_pre_hook(lambda *_: seen.append(model[0].bias.grad.clone()))
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(model, optimizer, 1)
    train_alone(reference, sgd(reference), 1)
    assert seen[1:] == ["pre", "post"]
    torch.testing.assert_close(seen[0], reference[0].bias.grad)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def check_scaled_gradients(fused):
    """torch.amp on the CPU, with a step that overflows on one rank and is left out by all."""
    model, optimizer, reference, plain = pair(lambda model: sgd(model, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with no_warnings():
        for step in range(4):
            optimizer.zero_grad()
            loss = my_loss(model, step)
            if step == 2 and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            if step != 2:
                plain.zero_grad()
                loss_of(reference, *data(step)).backward()
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                plain.step()
    assert scaler.get_scale() == 512.0
    expect_equal(model, reference)


def check_lbfgs():
    """The ranks' own losses differ; all must take the same way, also along its line search."""
    for search in (None, "strong_wolfe"):
        torch.manual_seed(10)
        model = torch.nn.Linear(5, 3, dtype=torch.float64)
        reference = copy.deepcopy(model)
        optimizer, plain = (torch.optim.LBFGS(m.parameters(), max_iter=6, line_search_fn=search)
                            for m in (model, reference))
        optimizer = hvd.DistributedOptimizer(optimizer)

        def closure(optimizer, model, x, y):
            optimizer.zero_grad()
            loss = loss_of(model, x.double(), y.double())
            loss.backward()
            return loss

        for step in range(2):
            x, y = data(step)
            rows = slice(hvd.rank(), None, hvd.size())
            mine = optimizer.step(lambda: closure(optimizer, model, x[rows], y[rows]))
            theirs = plain.step(lambda: closure(plain, reference, x, y))
            torch.testing.assert_close(mine, theirs)
        expect_equal(model, reference, rtol=1e-6, atol=1e-6)


def check_closure_that_returns_a_number_or_nothing():
    model, optimizer, reference, plain = pair()
    for step, result in enumerate((3.5, None)):
        def closure(step=step, result=result):
            optimizer.zero_grad()
            my_loss(model, step).backward()
            return result
        assert optimizer.step(closure=closure) == result
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


# The order of calls

def check_step_before_any_backward():
    model, optimizer, reference, _ = pair()
    with no_warnings():
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    expect_equal(model, reference)


def check_synchronize_alone_and_twice():
    model, optimizer, reference, plain = pair()
    optimizer.synchronize()
    optimizer.zero_grad()
    my_loss(model, 0).backward()
    optimizer.synchronize()
    optimizer.synchronize()
    with no_warnings(), optimizer.skip_synchronize():
        optimizer.step()
    train_alone(reference, plain, 1)
    expect_equal(model, reference)


def check_a_step_left_out_after_synchronize():
    model, optimizer, reference, plain = pair()
    my_loss(model, 5).backward()
    optimizer.synchronize()
    with no_warnings():
        train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_skip_synchronize_ends_with_an_exception():
    model, optimizer, reference, plain = pair()
    with pytest.raises(KeyError), optimizer.skip_synchronize():
        raise KeyError
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken")


def check_an_exception_in_backward():
    """The upper layers' gradients are on their way, the lower ones have none; the next step works."""
    model, optimizer, reference, plain = pair()
    train(model, optimizer, 1)
    train_alone(reference, plain, 1)
    optimizer.zero_grad()
    x, y = data(0)
    with pytest.raises(ArithmeticError):
        torch.nn.functional.mse_loss(model[2:](Breaks.apply(model[:2](x))), y).backward()
    optimizer.synchronize()
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_an_exception_in_a_closure():
    model, optimizer, reference, plain = pair()

    def closure():
        raise ArithmeticError("broken")
    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)


def check_shutdown_and_init_between_steps():
    model, optimizer, reference, plain = pair()
    for _ in range(3):
        train(model, optimizer, 1)
        train_alone(reference, plain, 1)
        hvd.shutdown()
        hvd.init()
    expect_equal(model, reference)


def check_passes_change_on_the_way():
    model, optimizer, reference, plain = pair()
    for passes in (1, 3, 2, 1):
        optimizer.set_backward_passes_per_step(passes)
        train(model, optimizer, 2, passes)
        train_alone(reference, plain, 2, passes)
    expect_equal(model, reference)


def check_a_gradient_that_could_not_start_does_not_pass_for_reduced():
    if hvd.size() == 1:
        return
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("taken", w)])
    w.sum().backward()
    optimizer.step()  # from now on the ranks know that this gradient is dense, and need not ask each other
    assert w.tolist() == [0, 0]
    w.data.fill_(1)
    w.grad = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="taken")  # in flight until the other ranks come
        for call in (w.sum().backward, optimizer.step):
            with pytest.raises(ValueError, match="taken"):
                call()
        assert w.tolist() == [1, 1]
    hvd.barrier()
    assert (hvd.synchronize(handle) if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name="taken")).item() == 1
    w.grad = None
    (w * hvd.rank()).sum().backward()
    optimizer.step()
    assert torch.equal(w.detach(), torch.full((2,), 1 - (hvd.size() - 1) / 2))

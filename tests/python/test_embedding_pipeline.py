"""Updates that come late: against plain torch with delayed gradients, and what ends, saves, drops or refuses them."""
import copy
import math
import os
import warnings

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")
DIM, KEYS = 3, 12


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def embedding(name, optimizer=E.SGD, lr=0.1, **options):
    module = E.HashEmbedding(DIM, name=name, dtype=torch.float64, init=E.Normal(0, 1), **options)
    return module, optimizer(E.tables(module), lr=lr, op=hvd.Sum)


def batch(step, most=9):
    """This rank's ids of a step: the same ones over all ranks, whatever their number."""
    rng = np.random.default_rng(step)
    return torch.tensor(rng.integers(0, KEYS, most))[hvd.rank()::hvd.size()]


def loss_of(rows, ids):
    """Not linear: a gradient that is late is another one."""
    return ((rows - ids.unsqueeze(1)).square() * (1 + ids % 3).unsqueeze(1)).sum()


def train(module, sparse, steps, starts=False, prefetches=False):
    for step in steps:
        ids = batch(step)
        loss = loss_of(module(ids), ids)
        if prefetches and step + 1 < steps.stop:
            E.prefetch([(module, batch(step + 1))])
        if starts:
            sparse.start()
        loss.backward()
        sparse.step()


def rows_of(module):
    """All ranks' rows, all columns, bit for bit."""
    mine = {int(row[0]): [np.asarray(one).tobytes() for one in row]
            for part in slices(module.table, 64) for row in zip(*part.values())}
    return {key: row for part in hvd.allgather_object(mine) for key, row in part.items()}


def weights_of(module):
    module.eval()
    read = module(torch.arange(KEYS)).detach().clone()
    module.train()
    return read


def expected(first, steps, depth, rule, strength=None):
    """Plain torch: the gradients of all ranks at the weights of the lookup, applied depth steps later."""
    weights, optimizer = first.clone().requires_grad_(), None
    optimizer = rule([weights])
    waiting, touched = [], []

    def apply():
        parts, then, keys = waiting.pop(0)
        if strength is not None:
            parts = [part + strength * part * part * (weights.detach() - then) for part in parts]
        before = weights.detach().clone()
        weights.grad = sum(parts)
        optimizer.step()
        untouched = [key for key in range(KEYS) if key not in keys]
        with torch.no_grad():
            weights[untouched] = before[untouched]
    for step in steps:
        parts, keys = [], set()
        for rank in range(hvd.size()):
            rng = np.random.default_rng(step)
            ids = torch.tensor(rng.integers(0, KEYS, 9))[rank::hvd.size()]
            parts.append(torch.autograd.grad(loss_of(weights[ids], ids), weights)[0])
            keys |= set(ids.tolist())
        waiting.append((parts, weights.detach().clone(), keys))
        if len(waiting) > depth:
            apply()
        touched.append(keys)
    late = weights.detach().clone()
    while waiting:
        apply()
    return late, weights.detach()


@pytest.mark.parametrize("optimizer", [E.SGD, E.SparseAdam, E.GroupAdagrad])
def check_depth_0_is_exact(optimizer):
    plain, of_plain = embedding("depth", optimizer)
    train(plain, of_plain, range(8))
    known = rows_of(plain)
    plain.table.close()
    same, inner = embedding("depth", optimizer)
    sparse = E.Pipeline(inner)
    train(same, sparse, range(8), starts=True)
    assert rows_of(same) == known and sparse.waiting == 0


@pytest.mark.parametrize("starts, prefetches", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("optimizer, rule", [(E.SGD, lambda some: torch.optim.SGD(some, lr=0.05)),
                                             (E.Adagrad, lambda some: torch.optim.Adagrad(some, lr=0.05))])
def check_it_is_torch_with_late_gradients(optimizer, rule, depth, starts, prefetches):
    module, inner = embedding("late", optimizer, lr=0.05)
    sparse = E.Pipeline(inner, depth=depth)
    late, finished = expected(weights_of(module), range(7), depth, rule)
    train(module, sparse, range(7), starts, prefetches)
    torch.testing.assert_close(weights_of(module), late, rtol=1e-10, atol=1e-12)
    assert sparse.waiting == depth
    sparse.finish()
    torch.testing.assert_close(weights_of(module), finished, rtol=1e-10, atol=1e-12)
    assert sparse.waiting == 0 and not torch.equal(late, finished)
    sparse.finish()
    torch.testing.assert_close(weights_of(module), finished, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def check_compensation_is_that_of_the_paper(depth, starts):
    module, inner = embedding("compensated", lr=0.02)
    sparse = E.Pipeline(inner, depth, compensation="dc", strength=0.3)
    first, rule = weights_of(module), lambda some: torch.optim.SGD(some, lr=0.02)  # noqa: E731
    late, finished = expected(first, range(7), depth, rule, strength=0.3)
    plain, _ = expected(first, range(7), depth, rule)
    train(module, sparse, range(7), starts)
    torch.testing.assert_close(weights_of(module), late, rtol=1e-10, atol=1e-12)
    sparse.finish()
    torch.testing.assert_close(weights_of(module), finished, rtol=1e-10, atol=1e-12)
    assert (late - plain).abs().max() > 1e-6


def corrected(first, steps, depth, lr, strength):
    """NumPy, in float64: each rank's gradients of loss_of, less what it has sent for the same keys in the `depth` steps
    before; then SGD. Returns the weights after the last of the steps, and after all updates."""
    weights, waiting, sent, late = first.numpy().copy(), [], [], None
    for number in range(len(steps) + depth):
        if number == len(steps):
            late = weights.copy()
        if number < len(steps):
            waiting.append(gradients_of_ranks(weights, steps[number]))
        if number >= depth:
            sent.append([gradient - strength * touched * sum(before[rank] for before in sent[-depth:])
                         for rank, (touched, gradient) in enumerate(waiting.pop(0))])
            weights = weights - lr * sum(sent[-1])
    return late, weights


def gradients_of_ranks(weights, step):
    """Of each rank: 1 for a key that it looks up, else 0, and the gradient of loss_of."""
    parts = []
    for rank in range(hvd.size()):
        ids = np.random.default_rng(step).integers(0, KEYS, 9)[rank::hvd.size()]
        gradient = np.zeros_like(weights)
        np.add.at(gradient, ids, 2 * (1 + ids % 3)[:, None] * (weights[ids] - ids[:, None]))
        parts.append((np.isin(np.arange(KEYS), ids)[:, None] * 1.0, gradient))
    return parts


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def check_corr_takes_off_what_was_sent_in_between(depth, starts):
    module, inner = embedding("corrected", lr=0.02)
    sparse = E.Pipeline(inner, depth, compensation="corr", strength=0.3)
    first = weights_of(module)
    late, finished = corrected(first, range(7), depth, 0.02, 0.3)
    plain, _ = corrected(first, range(7), depth, 0.02, 0.0)
    train(module, sparse, range(7), starts)
    np.testing.assert_allclose(weights_of(module).numpy(), late, rtol=1e-10, atol=1e-12)
    sparse.finish()
    np.testing.assert_allclose(weights_of(module).numpy(), finished, rtol=1e-10, atol=1e-12)
    assert np.abs(late - plain).max() > 1e-2


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def check_corr_is_not_late_where_the_curvature_is_strength_by_lr(depth, lookups):
    """Rows that all ranks train in each step, in one lookup or in two: those of SGD that is not late."""
    lr, strength = 0.05, 0.4
    curvature = strength / lr / hvd.size() / lookups  # of one rank's loss in one lookup
    module, inner = embedding("parabola", lr=lr)
    late, plain = E.Pipeline(inner, depth, "corr", strength), embedding("parabola plain", lr=lr)
    ids, goal = torch.arange(KEYS), torch.linspace(-1, 1, DIM, dtype=torch.float64)
    first = [weights_of(one).clone() for one in (module, plain[0])]
    for _ in range(6):
        for one, optimizer in ((module, late), plain):
            sum((curvature / 2 * (one(ids) - goal).square()).sum() for _ in range(lookups)).backward()
            optimizer.step()
    late.finish()
    way = [weights_of(one) - goal for one in (module, plain[0])]
    torch.testing.assert_close(way[0] / (first[0] - goal), way[1] / (first[1] - goal), rtol=1e-9, atol=1e-12)
    assert ((way[1] / (first[1] - goal)) - (1 - strength) ** 6).abs().max() < 1e-9


def check_corr_of_strings_and_of_keys_that_come_and_go():
    """What was sent for other keys, or by an update that was refused, is no part of it."""
    module = E.HashEmbedding(1, name="corr strings", strings=True, init=E.Zeros(), dtype=torch.float64)
    sparse = E.Pipeline(E.SGD(E.tables(module), lr=1.0, op=hvd.Sum), 1, "corr", 0.5)
    for words, scale in ((["a", "b"], 1.0), (["b"], 1.0), (["a", "c"], 1.0), (["c"], math.nan), (["c"], 1.0)):
        (module(words if hvd.rank() == 0 else []) * scale).sum().backward()
        if words == ["c"] and scale == 1:
            with pytest.raises(ValueError, match="is not finite"):
                sparse.step()
        else:
            sparse.step()
    sparse.finish()
    module.eval()
    assert module(["a", "b", "c"]).flatten().tolist() == [-2.0, -1.5, -2.0]


def check_compensation_knows_rows_that_the_model_has_written_to():
    module, inner = embedding("written", lr=0.02)
    sparse = E.Pipeline(inner, 1, compensation="dc", strength=0.3)
    rule = lambda some: torch.optim.SGD(some, lr=0.02)  # noqa: E731
    _, finished = expected(weights_of(module), range(4), 1, rule, strength=0.3)
    for step in range(4):
        ids = batch(step)
        rows = module(ids)
        loss_of(rows, ids).backward()
        with torch.no_grad():
            rows.zero_()
        sparse.step()
    sparse.finish()
    torch.testing.assert_close(weights_of(module), finished, rtol=1e-10, atol=1e-12)


def check_several_lookups_and_tables_in_a_step():
    one, other = embedding("several")[0], embedding("several too")[0]
    sparse = E.Pipeline(E.SGD(E.tables(torch.nn.ModuleList([one, other])), lr=0.1, op=hvd.Sum), 1, "dc", strength=0.0)
    plain_one, plain_other = embedding("plain")[0], embedding("plain too")[0]
    plain = E.SGD(E.tables(torch.nn.ModuleList([plain_one, plain_other])), lr=0.1, op=hvd.Sum)
    before = weights_of(one), weights_of(plain_one)
    for modules, optimizer in (((one, other), sparse), ((plain_one, plain_other), plain)):
        (modules[0](batch(1)).sum() + modules[0](batch(2)).sum() + modules[1](batch(3)).sum()).backward()
        optimizer.step()
    assert torch.equal(weights_of(one), before[0])
    sparse.finish()
    torch.testing.assert_close(weights_of(one) - before[0], weights_of(plain_one) - before[1])


def check_a_rank_without_ids_and_a_learning_rate_that_falls():
    module, inner = embedding("falls", lr=1.0)
    sparse = E.Pipeline(inner, depth=1)
    scheduler = torch.optim.lr_scheduler.StepLR(sparse, 1, gamma=0.5)
    first = weights_of(module)[0]
    for _ in range(3):
        module(torch.tensor([0] if hvd.rank() == 0 else [], dtype=torch.int64)).sum().backward()
        sparse.step()
        scheduler.step()
    torch.testing.assert_close(weights_of(module)[0], first - 1.5)
    sparse.finish()
    torch.testing.assert_close(weights_of(module)[0], first - 1.75)


@pytest.mark.parametrize("in_state", [True, False])
def check_saving_and_commits_lose_nothing(folder, in_state):
    module, inner = embedding("saved")
    sparse = E.Pipeline(inner, depth=2)
    plain, of_plain = embedding("reference")
    state = hvd.elastic.TorchState(module, steps=0, **({"sparse": sparse} if in_state else {}))
    state.sync()

    def both(ids):
        for one, optimizer in ((module, sparse), (plain, of_plain)):
            one(ids).sum().backward()
            optimizer.step()
    offset = weights_of(module) - weights_of(plain)

    def expect_nothing_lost():
        assert sparse.waiting == 0
        torch.testing.assert_close(weights_of(module), weights_of(plain) + offset)
    both(batch(0))
    E.save(os.path.join(folder, "saved"), module)
    expect_nothing_lost()
    both(batch(1))
    E.save_delta(os.path.join(folder, "saved"), module)
    expect_nothing_lost()
    both(batch(2))
    E.export(lambda table, columns: None, module)
    expect_nothing_lost()
    both(batch(3))
    state.commit()
    expect_nothing_lost()
    for start in (False, True):
        for step in range(4):  # more than wait
            module(batch(step)).sum().backward()
            sparse.step()
        if start:
            sparse.start()
        state.restore()
        expect_nothing_lost()


def check_it_is_served_after_finish():
    """Ranks end at different steps: the last ones wait for nobody's gradients."""
    module, inner = embedding("served")
    sparse = E.Pipeline(inner, depth=1)
    for _ in range(3):
        module(torch.tensor([1])).sum().backward()
        sparse.step()
    with pytest.raises(ValueError, match=r"serve: 1 updates of a Pipeline\(depth=1\) wait"):
        E.serve()
    sparse.finish()
    if hvd.rank() == 0:
        E.serve()
        return
    for _ in range(3):
        loss = module(torch.tensor([1])).sum()
        sparse.start()
        loss.backward()
        sparse.step()
    sparse.finish()
    E.serve()


def check_a_gradient_that_is_not_finite_is_refused_when_its_turn_comes():
    module, inner = embedding("infinite")
    sparse = E.Pipeline(inner, depth=1)
    before, wrong = weights_of(module), hvd.size() - 1
    (module(torch.tensor([5])) * (math.inf if hvd.rank() == wrong else 1)).sum().backward()
    sparse.step()
    module(torch.tensor([6])).sum().backward()
    with pytest.raises(ValueError, match="table 'infinite': the gradient of key 5 is not finite"):
        sparse.step()
    assert torch.equal(weights_of(module), before) and sparse.waiting == 1
    sparse.finish()
    assert torch.equal(weights_of(module)[6], before[6] - 0.1 * hvd.size())


@pytest.mark.parametrize("starts", [True, False])
def check_grad_scaler_leaves_out_a_step_and_no_other(starts):
    module, inner = embedding("scaled", lr=1.0)
    sparse, scaler = E.Pipeline(inner, depth=1), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    first = weights_of(module)
    for step in range(4):
        loss = module(torch.tensor([step])).sum() * (math.inf if step == 1 and hvd.rank() == 0 else 1)
        if starts:
            sparse.start()
        scaler.scale(loss).backward()
        scaler.unscale_(sparse)
        scaler.step(sparse)
        scaler.update()
        applied = {0: [], 1: [0], 2: [0], 3: [0, 2]}[step]
        changed = (weights_of(module) - first)[:, 0]
        assert [key for key in range(KEYS) if changed[key] != 0] == applied, step
    sparse.finish()
    torch.testing.assert_close((weights_of(module) - first)[[0, 2, 3]],
                               torch.full((3, DIM), -float(hvd.size()), dtype=torch.float64))


def check_a_scheduler_of_the_optimizer_goes_on_after_load_state_dict():
    module = E.HashEmbedding(DIM, name="resumed", init=E.Zeros())
    optimizer = E.SGD(E.tables(module), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pipeline = E.Pipeline(optimizer, depth=1)
    pipeline.load_state_dict(copy.deepcopy(pipeline.state_dict()))
    ids = torch.arange(KEYS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch says if it believes that the scheduler steps first
        for _ in range(4):
            module(ids).sum().backward()
            pipeline.step()
            scheduler.step()
    pipeline.finish()
    assert torch.equal(weights_of(module), torch.full((KEYS, DIM), -(1 + 0.5 + 0.25 + 0.125)))


def check_a_clipped_step_of_another_table_ends_beside_it():
    late, plain = (E.HashEmbedding(DIM, name=name, init=E.Zeros()) for name in ("late", "plain"))
    pipeline = E.Pipeline(E.SGD(E.tables(late), lr=1.0, op=hvd.Average), depth=1)
    sparse = E.SGD(E.tables(plain), lr=1.0, op=hvd.Average)
    ids = torch.arange(KEYS)
    for _ in range(4):
        loss = late(ids).sum() + plain(ids).sum()
        pipeline.start()
        loss.backward()
        sparse.clip_grad_norm_(1e6)
        pipeline.step()
        sparse.step()
    pipeline.finish()
    assert torch.equal(weights_of(late), torch.full((KEYS, DIM), -4.0))
    assert torch.equal(weights_of(plain), torch.full((KEYS, DIM), -4.0))


def check_rows_of_late_updates_are_evicted_once():
    """Their key is looked up again before the update by which it gets its row."""
    asked = []

    def ask(keys, count, last, step):
        asked.append(keys.tolist())
        return count < 0

    kept = E.HashEmbedding(DIM, name="kept", evict=E.Asking(ask, every=1))
    timed = E.HashEmbedding(DIM, name="timed", evict=E.Ttl(2))
    pipeline = E.Pipeline(E.SGD([*E.tables(kept), *E.tables(timed)], lr=1.0), depth=1)
    for key in (1, 1, 7, 7, 1, 1, 1, 1, 1, 1):
        ids = torch.tensor([key])
        (kept(ids).sum() + timed(ids).sum()).backward()
        pipeline.step()
    pipeline.finish()
    assert all(len(keys) == len(set(keys)) for keys in asked)
    assert {key for keys in hvd.allgather_object(asked[-1]) for key in keys} == {1, 7}
    stats = hvd.allgather_object(timed.table.stats())
    assert sum(one["evicted"] for one in stats) == 2 and sum(one["rows"] for one in stats) == 1


def check_rows_that_went_meanwhile_are_born_again():
    module, inner = embedding("gone", evict=E.Ttl(1))
    sparse = E.Pipeline(inner, depth=2)
    for step in range(9):
        ids = torch.tensor([step % 2, 7])
        module(ids).sum().backward()
        sparse.step()
    sparse.finish()
    assert set(rows_of(module)) == {0, 7}


@pytest.mark.parametrize("arguments, told", [
    ({"depth": 3}, "depth=3; give 0, 1 or 2"), ({"depth": True}, "depth=True"), ({"depth": 1.5}, "depth=1.5"),
    ({"depth": 1, "compensation": "cd"}, "compensation='cd' with depth=1; give None, or 'dc' or 'corr'"),
    ({"compensation": "corr"}, "compensation='corr' with depth=0"),
    ({"depth": 1, "compensation": "corr", "strength": 1.0}, "strength=1.0 must be at least 0 and below 1"),
    ({"compensation": "dc"}, "compensation='dc' with depth=0"), ({"depth": 1, "strength": -1}, "strength=-1 must be"),
    ({"depth": 1, "strength": math.nan}, "strength=nan must be")])
def check_wrong_arguments(arguments, told):
    _, inner = embedding("wrong")
    with pytest.raises(ValueError, match=told):
        E.Pipeline(inner, **arguments)
    inner.step()


def check_what_a_pipeline_refuses():
    module, inner = embedding("refused")
    with pytest.raises(ValueError, match="SGD is no optimizer of tables"):
        E.Pipeline(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    sparse = E.Pipeline(inner, depth=1)
    for other in (inner, sparse):
        with pytest.raises(ValueError, match="or in a Pipeline"):
            E.Pipeline(other)
    for call in (inner.step, lambda: inner.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="this SGD is in a Pipeline"):
            call()
    with pytest.raises(ValueError, match=r"Pipeline\(depth=1\): clip_grad_norm_ is for depth=0"):
        sparse.clip_grad_norm_(1.0)
    strings = E.HashEmbedding(DIM, name="refused strings", strings=True)
    with pytest.raises(ValueError, match="whose keys are integers"):
        E.Pipeline(E.SGD(E.tables(strings)), 1, "dc")


def check_strings_and_counted_keys_come_late_too():
    module, inner = embedding("late strings", strings=True, min_count=2)
    sparse = E.Pipeline(inner, depth=1)
    for _ in range(3):
        module(["a", "b"] if hvd.rank() == 0 else []).sum().backward()
        sparse.step()
    assert sum(hvd.allgather_object(len(module))) == 2
    sparse.finish()
    assert sorted(int.from_bytes(row[2], "little") for row in rows_of(module).values()) == [2, 2]  # updates

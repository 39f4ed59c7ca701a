"""Tables in a model beside dense layers: what broadcasts, DistributedDataParallel, GradScaler, torch.compile, join and
process sets do with them."""
import copy
import math

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.embedding import serving
from lightcc.torch import embedding as E

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Model(torch.nn.Module):
    def __init__(self, name, **options):
        super().__init__()
        torch.manual_seed(5)
        self.user = E.HashEmbedding(4, name=f"{name}.user", **options)
        self.tags = E.HashEmbeddingBag(2, name=f"{name}.tags", mode="sum", **options)
        self.dense = torch.nn.Linear(6, 1)

    def forward(self, users, tags):
        return self.dense(torch.cat(E.lookup([(self.user, users), (self.tags, tags)]), 1))


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    return (torch.randint(0, 50, (8,), generator=generator), torch.randint(0, 9, (8, 3), generator=generator),
            torch.randn(8, 1, generator=generator))


def loss_of(model, step, rank=None):
    users, tags, target = batch(step, rank)
    return torch.nn.functional.mse_loss(model(users, tags), target)


def read(model):
    model.eval()
    with torch.no_grad():
        user, tags = E.lookup([(model.user, torch.arange(50)), (model.tags, torch.arange(9).reshape(9, 1))])
    model.train()
    return torch.cat([user.reshape(-1), tags.reshape(-1)]).double()


def optimizers(model):
    sparse = E.SparseAdam(E.tables(model), lr=0.01)
    return sparse, hvd.DistributedOptimizer(torch.optim.Adam(E.dense_parameters(model), lr=0.01))


def close(model):
    for parameter in E.tables(model):
        parameter.table.close()


def same_everywhere(values):
    every = hvd.allgather(values.detach().reshape(1, -1).contiguous())
    return bool((every == every[0]).all())


def check_a_model_is_trained_as_by_one_process():
    """All ranks' batches in one process: the same but for rounding."""
    model = Model("whole")
    sparse = E.Adagrad(E.tables(model), lr=0.1, initial_accumulator_value=0.1)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(E.dense_parameters(model), lr=0.1))
    alone = [torch.nn.Parameter(read(model)[:200].reshape(50, 4)),
             torch.nn.Parameter(read(model)[200:].reshape(9, 2))]
    layer = copy.deepcopy(model.dense).double()
    adagrad = torch.optim.Adagrad(alone, lr=0.1, initial_accumulator_value=0.1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(15):
        loss_of(model, step).backward()
        sparse.step()
        dense.step()
        dense.zero_grad()
        adagrad.zero_grad()
        sgd.zero_grad()
        for rank in range(hvd.size()):
            users, tags, target = batch(step, rank)
            inputs = torch.cat([alone[0][users], alone[1][tags].sum(1)], 1)
            (torch.nn.functional.mse_loss(layer(inputs), target.double()) / hvd.size()).backward()
        adagrad.step()
        sgd.step()
    torch.testing.assert_close(read(model), torch.cat([p.detach().reshape(-1) for p in alone]), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.dense.weight.double(), layer.weight, rtol=0, atol=1e-5)
    assert same_everywhere(read(model)) and same_everywhere(model.dense.weight)


def check_broadcasts_leave_tables_alone():
    model = Model("broadcast")
    sparse, dense = optimizers(model)
    loss_of(model, 0).backward()
    sparse.step()
    dense.step()
    before, lengths = read(model), (len(model.user), len(model.tags))
    assert sorted(model.state_dict()) == ["dense.bias", "dense.weight"]
    assert len(E.dense_parameters(model)) == 2
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sparse.param_groups[0]["lr"] = 0.5 + hvd.rank()
    hvd.broadcast_optimizer_state(sparse, root_rank=0, model=model)
    hvd.broadcast_optimizer_state(dense, root_rank=0, model=model)
    assert sparse.param_groups[0]["lr"] == 0.5
    assert torch.equal(read(model), before) and lengths == (len(model.user), len(model.tags))
    sparse.step()
    assert sum(p.grad.numel() for p in E.tables(model)) == 0


def check_optimizers_state_is_options_only():
    model = Model("options")
    sparse, _ = optimizers(model)
    state = sparse.state_dict()
    sparse.param_groups[0]["lr"] = 7.0
    sparse.load_state_dict(state)
    assert sparse.param_groups[0]["lr"] == 0.01 and state["state"] == {}


@pytest.mark.parametrize("min_count", [1, 3])
def check_an_optimizer_that_is_made_after_a_lookup(min_count):
    """An id that the lookup has twice takes one step, of the sum."""
    user = E.HashEmbedding(2, name="made later", init=E.Zeros(), min_count=min_count)
    rows = user(torch.tensor([7, 9, 7] if hvd.rank() == 0 else [9, 9], dtype=torch.int64))
    sparse = E.Adagrad(E.tables(user), lr=1.0, op=hvd.Sum)
    rows.sum().backward()
    sparse.step()
    places = {7: 2, 9: 1 + 2 * (hvd.size() - 1)}
    expected = [[-1.0, -1.0] if count >= min_count else [0.0, 0.0] for count in places.values()]
    torch.testing.assert_close(user(torch.tensor([7, 9])).tolist(), expected)
    assert sum(hvd.allgather_object(len(user))) == sum(count >= min_count for count in places.values())


def check_a_model_with_a_table_is_not_copied():
    with pytest.raises(TypeError, match="table 'copied.user' cannot be copied"):
        copy.deepcopy(Model("copied"))


def check_a_grad_scaler_leaves_the_step_out_on_all_ranks():
    model = Model("scaled")
    sparse, dense = optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(6):
        before = read(model)
        infinite = step == 2 and hvd.rank() == hvd.size() - 1
        (scaler.scale(model(*batch(step)[:2]).sum()) * (float("inf") if infinite else 1)).backward()
        if step in (2, 4):
            scaler.unscale_(sparse)
            assert math.isinf(sparse.clip_grad_norm_(100.0)) == (step == 2)
        for optimizer in (sparse, dense):
            scaler.step(optimizer)
        scaler.update()
        dense.zero_grad()
        assert scaler.get_scale() == (512 if step >= 2 else 1024)
        assert torch.equal(read(model), before) == (step == 2)
        assert (before - read(model)).abs().max() < 0.1
        assert same_everywhere(read(model))


def check_a_rank_without_data_takes_part():
    model = Model("partly")
    sparse, dense = optimizers(model)
    users, tags, target = batch(0)
    count = 0 if hvd.rank() == hvd.size() - 1 else 8
    output = model(users[:count], tags[:count])
    torch.nn.functional.mse_loss(output, target[:count], reduction="sum").backward()
    sparse.step()
    dense.step()
    assert same_everywhere(read(model))


def check_compiled_models():
    from torch._dynamo.utils import counters
    model = Model("compiled")
    sparse = E.SparseAdam(E.tables(model), lr=0.01)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    plain = [loss_of(model, step).item() for step in range(6)]
    counters.clear()
    assert [loss_of(compiled, step).item() for step in range(6)] == plain
    graphs = counters["stats"]["unique_graphs"]
    for step in range(6, 30):  # other ids, and so other numbers of unique rows
        loss_of(compiled, step).backward()
        sparse.step()
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def check_ranks_whose_data_end_earlier(backwards, prefetch):
    """Compared with ranks that go on with empty batches."""
    rank = hvd.size() - 1 - hvd.rank() if backwards else hvd.rank()
    results = []
    for with_serve in (True, False):
        model = Model("ended")
        of_users, of_tags = (E.SparseAdam([table], lr=0.01) for table in E.tables(model))
        dense = hvd.DistributedOptimizer(torch.optim.Adam(E.dense_parameters(model), lr=0.01))
        steps = 1 + 2 * hvd.size()
        data = [batch(step) if step < 3 + 2 * rank else [part[:0] for part in batch(step)] for step in range(steps)]
        for step, (users, tags, target) in enumerate(data):
            if with_serve and not len(users):
                break
            output = model(users, tags)
            if with_serve and prefetch:
                following = data[step + 1] if step + 1 < steps else ([],)
                E.prefetch([(model.user, following[0]), (model.tags, following[1])] if len(following[0]) else [])
            torch.nn.functional.mse_loss(output, target, reduction="sum").backward()
            of_users.step()
            dense.step()
            of_tags.step()
            dense.zero_grad()
        if with_serve:
            E.serve(dense)
        results.append(torch.cat([read(model), model.dense.weight.detach().double().reshape(-1)]))
        close(model)
    assert torch.equal(*results)
    assert same_everywhere(results[0])


def check_steps_that_the_others_have_not_made(monkeypatch):
    """A rank that serves has begun its dense step, and says so instead of waiting for ever."""
    monkeypatch.setattr(serving, "_LAST_STEP_S", 0.1)
    model = Model("begun")
    _, dense = optimizers(model)
    if hvd.rank() == 0 and hvd.size() > 1:
        with pytest.raises(ValueError, match="ended without a step of the dense optimizer"):
            E.serve(dense)
    else:
        loss_of(model, 0)
        E.serve()
    hvd.barrier()
    if hvd.rank() > 0:
        dense.zero_grad()
        dense.step()  # with which rank 0's ends


def check_a_prefetched_batch_is_looked_up_before_serve():
    model = Model("prefetched")
    batch_ahead = E.prefetch([(model.user, torch.tensor([1]))])
    with pytest.raises(ValueError, match="prefetched"):
        E.serve()
    model.user(torch.tensor([1]))
    del batch_ahead
    E.serve()


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def check_clipping_by_the_norm_over_all_ranks(max_norm):
    """Of tables and dense layers together, compared with one process that has all the data."""
    model = Model("clipped", dtype=torch.float64).double()
    user, tags, layer = read(model)[:200].reshape(50, 4), read(model)[200:].reshape(9, 2), copy.deepcopy(model.dense)
    alone = [torch.nn.Parameter(user), torch.nn.Parameter(tags), *layer.parameters()]
    sgd = torch.optim.SGD(alone, lr=1.0)
    sparse = E.SGD(E.tables(model), lr=1.0)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(E.dense_parameters(model), lr=1.0))
    for step in range(3):
        model(*batch(step)[:2]).square().mean().backward()
        dense.synchronize()
        norm = sparse.clip_grad_norm_(max_norm, E.dense_parameters(model))
        with dense.skip_synchronize():
            dense.step()
        sparse.step()
        dense.zero_grad()
        sgd.zero_grad()
        for rank in range(hvd.size()):
            users, bags, _ = batch(step, rank)
            (layer(torch.cat([alone[0][users], alone[1][bags].sum(1)], 1)).square().mean() / hvd.size()).backward()
        expected = torch.nn.utils.clip_grad_norm_(alone, max_norm)
        sgd.step()
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(read(model), torch.cat([p.detach().reshape(-1) for p in alone[:2]]), rtol=0, atol=1e-9)
    torch.testing.assert_close(model.dense.weight, layer.weight, rtol=0, atol=1e-9)


def check_what_was_clipped_can_be_forgotten():
    model = Model("forgotten")
    sparse, _ = optimizers(model)
    before = read(model)
    loss_of(model, 0).backward()
    sparse.clip_grad_norm_(1.0)
    sparse.zero_grad()
    sparse.step()
    assert torch.equal(read(model), before)


def check_join_is_refused_while_there_is_a_table():
    model = Model("joined")
    if hvd.size() == 1:
        return
    with pytest.raises(ValueError, match=r"table 'joined\.\w+'.*serve\(\)"):
        hvd.join()
    close(model)


def check_a_table_of_a_process_set():
    if hvd.size() < 2:
        return
    some = hvd.add_process_set([1] if hvd.size() == 2 else [0, hvd.size() - 1])
    if some.included():
        model = Model("some", process_set=some)
        sparse = E.SGD(E.tables(model), lr=0.1)
        loss_of(model, 0).backward()
        sparse.step()
        read(model)
        total = hvd.allreduce(torch.tensor(len(model.user)), op=hvd.Sum, process_set=some)
        expected = torch.cat([batch(0, rank)[0] for rank in some.ranks]).unique()
        assert total == len(expected)
        del model, sparse
    else:
        with pytest.raises(ValueError, match="does not contain rank"):
            Model("some", process_set=some)
    hvd.barrier()
    hvd.remove_process_set(some)

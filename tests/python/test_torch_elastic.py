"""TorchState and its handlers, in one world: what a commit keeps, what restore gives back, what sync makes equal."""
import copy

import pytest
import torch
from compressed import Training, begin, end, total_of

import lightcc.torch as hvd
import ranks
from lightcc.compress.residuals import KEY
from lightcc.core.elastic_state import HorovodInternalError, HostUpdateResult, ObjectState, run_fn
from lightcc.torch.elastic import state as module
from lightcc.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    TorchState,
    copied,
    get_handler_registry,
    set_handler_registry,
)
from training import OPTIMIZERS, data, loss_of, make_model, my_loss

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Noisy(torch.nn.Module):
    """A model with buffers, parameters that are one, and a state of another kind."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.calls = make_model(), torch.nn.BatchNorm1d(3), []
        self.tied = self.body[0].weight

    def forward(self, x):
        self.calls.append(len(x))
        return self.norm(self.body(x))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def made(name="SGD", distributed=True, model=None):
    model = model or Noisy()
    optimizer = OPTIMIZERS[name](model.parameters())
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return model, optimizer


def step(model, optimizer, number):
    optimizer.zero_grad()
    my_loss(model, number).backward()
    optimizer.step()


def facts(model, optimizer):
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def expect(model, optimizer, before):
    torch.testing.assert_close(facts(model, optimizer), before, rtol=0, atol=0)


# Commits

@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def check_restore_gives_back_what_was_committed(name, distributed):
    model, optimizer = made(name, distributed)
    state = TorchState(model, optimizer, batch=0)
    state.sync()
    first = facts(model, optimizer)
    for number in range(3):
        step(model, optimizer, number)
    state.batch = 3
    state.restore()
    expect(model, optimizer, first)  # before the first step there was no state of Adam, and so there is none now
    assert len(optimizer.state) == 0 and state.batch == 0
    for number in range(2):
        step(model, optimizer, number)
    state.batch = 2
    state.commit()
    second = facts(model, optimizer)
    afterwards = []
    for _ in range(2):  # restored, trained on, and restored again from the same commit
        step(model, optimizer, 7)
        afterwards.append(facts(model, optimizer))
        state.batch += 1
        optimizer.param_groups[0]["lr"] = 5.0
        state.restore()
        expect(model, optimizer, second)
        assert state.batch == 2 and all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(afterwards[0], afterwards[1], rtol=0, atol=0)
    assert model.tied is model.body[0].weight and optimizer.param_groups[0]["params"][0] is model.tied


def check_commits_reuse_their_memory_and_share_none():
    model, optimizer = made("Adam")
    state = TorchState(model, optimizer)
    step(model, optimizer, 0)
    state.commit()

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [tensor for entry in entries for tensor in tensors(entry)]

    def addresses(thing):
        return {tensor.data_ptr() for tensor in tensors(thing)}

    def kept():
        return [addresses(state._handlers[name]._kept) for name in ("model", "optimizer")]

    before = kept()
    live = addresses(model.state_dict()) | addresses(optimizer.state_dict())
    assert all(before) and not live & (before[0] | before[1])
    step(model, optimizer, 1)
    state.commit()
    assert kept() == before
    state.restore()
    assert not (addresses(model.state_dict()) | addresses(optimizer.state_dict())) & (before[0] | before[1])


def check_copied():
    value = {"a": torch.arange(6.0).view(2, 3).t(), "b": [torch.ones(2), (1, "x")], "c": {1: {2}}, "d": None,
             "e": torch.ones(3).to_sparse(), "f": torch.nn.Parameter(torch.ones(1))}
    first = copied(value)
    assert first["a"].stride() == value["a"].stride() and first["c"][1] is not value["c"][1]
    value["c"][1].add(3)
    assert first["c"] == {1: {2}} and type(first["e"]) is torch.Tensor and first["e"].layout is torch.sparse_coo
    addresses = first["a"].data_ptr(), first["b"][0].data_ptr()
    value["a"] = value["a"] + 1
    value["b"][0] = torch.ones(3)
    second = copied(value, first)
    assert torch.equal(second["a"], value["a"]) and second["a"].data_ptr() == addresses[0]
    assert torch.equal(second["b"][0], torch.ones(3)) and second["b"][0].data_ptr() != addresses[1]
    with_versions = copied(torch.nn.BatchNorm1d(2).state_dict())
    assert with_versions._metadata[""]["version"] == 2


# Sync

def check_sync_makes_all_ranks_rank_0_and_commits_it():
    model, optimizer = made("Adam")
    if hvd.rank() == 0:  # a survivor; the others are new
        donor = Noisy()
        plain = torch.optim.Adam(donor.parameters(), lr=0.5)
        loss_of(donor, *data(0)).backward()
        plain.step()
        optimizer.load_state_dict(plain.state_dict())
        model.calls = [1, 2]
    torch.nn.init.constant_(model.body[0].bias, float(hvd.rank()))
    sampler = hvd.elastic.ElasticSampler(range(100))
    sampler.record_batch(0, 4 + hvd.rank())
    sampler.epoch = hvd.rank()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 + hvd.rank())
    state = TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, name=f"rank {hvd.rank()}")
    state.sync()
    for _ in range(2):
        assert model.body[0].bias.eq(0).all() and len(optimizer.state) == len(list(model.parameters()))
        assert optimizer.param_groups[0]["lr"] == 0.5 and model.calls[:2] == [1, 2]
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 4 * hvd.size()}
        assert len(sampler) == -(-(100 - 4 * hvd.size()) // hvd.size()) and scheduler.step_size == 5
        assert state.name == "rank 0"
        every = hvd.allgather(torch.cat([value.double().flatten() for value in tensors_of(model, optimizer)])[None])
        assert (every == every[0]).all()
        step(model, optimizer, 1)
        scheduler.step()
        sampler.record_batch(1, 4)
        state.name = "mine"
        state.restore()


def tensors_of(model, optimizer):
    found = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    return found + [value for entry in optimizer.state.values() for value in entry.values()]


def check_a_sync_that_fails_leaves_the_commit_whole():
    """One value has arrived and is in the model; the commit has none of it, or a later root would be torn."""
    model, optimizer = made()
    state = TorchState(model, optimizer, batch=5)
    before = facts(model, optimizer)

    def fails():
        raise HorovodInternalError("a peer died")

    sync = state._handlers["model"].sync
    state._handlers["model"].sync = lambda: sync() or torch.nn.init.constant_(model.norm.weight, 9.0)
    state._handlers["optimizer"].sync = fails
    with pytest.raises(HorovodInternalError):
        state.sync()
    assert model.norm.weight.eq(9).all()
    state.restore()
    expect(model, optimizer, before)


def check_lbfgs():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    TorchState(model, optimizer).sync()
    assert optimizer.param_groups[0]["lr"] == 0.1


# The attributes

def check_assigning_takes_another_object_and_commits_it():
    model, optimizer = made()
    state = TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(range(10)), batch=0)
    other, other_optimizer = made("Adam")
    torch.nn.init.constant_(other.norm.weight, 3.0)
    state.model, state.optimizer = other, other_optimizer
    state.sampler = sampler = hvd.elastic.ElasticSampler(range(20))
    assert state.model is other and state.optimizer is other_optimizer and state.sampler is sampler
    torch.nn.init.constant_(other.norm.weight, 4.0)
    torch.nn.init.constant_(model.norm.weight, 5.0)
    step(other, other_optimizer, 0)
    sampler.record_batch(0, 1)
    state.restore()
    assert other.norm.weight.eq(3).all() and model.norm.weight.eq(5).all()
    assert len(other_optimizer.state) == 0 and sampler.processed_num == 0


def check_a_state_may_have_neither_model_nor_optimizer():
    state = TorchState(epoch=0)
    state.sync()
    assert (state.model, state.optimizer, state.epoch) == (None, None, 0) and isinstance(state, ObjectState)


def check_new_worlds_split_samplers_anew():
    sampler, called = hvd.elastic.ElasticSampler(range(10)), []
    state = TorchState(sampler=sampler)
    state.register_reset_callbacks([lambda: called.append(len(sampler))])
    sampler.record_batch(0, 2)
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.on_reset()
    assert called == [-(-(10 - 2 * hvd.size()) // hvd.size())] and state._host_messages.empty()


def check_restore_needs_no_world():
    model, optimizer = made()
    state = TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(range(10)))
    state.sampler.record_batch(0, 2)
    hvd.shutdown()
    state.restore()
    assert state.sampler.processed_num == 0
    hvd.init()
    state.on_reset()
    step(model, optimizer, 0)


# Handlers

def check_the_registry():
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        def save(self):
            self.kept = self.value.count

        def restore(self):
            self.value.count = self.kept

        def sync(self):
            self.value.count = hvd.broadcast_object(self.value.count, 0)

    registry = get_handler_registry()
    assert [handler for _, handler in registry] == [ModelStateHandler, OptimizerStateHandler, SamplerStateHandler,
                                                    StateDictHandler]
    counter = Counter()
    try:
        set_handler_registry([(Counter, CounterHandler), *registry])
        state = TorchState(make_model(), counter=counter)
    finally:
        set_handler_registry(registry)
    assert isinstance(state._handlers["counter"], CounterHandler) and list(state._handlers)[:2] == ["model", "counter"]
    counter.count = 1 + hvd.rank()
    state.sync()
    assert counter.count == 1
    counter.count = 5
    state.restore()
    assert counter.count == 1


@pytest.mark.parametrize("method", ["save", "restore", "sync"])
def check_a_handler_is_abstract(method):
    class Saved(StateHandler):
        def save(self):
            pass

    handler = Saved(1)
    assert handler.reset() is None
    handler.set_value(2)
    assert handler.value == 2
    with pytest.raises(NotImplementedError):
        StateHandler(1)
    with pytest.raises(NotImplementedError):
        getattr(StateHandler, method)(handler)


# The loop

def check_a_failed_step_is_trained_again():
    """The world is left and entered; gradients that were on their way, or added up, count no more."""
    size = hvd.size()
    for passes in (1, 2):
        reference, plain = made(distributed=False, model=make_model())
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters(),
                                             backward_passes_per_step=passes)
        state, failures, sizes = TorchState(model, optimizer, batch=0), [1, 2, 4], []
        state.register_reset_callbacks([lambda sizes=sizes: sizes.append(hvd.size())])

        @hvd.elastic.run
        def train(state, steps, passes=passes, model=model, optimizer=optimizer, failures=failures):
            while state.batch < steps:
                for i in range(passes):
                    my_loss(model, passes * state.batch + i).backward()
                    if failures and failures[0] == state.batch:
                        failures.pop(0)
                        hvd.barrier()  # all fail in this step, none in the one before because another has left
                        raise HorovodInternalError("as if a peer had died")
                optimizer.step()
                optimizer.zero_grad()
                state.batch += 1
                state.commit()
            return "done"

        assert train(state, 5) == "done" and sizes == [size] * 3 and failures == []
        for number in range(5):
            plain.zero_grad()
            for i in range(passes):
                loss_of(reference, *data(passes * number + i)).backward()
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def check_names_are_there():
    assert hvd.elastic.run_fn is run_fn and hvd.elastic.TorchState is TorchState
    assert hvd.elastic.init is hvd.init and hvd.elastic.shutdown is hvd.shutdown
    assert module.ElasticSampler is hvd.elastic.ElasticSampler
    with pytest.raises(AttributeError, match="no attribute 'elastics'$"):
        hvd.elastics  # noqa: B018


def check_ranks_share_what_compression_has_left_behind():
    """Before the state is sent each has its own; afterwards all have all of it, so that any may be its owner."""
    if hvd.size() == 1:
        pytest.skip("nothing is compressed")
    begin(1)
    try:
        training = Training(hvd.Compression.topk(0.01)).steps(3)
        state = TorchState(optimizer=training.optimizer)
        before = training.left()
        training.step()
        state.restore()  # as after a failure
        assert training.optimizer.state_dict()[KEY]["ranks"] == [hvd.rank()]
        state.sync()
        for saved in (training.optimizer.state_dict()[KEY], state._handlers["optimizer"]._kept[KEY]):
            assert saved["ranks"] == [0, 1] and saved["size"] == 2
            for name, left in before.items():
                assert torch.equal(total_of(saved, name).view(left.shape), left)
        assert any(left.any() for left in before.values())
    finally:
        end()
        hvd.init()

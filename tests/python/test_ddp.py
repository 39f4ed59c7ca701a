"""comm_hook under DistributedDataParallel: the same training as over gloo, whatever DDP is told, and errors that say
what happened and leave a model that can be used."""
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_termination import Ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import lightcc.torch as hvd
import ranks
from jobs import wait_until
from lightcc.torch import ddp

STEPS = 4
SMALL_MIB = 0.001  # so that a small model has several buckets


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(scope="module")
def gloo(job):
    """The default group of torch.distributed, which meets through lightcc, since lightccrun started the ranks."""
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
    yield
    dist.destroy_process_group()


class Branches(torch.nn.Module):
    """Some parameters are not used in each step, or never; there is a buffer, too."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.left, self.right, self.never = (torch.nn.Linear(40, 3) for _ in range(3))

    def forward(self, x, side):
        y = torch.relu(self.norm(self.first(x)))
        sides = {0: [self.left], 1: [self.right], 2: [self.left, self.right]}[side]
        return sum(linear(y) for linear in sides).square().mean()


def model():
    torch.manual_seed(1)
    return Branches()


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator)


def train(wrapped, side=lambda step: 2, steps=STEPS):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch(step), side(step)).backward()
        optimizer.step()
    return [p.detach().clone() for p in wrapped.parameters()]


def expect_same(mine, theirs, **tolerance):
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, **tolerance)
        every = hvd.allgather(p.reshape(1, -1))
        assert (every == every[0]).all(), "the ranks differ"


def wrap(hook=ddp.comm_hook, state=None, module=None, **options):
    wrapped = DistributedDataParallel(module or model(), bucket_cap_mb=SMALL_MIB, **options)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped



# Beside DistributedOptimizer

REFUSED = "first.weight is in a {}.*DistributedDataParallel writes p.grad while DistributedOptimizer sends.*comm_hook"


def sgd(module, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module.named_parameters(), **options)


@pytest.mark.parametrize("hook", [None, ddp.comm_hook], ids=["DDP alone", "hook"])
def check_distributed_optimizer_is_refused_beside_it(gloo, hook):
    """In either order, by name; what has gone is forgotten."""
    if hvd.size() == 1:
        return  # which exchanges nothing
    module = model()
    wrapped = wrap(hook, module=module)
    with pytest.raises(ValueError, match=REFUSED.format("DistributedDataParallel")):
        sgd(module)
    with pytest.raises(ValueError, match=REFUSED.format("DistributedDataParallel")):
        sgd(wrapped.module, groups=1)
    del wrapped
    optimizer = sgd(module)
    with pytest.raises(ValueError, match=REFUSED.format("DistributedOptimizer")):
        wrap(hook, module=module)
    del optimizer
    wrap(hook, module=module)


def check_what_is_right_beside_distributed_optimizer(gloo):
    """Other parameters; those that DDP ignores; Adasum, which sends no gradients."""
    module, other = model(), torch.nn.Linear(6, 1)
    wrapped, optimizer = wrap(module=module), sgd(other)
    optimizers = [sgd(module, op=hvd.Adasum)]
    ignoring = model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        ignoring, [name for name, _ in ignoring.named_parameters() if name != "never.bias"])
    optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(ignoring.first.parameters(), lr=0.1)))
    wrapped_too = wrap(None, module=ignoring)
    other(batch(0)).sum().backward()
    optimizer.step()
    assert wrapped and wrapped_too and optimizers


def check_distributed_optimizer_inside_no_sync(gloo):
    if hvd.size() == 1:
        return
    wrapped = wrap(None, find_unused_parameters=True)
    with wrapped.no_sync():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step), 2).backward()
        optimizer.step()
    expect_same([p.detach() for p in wrapped.parameters()], train(wrap(None, find_unused_parameters=True)))
    with pytest.raises(ValueError, match="no_sync"):
        wrapped(batch(0), 2).backward()


OPTIONS = {
    "some are never used": (dict(find_unused_parameters=True), lambda step: 2),
    "others in each step": (dict(find_unused_parameters=True), lambda step: (step + hvd.rank()) % 2),
    "views of buckets": (dict(find_unused_parameters=True, gradient_as_bucket_view=True), lambda step: step % 2),
    "static graph": (dict(static_graph=True), lambda step: 2),
    "static views": (dict(static_graph=True, gradient_as_bucket_view=True), lambda step: 2),
}


@pytest.mark.parametrize("what", OPTIONS)
def check_same_as_gloo(gloo, what):
    options, side = OPTIONS[what]
    expect_same(train(wrap(**options), side), train(wrap(None, **options), side))


def check_accumulation_without_sync(gloo):
    def accumulate(wrapped):
        for step in range(STEPS):
            with wrapped.no_sync():
                wrapped(batch(step)).square().mean().backward()
            wrapped(batch(step + 50)).square().mean().backward()
        return [p.grad.clone() for p in wrapped.parameters()]

    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))
    expect_same(accumulate(wrap(module=make())), accumulate(wrap(None, module=make())))


def check_compression_and_other_options(gloo):
    options = dict(find_unused_parameters=True)
    reference = train(wrap(None, **options))
    for compression, rtol in ((hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 1e-1)):
        mine = train(wrap(state=ddp.Options(compression=compression), **options))
        expect_same(mine, reference, rtol=rtol, atol=rtol)
        assert hvd.size() == 1 or any(not torch.equal(p, q) for p, q in zip(mine, reference))
    expect_same(train(wrap(state=ddp.Options(gradient_predivide_factor=2.0), **options)), reference)
    expect_same(train(wrap(hook=fp16_compress_wrapper(ddp.comm_hook), **options)), reference, rtol=1e-2, atol=1e-2)
    wrapped = wrap(state=ddp.Options(op=hvd.Sum), **options)
    wrapped(batch(0), 2).backward()
    averaged = wrap(None, **options)
    averaged(batch(0), 2).backward()
    expect_same(gradients(wrapped), [hvd.size() * g for g in gradients(averaged)])
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        ddp.Options(op=hvd.Sum, gradient_predivide_factor=2.0)


def gradients(wrapped):
    return [p.grad for p in wrapped.parameters() if p.grad is not None]


def check_some_of_the_ranks(gloo):
    if hvd.size() < 3:
        return
    members = [0, hvd.size() - 1]
    process_set, group = hvd.add_process_set(members), dist.new_group(members)
    if hvd.rank() in members:
        wrapped = wrap(state=ddp.Options(process_set=process_set), find_unused_parameters=True, process_group=group)
        wrapped(batch(0), 2).backward()
        theirs = wrap(None, find_unused_parameters=True, process_group=group)
        theirs(batch(0), 2).backward()
        for p, q in zip(gradients(wrapped), gradients(theirs)):
            torch.testing.assert_close(p, q)
    hvd.barrier()
    hvd.remove_process_set(process_set)


def check_uneven_inputs(gloo):
    def run(hook):
        torch.manual_seed(1)
        wrapped = wrap(hook, module=torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Linear(20, 2)))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with Join([wrapped]):
            for step in range(2 + hvd.rank()):
                optimizer.zero_grad()
                wrapped(batch(step)).square().mean().backward()
                optimizer.step()
        return [p.detach() for p in wrapped.parameters()]
    expect_same(run(ddp.comm_hook), run(None))


def check_two_models_in_one_backward(gloo):
    def run(hook):
        torch.manual_seed(1)
        one, two = (wrap(hook, module=torch.nn.Linear(6, 6)) for _ in range(2))
        for step in range(STEPS):
            two(one(batch(step))).square().sum().backward()
        return gradients(one) + gradients(two)
    expect_same(run(ddp.comm_hook), run(None))


def check_backward_goes_on_meanwhile(gloo, folder):
    if hvd.size() == 1:
        return
    went_on, states, held = Path(folder) / "went_on", [], False

    def hook(state, bucket):
        if held and hvd.rank() == 1:
            wait_until(went_on.exists, "rank 0 to go on in its backward")
        future = ddp.comm_hook(state, bucket)
        states.append(future.done())
        if held and hvd.rank() == 0 and len(states) == 2:
            went_on.touch()
        return future

    wrapped = wrap(hook, find_unused_parameters=True)
    wrapped(batch(0), 2).backward()  # makes the buckets anew
    held = True
    states.clear()
    wrapped(batch(0), 2).backward()
    assert len(states) > 2
    if hvd.rank() == 0:
        assert not states[0] and not states[1]


def check_waiting_inside_a_hook(gloo):
    def direct(state, bucket):
        value = ddp.comm_hook(state, bucket).wait()
        done = torch.futures.Future()
        done.set_result(value)
        return done

    def chained(state, bucket):
        done = torch.futures.Future()
        done.set_result(ddp.comm_hook(state, bucket).then(lambda future: future.value()).wait())
        return done
    reference = train(wrap(None, find_unused_parameters=True))
    for hook in (direct, chained):
        expect_same(train(wrap(hook, find_unused_parameters=True)), reference)


# Errors

def check_ranks_that_disagree(gloo):
    states = [ddp.Options(op=hvd.Sum) if hvd.rank() == 0 else ddp.Options(), ddp.Options()]
    wrapped = wrap(lambda _, bucket: ddp.comm_hook(states[0], bucket), find_unused_parameters=True)
    if hvd.size() > 1:
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=r"'ddp\.0'.*disagree on reduce op"):
                wrapped(batch(0), 2).backward()
            wrapped.zero_grad()
    del states[0]
    wrapped.module.load_state_dict(model().state_dict())
    expect_same(train(wrapped), train(wrap(None, find_unused_parameters=True)))


def check_what_cannot_be_sent(gloo):
    wrong = [(TypeError, "int", lambda bucket: ddp.comm_hook(17, bucket)),
             (ValueError, "not registered", lambda bucket: ddp.comm_hook(
                 ddp.Options(process_set=hvd.ProcessSet([0])), bucket))]
    for error, text, hook in wrong:
        wrapped = wrap(lambda _, bucket, hook=hook: hook(bucket), find_unused_parameters=True)
        for _ in range(2):
            with pytest.raises(error, match=text):
                wrapped(batch(0), 2).backward()
    sparse = wrap(state=ddp.Options(op=hvd.Max), module=torch.nn.Embedding(5, 2, sparse=True))
    with pytest.raises(ValueError, match="a sparse gradient .*DistributedOptimizer.*sparse_as_dense"):
        sparse(torch.tensor([1])).sum().backward()


class Words(torch.nn.Module):
    """A sparse and a dense gradient; on the last rank all words are padding, so its sparse one has no entries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(9, 4, padding_idx=0, sparse=True)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, step):
        rank = dist.get_rank()
        words = [0, 0] if rank == dist.get_world_size() - 1 > 0 else [0, step % 8 + 1, 5, 5, rank + 1][:3 + rank]
        return self.linear(self.embedding(torch.tensor(words))).square().mean()


def learn_words(wrapped):
    """What the parameters are after a few steps."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(step).backward()
        assert wrapped.module.embedding.weight.grad.is_sparse
        optimizer.step()
    return [p.detach().clone() for p in wrapped.parameters()]


def check_sparse_gradients(gloo):
    theirs = learn_words(wrap(None, module=Words()))
    for state in (None, ddp.Options(gradient_predivide_factor=2.0), ddp.Options(compression=hvd.Compression.fp16)):
        tolerance = dict(rtol=1e-2, atol=1e-3) if state and state.compression is not hvd.Compression.none else {}
        expect_same(learn_words(wrap(state=state, module=Words())), theirs, **tolerance)


def check_shut_down_and_begun_again(gloo):
    wrapped = wrap(find_unused_parameters=True)
    wrapped(batch(0), 2).backward()
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="init"):
        wrapped(batch(0), 2).backward()
    hvd.init()
    wrapped = wrap(find_unused_parameters=True)
    expect_same(train(wrapped), train(wrap(None, find_unused_parameters=True)))


DYING = """
import os, sys, time, torch, torch.distributed as dist
import lightcc.torch as hvd
from lightcc.torch import ddp
how = sys.argv[1]
hvd.init()
dist.init_process_group("lightcc" if how == "group" else "gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
if how == "hook":
    model.register_comm_hook(None, ddp.comm_hook)
model(torch.ones(1, 3)).sum().backward()
print("ready", flush=True)
class Die(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if hvd.rank() == 1:
            os._exit(3)
        time.sleep(0.2)
        return grad
begin = time.time()
try:
    Die.apply(model(torch.ones(1, 3))).sum().backward()
except hvd.HorovodInternalError as error:
    print("told", error, flush=True)
os._exit(0)  # gloo waits for rank 1 at exit
"""


@pytest.mark.parametrize("how", ("hook", pytest.param("group", marks=pytest.mark.slow)))
def test_a_rank_that_dies_in_backward(how):
    with Ranks(3, DYING, how) as job:
        job.wait_ready()
        for rank in (0, 2):
            told = job.output(rank)
            assert "told" in told and "rank 1 " in told and "died" in told, told

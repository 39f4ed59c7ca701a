"""The learned fusion plan under DistributedOptimizer: what a step costs, and that nothing is lost when a plan ends."""
import compressed
import numpy
import pytest
import torch

import lightcc
import lightcc.torch as hvd
import ranks
from lightcc.core import lib

pytestmark = pytest.mark.usefixtures("job")
LAYERS = 20
SERVING = 5  # steps after which a plan serves


@pytest.mark.parametrize("np", (2, 3, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Model(torch.nn.Module):
    """Layers of which some may be left out, or run in another order."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LAYERS))
        self.extra = torch.nn.Linear(width, width)

    def forward(self, x, order=range(LAYERS), extra=False):
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return self.extra(x).sum() if extra else x.sum()


class Job:
    """A model that is trained on all ranks, beside one that this rank trains on all ranks' data."""

    def __init__(self, **options):
        self.model, self.alone = Model(), Model()
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1),
                                                  self.model.named_parameters(), **options)
        self.reference = torch.optim.SGD(self.alone.parameters(), lr=0.1)
        self.steps = 0

    def step(self, **how):
        """how: of forward, the same on all ranks. Returns what the core counted."""
        self.steps += 1
        before = lib.counters()
        self.optimizer.zero_grad(set_to_none=self.steps % 3 > 0)
        self.model(self._data(hvd.rank()), **how).backward()
        self.optimizer.step()
        after = lib.counters()
        for p in self.alone.parameters():
            p.grad = torch.zeros_like(p)  # as the optimizer has it for what no rank has used
        for rank in range(hvd.size()):
            (self.alone(self._data(rank), **how) / hvd.size()).backward()
        self.reference.step()
        for mine, expected in zip(self.model.parameters(), self.alone.parameters()):
            torch.testing.assert_close(mine, expected)
        return {name: after[name] - before[name] for name in after}

    def serve(self):
        for _ in range(SERVING):
            self.step()
        plan = lightcc.fusion_plan()  # before the step: behind it another rank may end the plan
        counted = self.step()
        assert counted["planned"] == 2 * LAYERS + 2 and counted["collectives"] == 1, counted
        assert f"{2 * LAYERS + 2} tensors" in plan

    def _data(self, rank):
        random = numpy.random.default_rng([self.steps, rank])
        return torch.from_numpy(random.normal(size=(4, 8)).astype("float32"))


def check_a_step_is_one_collective():
    Job().serve()


def check_gradients_that_are_missing():
    job = Job()
    job.serve()
    for i in range(4):
        job.step(order=[k for k in range(LAYERS) if k != i])


def check_another_order():
    job = Job()
    job.serve()
    for _ in range(4):
        job.step(order=list(reversed(range(LAYERS))))
        job.step()


def check_an_exception_in_backward():
    job = Job()
    job.serve()
    for i in range(3):
        handle = job.model.layers[5 * i].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.model(torch.ones(4, 8)).backward()
        handle.remove()
        job.optimizer.synchronize()
        job.optimizer.zero_grad()
        job.step()


def check_one_rank_that_asks_in_between():
    job = Job()
    job.serve()
    for _ in range(4):
        if hvd.rank() == hvd.size() - 1:  # a handle of a gradient that waits for its bucket
            handle = job.model.layers[LAYERS - 1].weight.register_post_accumulate_grad_hook(
                lambda p: [hvd.synchronize(job.optimizer._reducer.handles()[p][0])] and None)
            job.step()
            handle.remove()
        else:
            job.step()
        job.step()


def check_two_optimizers():
    first, second = Job(), Job()
    for _ in range(SERVING):
        first.step(), first.step(), second.step()
    assert first.step()["collectives"] == second.step()["collectives"] == 1


def check_ranks_that_join():
    job = Job()
    job.serve()
    for _ in range(SERVING):  # a plan that has served for some steps is made again soon
        job.step()
    values = torch.ones(3)
    for rank in range(hvd.size()):
        if rank != hvd.rank():
            hvd.allreduce(values, name="others")
            job.optimizer.zero_grad()
            job.model(torch.ones(4, 8)).backward()
            job.optimizer.synchronize()
        hvd.join()
    job.optimizer.zero_grad()
    for mine, expected in zip(job.model.parameters(), job.alone.parameters()):
        torch.testing.assert_close(mine, expected)
    job.serve()


def trained_compressed(in_set, **options):
    model = Model(width=160)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         compression=hvd.Compression.topk(ratio=0.01, **options))
    if not in_set:
        optimizer._reducer._set = 0
    for step in range(SERVING + 5):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + hvd.rank())
        # Whole numbers, of which what travels dense has the same sum in whichever order it is added up.
        sum((p * torch.randint(-9, 10, p.shape)).sum() for p in model.parameters()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expect_equal_bits(**options):
    compressed.begin(1)  # each rank is a node, so that gradients are compressed between all of them
    try:
        with_plan = trained_compressed(True, **options)
        planned = lib.counters()["planned"]
        without = trained_compressed(False, **options)
        assert 0 < planned == lib.counters()["planned"]
        assert 0 < lib.counters()["compressed_bytes"]
        assert torch.equal(with_plan, without)
    finally:
        compressed.end()
        hvd.init()


def check_compressed_bits_do_not_depend_on_it():
    expect_equal_bits()


def check_nor_while_the_ratio_still_falls():  # each fifth of the warm-up sends another share
    expect_equal_bits(warmup_steps=25)

"""Training on ranks that have more or fewer batches: hvd.join() at the end of each epoch."""
import pytest
import torch
from test_join import Uneven

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, SAMPLES, data, expect_equal, loss_of, make_model, my_loss

pytestmark = pytest.mark.torch_sizes


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.parametrize("backwards", [False, True], ids=["upwards", "backwards"])
@pytest.mark.parametrize("options", ["default", "two groups"])
def check_an_uneven_epoch(job, backwards, options):
    size, uneven = hvd.size(), Uneven(hvd, backwards)
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()),
                                         groups=2 if options == "two groups" else None)
    plain = OPTIMIZERS["SGD"](reference.parameters())
    for epoch in range(3):
        for i, _ in uneven.rounds():
            optimizer.zero_grad()
            my_loss(model, 10 * epoch + i).backward()
            optimizer.step()
        last = hvd.join()
        assert last == uneven.order[-1]
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        for i in range(size):  # alone, on the data of the ranks that had some
            plain.zero_grad()
            x, y = data(10 * epoch + i)
            for rank in uneven.order[i:]:
                part = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
                (loss_of(reference, x[part], y[part]) / size).backward()
            plain.step()
        expect_equal(model, reference)
    assert torch.isfinite(next(model.parameters())).all()

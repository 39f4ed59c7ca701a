"""Ranks that wait for each other: they gave one operation to different process sets, or are in different operations."""
import re
import sys
import time

import numpy as np
import pytest

import lightcc.numpy as hvd
import ranks
from jobs import start


@pytest.mark.parametrize("np", (3, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.parametrize("name", ["x", None], ids=["named", "unnamed"])
@pytest.mark.parametrize("odd", [0, 1])
def check_the_sets_are_named_on_every_rank_and_the_next_operations_work(name, odd):
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    for _ in range(2):
        mine = pair if hvd.rank() == odd else hvd.global_process_set
        begin = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.allreduce(np.ones(3), name=name, process_set=mine)
        text = str(raised.value)
        assert "ranks disagree on the process set" in text, text
        assert f"rank {odd} gave it to process set {pair.process_set_id} (ranks 0, 1)" in text, text
        assert f"rank {1 - odd} gave it to process set 0" in text, text
        assert time.monotonic() - begin < 5
        assert hvd.allreduce(np.ones(2), name=name, op=hvd.Sum)[0] == hvd.size()
        if pair.included():
            assert hvd.allreduce(np.ones(2), name=name, op=hvd.Sum, process_set=pair)[0] == 2
    hvd.shutdown()


def check_waiting_long_in_different_sets_is_no_deadlock():
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:  # both sides come, in another order: rank 0 is late in one set, and blocked in none for ever
        handle = hvd.allreduce_async(np.ones(1), name="x", op=hvd.Sum)
        time.sleep(1.2)
        assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum, process_set=pair)[0] == 2
        assert hvd.synchronize(handle)[0] == hvd.size()
    else:
        if hvd.rank() == 1:
            assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum, process_set=pair)[0] == 2
        assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum)[0] == hvd.size()
    hvd.shutdown()


# One rank is inside `if rank == 0`, and the parameter `skipped` had no gradient there.
PROGRAM = """
import torch, lightcc.torch as hvd
hvd.init()
used, skipped = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, skipped], lr=1.0),
                                     named_parameters=[("used", used), ("skipped", skipped)])
torch.ones(1, requires_grad=True).sum().backward()  # the first backward of a process takes long
hvd.barrier()
if hvd.rank() == 0:
    used.sum().backward()
    optimizer.step()
else:
    hvd.allreduce(torch.ones(1), name="metric")
"""


def test_ranks_that_wait_for_each_other_are_told_by_the_names_of_users_long_before_it_is_a_stall():
    pytest.importorskip("torch")
    code, _, err = start("-np", 2, sys.executable, "-c", PROGRAM, LIGHTCC_DEADLOCK_CHECK_SECONDS="0.5",
                         HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4").finish(ranks.DEADLINE_S)
    (said,) = re.findall(r"deadlock: .*", err)
    assert code != 0 and "stalled: " in err, err  # ended when it would have been
    first = r"rank 0 .* waits in allreduce of tensor 'optimizer\.step\(\) .* skipped on\)' for rank 1 "
    assert re.search(first, said), said
    assert re.search(r"rank 1 .* waits in allreduce of tensor 'metric' for rank 0 ", said), said

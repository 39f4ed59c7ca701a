"""Ranks that give one operation to different process sets: found although each set negotiates by itself."""
import time

import numpy as np
import pytest

import lightcc.numpy as hvd
import ranks


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

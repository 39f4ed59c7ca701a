"""Jobs with lightcc.amp: ranks that do not do the same, ranks that are killed, and what the timeline shows."""
import json
import os
import re
import sys
from pathlib import Path

import pytest

import ranks
from jobs import launch

pytestmark = pytest.mark.skipif("torch" not in os.environ.get("LIGHTCC_TEST_FRAMEWORKS", "torch"), reason="needs torch")

PROGRAM = """
import os, torch
import lightcc.torch as hvd
hvd.init()
if hvd.rank() == 0:
    hvd.start_timeline(os.environ["FILE"])
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=.1), model.named_parameters())
precision = hvd.amp.MixedPrecision(optimizer, hvd.amp.Warmup(2))

def step():
    optimizer.zero_grad()
    with precision:
        loss = model(torch.ones(1, 2)).sum()
    precision.backward(loss)
    precision.step()

for _ in range(5):
    step()
hvd.stop_timeline()
try:
    if hvd.rank() == 0:
        step()
    else:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if hvd.rank() == 0:
        step()
except hvd.HorovodInternalError as error:
    print("refused:", error)
"""


def test_the_timeline_has_a_row_for_each_level_and_a_rank_without_policy_is_named(tmp_path):
    file = tmp_path / "timeline.json"
    output = ranks.run_script(PROGRAM, 2, FILE=str(file), HOROVOD_TIMELINE="DYNAMIC", LIGHTCC_TIMELINE_ROWS="tensors",
                              LIGHTCC_DEADLOCK_CHECK_SECONDS="1", HOROVOD_STALL_CHECK_TIME_SECONDS="2",
                              HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    for level in ("begin", "float32", "bfloat16"):
        assert f'lightcc.amp(float32,bfloat16).{level}"' in file.read_text()
    assert re.search(r"'lightcc\.amp\(float32,bfloat16\)\.bfloat16' has waited \d+ s for rank 1 ", output)
    assert output.count("refused:") == 2


@pytest.mark.slow
def test_ranks_are_killed_during_a_hold(tmp_path):
    """The levels and the loss scale are those of a job in which nobody dies."""
    worker = Path(__file__).with_name("amp_elastic_job.py")
    code, out, err = launch("-np", 2, "--min-np", 2, "--failures-per-host", 9, sys.executable, worker, tmp_path, 24, 11,
                            18, OMP_NUM_THREADS="1")
    assert code == 0, err
    ends = [json.loads(line.partition(">:end ")[2]) for line in out.splitlines() if ">:end " in line]
    assert [(end["right"], end["ranks"]) for end in ends] == [(True, 2)] * 2, ends
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.11", "killed.18"]

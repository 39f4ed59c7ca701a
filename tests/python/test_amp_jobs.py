"""Jobs with lightcc.amp whose ranks do not do the same, and what the timeline shows."""
import json
import os

import pytest

import ranks

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


@pytest.mark.skipif("torch" not in os.environ.get("LIGHTCC_TEST_FRAMEWORKS", "torch"), reason="needs torch")
def test_the_timeline_has_a_row_for_each_level_and_a_rank_without_policy_is_named(tmp_path):
    file = tmp_path / "timeline.json"
    output = ranks.run_script(PROGRAM, 2, FILE=str(file), HOROVOD_TIMELINE="DYNAMIC",
                              LIGHTCC_DEADLOCK_CHECK_SECONDS="1", HOROVOD_STALL_CHECK_TIME_SECONDS="2",
                              HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    rows = [event["args"]["name"] for event in json.loads(file.read_text()) if event.get("name") == "process_name"]
    rows += [event["args"]["name"] for event in json.loads(file.read_text()) if event.get("name") == "thread_name"]
    for level in ("float32", "bfloat16"):
        assert any(row.endswith(f"lightcc.amp(float32,bfloat16).{level}") for row in rows), rows
    assert "rank 0" in output and output.count("refused:") == 2
    assert "lightcc.amp(float32,bfloat16).bfloat16" in output

"""Ends of jobs with tables: Ctrl-C and a killed rank, in lookups, updates and serve()."""
import signal
import time

import pytest
from test_termination import Ranks, errors_of

PROGRAM = """
import sys, time
import torch
import lightcc.torch as hvd
from lightcc.torch import embedding as E
hvd.init()
user = E.HashEmbedding(16, name="user")
optimizer = E.SparseAdam(E.tables(user))
try:
    print("ready", flush=True)
    if sys.argv[1] == "serve" and hvd.rank() == 1:
        E.serve()
    while sys.argv[1] != "wait" or hvd.rank() == 0:
        user(torch.randint(0, 10_000, (500,))).sum().backward()
        optimizer.step()
    time.sleep(100)  # the other waits for this rank, until the test ends it
except hvd.HorovodInternalError as error:
    print("error", time.time(), error, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
hvd.shutdown()
print("threads", flush=True)
"""


@pytest.mark.parametrize("how", ["train", "serve"])
def test_ctrl_c_ends_the_job(how):
    with Ranks(2, PROGRAM, how) as ranks:
        ranks.wait_ready()
        since = time.time()
        ranks.kill(1, signal.SIGINT)
        assert ranks.output(1).startswith("interrupted")
        [message] = errors_of(ranks, [0], since)
        assert "rank 1" in message or how == "serve"  # interrupted in a wait, or leaving after it


def test_ctrl_c_while_another_rank_does_not_come():
    with Ranks(2, PROGRAM, "wait") as ranks:
        ranks.wait_ready()
        ranks.kill(0, signal.SIGINT)
        assert ranks.output(0).startswith("interrupted")


@pytest.mark.parametrize("how", ["train", "serve"])
def test_a_rank_that_dies_is_named(how):
    with Ranks(2, PROGRAM, how) as ranks:
        ranks.wait_ready()
        since = time.time()
        ranks.kill(1)
        [message] = errors_of(ranks, [0], since)
        assert f"rank 1 (pid {ranks.processes[1].pid}) on host" in message and "died" in message

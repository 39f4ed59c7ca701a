"""DelayedGradients, LocalSGD and DiLoCo in elastic jobs: a rank is killed in each phase of a step and an exchange."""
import sys
from pathlib import Path

import pytest
import warm

from jobs import start

pytestmark = [pytest.mark.long, pytest.mark.slow]
WORKER = Path(__file__).with_name("periodic_elastic_job.py")
STEPS = 40
KILLS = {"delayed": ("backward.3", "end.9", "step.14"),
         "local": ("end.12",),  # sync_every 3, delay 1
         "diloco": ("begin.5", "end.10", "commit.16")}  # fragments are due after 2, 4, 6, ... steps, and end one later


def loss_of(kind, folder, kills):
    """Of a job in which ranks die so."""
    running = start("-np", 2, "--min-np", 2, "--failures-per-host", 99, sys.executable, WORKER, kind, folder, STEPS,
                    *kills, popen=warm.Popen)
    code, out, err = running.finish()
    assert code == 0, err
    assert {path.name for path in folder.iterdir()} == set(kills), "some death did not come"
    assert err.count("was killed by signal 9") == len(kills), err
    ends = [line.partition(">:end ")[2] for line in out.splitlines() if ">:end " in line]
    assert len(ends) == 2 and ends[0] == ends[1] and ends[0].startswith(f"{kind} batch {STEPS} size 2"), out
    return float(ends[0].rpartition(" ")[2])


@pytest.mark.parametrize("kind", KILLS)
def test_ranks_that_are_killed_are_replaced_and_weights_stay_equal(kind, tmp_path):
    loss = loss_of(kind, tmp_path, KILLS[kind])
    assert loss < 1.0, "it has learned: the loss begins at about 4"
    if kind == "delayed":  # what was under way at a commit is a part of it
        for path in tmp_path.iterdir():
            path.unlink()
        assert loss == loss_of(kind, tmp_path, ())

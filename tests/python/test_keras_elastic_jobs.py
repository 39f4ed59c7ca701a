"""Elastic jobs with the Keras that is installed, as users run them: a worker dies, another one comes in its place."""
import re
import sys
from pathlib import Path

import pytest
import warm
from kerases import HAS_TENSORFLOW, HAS_TF_KERAS

from jobs import start

pytestmark = [pytest.mark.newest_tensorflow, pytest.mark.long]

TRAINING = Path(__file__).with_name("elastic_keras_training.py")
STEPS = 12  # of its epochs


def printed(running, text):
    """Reads the job's output up to a line with this text."""
    while (line := running.process.stdout.readline().decode()) and text not in line:
        pass
    assert line, f"the output ended before {text}: {running.process.stderr.read().decode()}"


def check_a_worker_that_dies_is_replaced(folder, how, rank, **variables):
    running = start("-np", 2, "--min-np", 1, "--failures-per-host", 2, sys.executable, TRAINING, folder, how,
                    TEST_PAUSE_S="0.02", popen=warm.Popen, **variables)
    for _ in range(STEPS + 5):  # in the second epoch
        printed(running, "size 2\n")
    (folder / f"kill.batch.{rank}").touch()
    printed(running, "size 1\n")
    printed(running, "size 2\n")  # its successor
    (folder / "stop").touch()
    code, out, err = running.finish()
    assert code == 0 and "was killed by signal 9 (SIGKILL)" in err, err
    match = re.search(r":end same epochs (\d+) loss (\S+) sizes ([\d,]+)\n", out)
    assert match, (out, err)
    sizes = list(map(int, match[3].split(",")))
    # The epochs that were begun by a world and ended by the next have their number of batches, or one more where all
    # of them were done and the end of the epoch was not committed.
    assert 0 <= len(sizes) - STEPS * int(match[1]) <= 2
    assert float(match[2]) < 1e-3
    assert sizes[0] == 2 and sizes[-1] == 2 and 1 in sizes


WAYS = [("fit", 0), *([pytest.param("function", 1, marks=pytest.mark.slow)] if HAS_TENSORFLOW else [])]


@pytest.mark.parametrize("how, rank", WAYS)
def test_a_worker_that_dies_is_replaced(tmp_path, how, rank):
    check_a_worker_that_dies_is_replaced(tmp_path, how, rank)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_a_worker_that_dies_with_tf_keras(tmp_path):
    check_a_worker_that_dies_is_replaced(tmp_path, "fit", 1, TF_USE_LEGACY_KERAS="1")

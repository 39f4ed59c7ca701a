"""Jobs of elastic_training.py: how they are started, watched and read."""
import json
import subprocess
import sys
from pathlib import Path

import elastic_numpy_model
import numpy as np
import warm

from jobs import command_of, start

TRAINING = Path(__file__).with_name("elastic_training.py")
RTOL, ATOL = 1e-4, 1e-5  # several ranks add up gradients in another order, and each step builds on the last


def job(tmp_path, *flags, passes=3, pause_s=0.0, framework="numpy", **variables):
    """framework: PyTorch where a test is about its state, too."""
    popen = subprocess.Popen if framework == "numpy" else warm.Popen
    return start(*flags, sys.executable, TRAINING, tmp_path, passes, TEST_PAUSE_S=str(pause_s),
                 TEST_FRAMEWORK=framework, popen=popen, **variables)


def result(out):
    """The world's size at each batch, of a job whose loss of workers has cost nothing: each pass has all samples, and
    but for padding in its last world none twice; and the weights are those of one process that trains the same
    batches, so that no gradient was lost or counted twice."""
    (line,) = [line for line in out.splitlines() if ">:end " in line]
    end = json.loads(line.partition(">:end ")[2])
    assert end["same"], "ranks differ"
    passes = [[json.loads(line) for line in text.splitlines()] for text in end["history"].split("\n\n")[:-1]]
    for batches in passes:
        seen = [sample for batch in batches for samples in batch for sample in samples]
        assert set(seen) == set(range(elastic_numpy_model.SAMPLES)), sorted(seen)
        assert len(seen) - elastic_numpy_model.SAMPLES < len(batches[-1]), sorted(seen)
    batches = [batch for some in passes for batch in some]
    np.testing.assert_allclose(end["weights"], _trained(end["framework"])(end["seed"], batches), RTOL, ATOL)
    return [len(batch) for batch in batches]


def _trained(framework):
    if framework == "numpy":
        return elastic_numpy_model.trained
    import elastic_model
    return elastic_model.trained


def workers(running):
    found = [(p, command_of(p)) for p in running.living()]
    return [p for p, words in found if words[:1] == [sys.executable] and str(TRAINING) in words and "-m" not in words]


def agents(running):
    return [p for p in running.living() if command_of(p) == [sys.executable, "-m", "lightcc.launch.agent"]]


def printed(running, text):
    """Reads the job's output up to a line with this text."""
    assert found(running, text), f"the output ended before {text}"


def found(running, text):
    """Reads the job's output up to a line with this text; False: there is none."""
    while (line := running.process.stdout.readline().decode()) and text not in line:
        pass
    return bool(line)


def trained(running, batches=1):
    """Reads until so many more batches are done."""
    for _ in range(batches):
        printed(running, ":batch ")

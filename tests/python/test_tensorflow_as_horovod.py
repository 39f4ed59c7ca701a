"""Scripts for TensorFlow and Keras that were written for Horovod, run on lightcc as they are."""
import re
import sys

import pytest
import tensorflow as tf
from test_as_horovod import AS_HOROVOD, SCRIPTS, TAG, TRAINING_S, expect_elastic_digits, of_all_ranks, printed

import jobs

pytestmark = pytest.mark.newest_tensorflow


def train(np, how, script, *arguments):
    """What the ranks of a job with this script printed, without their tags. TensorFlow has its own to say on stderr."""
    flags, start = (["--as-horovod"], []) if how == "flag" else ([], AS_HOROVOD)
    job = jobs.start("-np", np, *flags, sys.executable, *start, SCRIPTS / script, *arguments, OMP_NUM_THREADS="1")
    code, out, err = job.finish(TRAINING_S)
    assert code == 0, out + err
    of_all_ranks(rf"Rank (\d) of {np} parameters: (\w+)", TAG.sub("", out), np)
    return TAG.sub("", out)


def test_modules_are_lightccs_and_classes_say_horovod():
    assert printed("""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
import horovod.tensorflow as hvd
import horovod.tensorflow.keras
from horovod.tensorflow.mpi_ops import allgather
import lightcc.tensorflow
assert hvd is lightcc.tensorflow and allgather is hvd.allgather
import horovod.keras
from horovod.keras.callbacks import MetricAverageCallback
assert horovod.tensorflow.keras is lightcc.tensorflow.keras and horovod.keras is lightcc.keras
import keras, tensorflow
hvd.init()
print(type(hvd.DistributedGradientTape(tensorflow.GradientTape())))
print(type(horovod.keras.DistributedOptimizer(keras.optimizers.Adam())))
""") == "<class 'horovod.tensorflow.GradientTape'>\n<class 'horovod._keras.Adam'>\n"


def accuracy(out):
    return float(re.search(r"Test accuracy: ([\d.]+)%", out)[1])


@pytest.mark.parametrize("np, how, arguments", [
    (2, "module", ["--fp16-allreduce"]),
    pytest.param(3, "flag", ["--use-adasum", "--batch-size", "16"], marks=pytest.mark.slow)])
def test_digits_learns(np, how, arguments, tmp_path):
    out = train(np, how, "tensorflow2_digits.py", *arguments, "--checkpoint-dir", tmp_path)
    losses = [float(loss) for loss in re.findall(r"Loss: ([\d.]+)", out)]
    assert len(losses) == 8 and losses[-1] < losses[0] / 2 and accuracy(out) > 85, out
    saved = [shape for _, shape in tf.train.list_variables(str(tmp_path))]
    assert saved.count([3, 3, 1, 16]) == 3, saved  # a kernel and Adam's two moments of it


@pytest.mark.slow
def test_keras_digits_learns():
    expect_trained(train(3, "flag", "keras_digits.py", "--backward-passes-per-step", 2), 1, 6)


@pytest.mark.slow
def test_keras_digits_is_resumed(tmp_path):
    """The checkpoint is on rank 0 alone, which sends the others what it has loaded."""
    arguments = ("--checkpoint-format", tmp_path / "checkpoint-{epoch}.keras")
    first = expect_trained(train(2, "flag", "keras_digits.py", *arguments, "--epochs", 3), 1, 3)
    (tmp_path / "checkpoint-3.keras").rename(tmp_path / "checkpoint-2.keras")
    assert expect_trained(train(2, "module", "keras_digits.py", *arguments), 3, 6)[0] < first[1]


def expect_trained(out, first, last):
    """The losses of these epochs."""
    assert f"Trained epochs {first} to {last}" in out
    losses = [float(loss) for loss in re.search(r"Losses: (.*)", out)[1].split()]
    assert len(losses) == last - first + 1 and losses[-1] < losses[0] and accuracy(out) > 70, out
    return losses


def test_elastic_digits():
    expect_elastic_digits("keras_elastic_digits.py")

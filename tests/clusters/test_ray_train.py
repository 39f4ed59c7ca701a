"""LightccTrainer, with Ray Train of the version that is installed."""
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

import lightcc
import trained_digits

NEEDS = "ray"


def fit(loop, tmp_path, max_failures=0, num_workers=2, **arguments):
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from lightcc.ray.train import LightccTrainer
    return LightccTrainer(
        loop, scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=max_failures)),
        **arguments).fit()


def test_digits_have_the_losses_of_run_and_ranks_are_rays(cluster, tmp_path):
    def loop(config):
        import ray.train

        import lightcc.torch as hvd
        losses = trained_digits.train(config["steps"])
        context = ray.train.get_context()
        assert (context.get_world_rank(), context.get_world_size()) == (hvd.rank(), hvd.size())
        assert os.environ["HOROVOD_START_TIMEOUT"] == "317"
        assert os.environ["HOROVOD_LOCAL_RANK"] == str(hvd.local_rank())
        Path(tmp_path, f"losses.{hvd.rank()}").write_text(json.dumps(losses))

    from lightcc.ray.train import LightccConfig
    fit(loop, tmp_path, train_loop_config={"steps": 10}, horovod_config=LightccConfig(timeout_s=317))
    expected = lightcc.run(trained_digits.train, args=(10,), num_proc=2)
    assert [json.loads(Path(tmp_path, f"losses.{rank}").read_text()) for rank in range(2)] == expected


def test_a_killed_worker_starts_all_again_from_the_checkpoint(cluster, tmp_path):
    def loop():
        import numpy as np
        import ray.train

        import lightcc.numpy as hvd
        hvd.init()
        done, checkpoint = [], ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder:
                done = json.loads(Path(folder, "done").read_text())
        began_with = len(done)
        for step in range(began_with, 4):
            done.append(float(hvd.allreduce(np.full(1, float(step)), op=hvd.Sum)[0]))
            if step == 2 and began_with == 0 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "done").write_text(json.dumps(done))
                ray.train.report({"done": done, "began_with": began_with},
                                 checkpoint=ray.train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None)

    # Ray may not have noted a checkpoint yet when the worker dies: then all begins again without one.
    result = fit(loop, tmp_path, max_failures=20)
    assert result.metrics["done"] == [0, 2, 4, 6] and result.metrics["began_with"] in (1, 2, 3)


def test_an_exception_ends_the_training_with_the_traceback(cluster, tmp_path):
    def loop():
        import numpy as np

        import lightcc.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such image")
        hvd.allreduce(np.ones(1))

    with pytest.raises(Exception, match="no such image"):
        fit(loop, tmp_path)

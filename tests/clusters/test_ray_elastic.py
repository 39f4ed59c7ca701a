"""Elastic jobs on a cluster of Ray whose nodes come and go. A rank takes a whole node of two cores."""
import functools
import os
import re
import signal
import subprocess
import sys
import threading

import elastic_sizes
import pytest

from jobs import wait_until

NEEDS = "ray"
DEADLINE_S = 300


def begin(folder, **settings):
    from lightcc.ray import ElasticRayExecutor

    executor, outcome = ElasticRayExecutor(ElasticRayExecutor.create_settings(**settings), cpus_per_slot=2), []

    def run():
        try:
            outcome.append(executor.run(functools.partial(elastic_sizes.train, str(folder))))
        except RuntimeError as error:
            outcome.append(error)

    executor.start()
    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_nodes_come_and_are_lost(cluster, tmp_path):
    import ray

    thread, outcome = begin(tmp_path, min_num_proc=2, timeout_s=DEADLINE_S)

    def wait_for(name, what):
        wait_until((tmp_path / name).exists, what, lambda: (os.listdir(tmp_path), outcome))

    wait_for("size.1.2", "a world of two")
    node = cluster.add_node(num_cpus=2)
    wait_for("size.2.3", "a world of three")
    cluster.remove_node(node, allow_graceful=False)
    wait_for("size.3.2", "a world of two again")
    (tmp_path / "stop").touch()
    thread.join(DEADLINE_S)
    assert outcome == [[[2, 3, 2]] * 2]
    wait_until(lambda: ray.available_resources().get("CPU") == 4, "Ray to have its cores", ray.available_resources)


def test_a_killed_rank_costs_its_node_and_the_job_goes_on(cluster, tmp_path):
    thread, outcome = begin(tmp_path, min_num_proc=1, max_num_proc=2, timeout_s=DEADLINE_S)
    wait_until(lambda: len(list(tmp_path.glob("rank.*.2"))) == 2, "a world of two",
               lambda: (os.listdir(tmp_path), outcome))
    before = len(list(tmp_path.glob("size.*")))
    os.kill(int((tmp_path / "rank.1.2").read_text()), signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("size.*"))) > before, "another world",
               lambda: (os.listdir(tmp_path), outcome))
    (tmp_path / "stop").touch()
    thread.join(DEADLINE_S)
    assert outcome[0][0][-2:] == [2, 1]


def test_ray_executor_with_min_workers_is_elastic(cluster, monkeypatch):
    """A rank has Ray's GPUs, not those of the driver, which may be a task without any."""
    from lightcc.ray import RayExecutor

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def world(value, times):
        import lightcc.numpy as hvd
        hvd.init()
        return hvd.size(), value * times, os.environ["OURS"], os.environ["CUDA_VISIBLE_DEVICES"]

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=DEADLINE_S), min_workers=1, max_workers=1,
                           use_gpu=True)
    executor.start(extra_env_vars={"OURS": 7})
    assert executor.run(world, args=(2,), kwargs={"times": 3}) == [(1, 6, "7", "0,1")]
    with pytest.raises(ValueError, match="has run\\(\\) only"):
        executor.execute(print)
    with pytest.raises(ValueError, match="callbacks are for RayExecutor with num_workers"):
        executor.run(world, args=(2, 3), callbacks=[print])
    executor.shutdown()


def carry(cluster, node):
    command = [sys.executable, "-m", "lightcc.ray.carry", cluster.address, node, "1", "0", "exit 3"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True)


def test_the_carrier_says_what_went_wrong(cluster):

    node = cluster.head_node.node_id
    for there, code, text in ((node, 3, ""), ("f" * len(node), 255, r"Ray's node f+: \w*Error: \w")):
        carrier = carry(cluster, there)
        errors = carrier.communicate(timeout=DEADLINE_S)[1]
        assert carrier.returncode == code and re.search(text, errors), errors


def test_the_carrier_says_on_what_it_waits(cluster):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=2)
    class Holder:
        def hold(self):
            pass

    node = cluster.head_node.node_id
    holder = Holder.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    ray.get(holder.hold.remote(), timeout=DEADLINE_S)
    carrier = carry(cluster, node)
    watchdog = threading.Timer(DEADLINE_S, carrier.kill)  # readline has no deadline
    watchdog.start()
    try:
        assert re.match(r"Ray's node \w+: after 5 s Ray had not given CPU: 1, GPU: 0", carrier.stderr.readline())
        ray.kill(holder)
        assert carrier.wait(DEADLINE_S) == 3
    finally:
        watchdog.cancel()
        carrier.kill()
        carrier.communicate()


def test_wrong_arguments():
    from lightcc.ray import ElasticRayExecutor

    settings = ElasticRayExecutor.create_settings()
    with pytest.raises(ValueError, match="gpus_per_slot=1 needs use_gpu=True"):
        ElasticRayExecutor(settings, gpus_per_slot=1)
    with pytest.raises(ValueError, match="override_discovery=False needs"):
        ElasticRayExecutor(settings, override_discovery=False)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        ElasticRayExecutor(settings).run(sys.exit)

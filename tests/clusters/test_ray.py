"""RayExecutor, on a cluster of two of Ray's nodes."""
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import lightcc
import trained_digits
from jobs import command_of, wait_until

NEEDS = "ray"
DEADLINE_S = 300


@pytest.fixture
def start(cluster):
    """Starts executors, and sees afterwards that nothing of them is left in Ray."""
    import ray

    from lightcc.ray import RayExecutor
    started = []

    def begin(start_arguments=None, **arguments):
        settings = RayExecutor.create_settings(timeout_s=DEADLINE_S, placement_group_timeout_s=DEADLINE_S)
        started.append(RayExecutor(settings, **arguments))
        started[-1].start(**(start_arguments or {}))
        return started[-1]

    yield begin
    for executor in started:
        executor.shutdown()
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "Ray to have all cores",
               ray.available_resources)
    groups = ray.util.placement_group_table()
    assert {group["state"] for group in groups.values()} <= {"REMOVED"}


def test_digits_have_the_losses_of_run(start):
    assert start(num_workers=2).run(trained_digits.train) == lightcc.run(trained_digits.train, num_proc=2)


def test_variables_say_what_hvd_says_and_ranks_of_a_node_are_neighbours(start):
    executor = start(num_hosts=2, num_workers_per_host=2)
    for rank, (said, variables, total) in enumerate(executor.run(trained_digits.world)):
        assert said == variables and said[:2] == [rank, 4] and total == 6
    nodes = executor.execute(lambda _: __import__("ray").get_runtime_context().get_node_id())
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


class Counter:
    """An executable: it stays on its worker from call to call."""

    def __init__(self, start, by=1):
        self.value, self.by = start, by

    def count(self):
        self.value += self.by
        return self.value, os.environ["OURS"]


def test_executables_stay_and_have_the_variables(start):
    executor = start(num_workers=2, start_arguments={
        "executable_cls": Counter, "executable_args": [10], "executable_kwargs": {"by": 2},
        "extra_env_vars": {"OURS": "7"}})
    assert executor.execute(lambda counter: counter.count()) == [(12, "7")] * 2
    assert executor.execute_single(lambda counter: counter.count()) == (14, "7")
    assert executor.execute(lambda counter: counter.value) == [14, 12]


def test_what_rank_0_logs_reaches_the_callbacks_in_order(start):
    def report(count):
        from lightcc.ray import ray_logger
        for number in range(count):
            ray_logger.log({"number": number, "rank": os.environ["HOROVOD_RANK"]})
        return count

    executor, first, second = start(num_workers=2), [], []
    assert executor.run(report, args=[5], callbacks=[first.append, second.append]) == [5, 5]
    assert first == second == [{"number": number, "rank": "0"} for number in range(5)]
    assert executor.run(report, kwargs={"count": 2}) == [2, 2] and len(first) == 5  # nobody listens

    def report_and_fail():
        report(1)
        raise KeyError("no such image")

    with pytest.raises(RuntimeError, match="no such image"):
        executor.run(report_and_fail, callbacks=[first.append])
    assert executor.run(report, args=[1]) == [1, 1]
    with pytest.raises(ZeroDivisionError):
        executor.run(report, args=[1], callbacks=[lambda info: 1 // info["number"]])
    assert executor.run(report, args=[1]) == [1, 1]


def initialised_again():
    import numpy as np

    import lightcc.numpy as hvd
    hvd.init()
    total = float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
    hvd.shutdown()
    return total, len(os.listdir("/proc/self/fd"))


def test_each_run_may_init_and_shut_down_and_nothing_leaks(start):
    executor = start(num_workers=2)
    runs = [executor.run(initialised_again) for _ in range(30)]
    assert {total for run in runs for total, _ in run} == {2.0}
    for rank in range(2):  # a leak in each run would leave 25; Ray itself opens a few at any time
        assert runs[-1][rank][1] <= runs[4][rank][1] + 10


def test_run_remote_does_not_wait(start):
    import ray

    executor = start(num_workers=2)
    calls = [executor.run_remote(trained_digits.world), executor.run_remote(initialised_again),
             executor.run_remote(trained_digits.world)]
    first, again, last = (ray.get(call, timeout=DEADLINE_S) for call in calls)
    assert first == last and [total for total, _ in again] == [2.0, 2.0]


def test_who_is_the_cause(cluster):
    from ray.exceptions import ActorDiedError, ObjectLostError

    from lightcc.core.exceptions import HorovodInternalError
    from lightcc.ray.failures import Failure, described, wait_s

    lost, asked = Failure(0, "host h0", False, HorovodInternalError()), Failure(1, "host h0", False, ActorDiedError())
    ended, raised = Failure(2, "host h1", True, ActorDiedError()), Failure(3, "host h1", False, KeyError("image"))
    gone = Failure(2, "host h1", True, ObjectLostError("", None, ""))
    for failures, said, more_s in (
            ((lost, asked, ended, raised), "rank 2 on host h1 has ended (then ranks 0, 1, 3 failed)", 2),
            ((asked, raised), "rank 3 on host h1 raised an exception (then rank 1 failed)", 2),
            ((lost, gone), "rank 2 on host h1 has ended (then rank 0 failed)", 2),
            ((lost, asked), "rank 0 on host h0 raised an exception (then rank 1 failed)", 30)):
        assert str(described(failures)).startswith(f"run: {said}\n\n")
        assert wait_s(failures) == more_s
    assert wait_s(()) is None


def test_an_exception_names_rank_and_node_and_the_next_run_works(start):
    def fail():
        import numpy as np

        import lightcc.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such image")
        hvd.allreduce(np.ones(1))

    executor = start(num_workers=2)
    with pytest.raises(RuntimeError, match=r"(?s)^run: rank 1 on host \S+ \(node \w+\) raised an exception.*"
                                           r"KeyError: 'no such image'"):
        executor.run(fail)
    assert [total for _, _, total in executor.run(trained_digits.world)] == [1, 1]


def test_a_killed_worker_is_named_and_the_executor_starts_again(start):
    executor = start(num_workers=2)
    with pytest.raises(RuntimeError, match=r"^run: rank 1 on host \S+ \(node \w+\) has ended"):
        executor.run(trained_digits.die, args=(1,))
    with pytest.raises(RuntimeError, match=r"^run: rank 1 on host"):
        executor.run(trained_digits.world)
    executor.shutdown()
    executor.start()
    assert [total for _, _, total in executor.run(trained_digits.world)] == [1, 1]


def test_two_executors_side_by_side(start):
    executors, totals = [start(num_workers=2), start(num_workers=2)], {}

    def use(index):
        totals[index] = [total for _, _, total in executors[index].run(trained_digits.world)]

    threads = [threading.Thread(target=use, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert totals == {0: [1, 1], 1: [1, 1]}


def test_every_worker_of_a_node_sees_its_gpus(start):
    executor = start(num_workers=2, use_gpu=True)
    assert executor.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == ["0,1", "0,1"]


def test_workers_go_into_the_placement_group_that_is_there(start):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=0)
    def inside():
        from lightcc.ray import RayExecutor
        executor = RayExecutor(None, num_workers=2)
        executor.start()
        totals = [total for _, _, total in executor.run(trained_digits.world)]
        executor.shutdown()
        return totals, len(ray.util.placement_group_table())

    before = len(ray.util.placement_group_table())
    group = placement_group([{"CPU": 1}] * 2)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    assert ray.get(inside.options(scheduling_strategy=strategy).remote(), timeout=DEADLINE_S) == ([1, 1], before + 1)
    remove_placement_group(group)


def test_a_placement_group_that_is_too_small_says_for_how_many_it_is_enough(cluster):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=0)
    def inside():
        from lightcc.ray import RayExecutor
        with pytest.raises(TimeoutError, match=r"after 1 s the placement group of the caller has had room for [01] of "
                                               r"2 workers with \{CPU: 1\} each\. Ask for fewer workers"):
            RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=2).start()

    group = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    ray.get(inside.options(scheduling_strategy=strategy).remote(), timeout=DEADLINE_S)
    remove_placement_group(group)


def test_no_room_says_what_was_asked_and_what_is_free(cluster):
    from lightcc.ray import RayExecutor

    for arguments, asked in (({"num_workers": 5}, r"5 x \{CPU: 1\} \(PACK\)"),
                             ({"num_hosts": 3}, r"3 x \{CPU: 1\} \(STRICT_SPREAD\)")):
        with pytest.raises(TimeoutError, match=rf"^Ray has not placed {asked} within 1 s\. Free now in the cluster: "
                                               r"CPU: \d, GPU: 2; node \S+ has CPU: 2.*placement_group_timeout_s"):
            RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), **arguments).start()


@pytest.mark.parametrize("arguments, text", (
    ({"num_workers": 2, "min_workers": 1}, "not both"), ({"max_workers": 2}, "min_workers too"), ({}, "give either"),
    ({"num_workers": 2, "num_hosts": 2}, "give either"), ({"num_workers": 0}, "at least 1 worker"),
    ({"num_workers": 1, "gpus_per_worker": 1}, "needs use_gpu=True")))
def test_arguments_that_contradict_each_other(arguments, text):
    from lightcc.ray import RayExecutor

    with pytest.raises(ValueError, match=text):
        RayExecutor(None, **arguments)


def test_what_cannot_be_pickled_is_named(start):
    executor = start(num_workers=1)
    with pytest.raises(TypeError, match=r"run: args\[0\], of type lock, cannot be pickled"):
        executor.run(print, args=(threading.Lock(),))
    with pytest.raises(TypeError, match="run: func is 3"):
        executor.run(3)
    with pytest.raises(RuntimeError, match="(?s)^run: rank 0 on host .*pickle"):
        executor.run(threading.Lock)


def test_the_secret_is_in_no_log_and_on_no_command_line(start):
    import ray

    def known_secret():
        from lightcc.core import meeting
        meeting.secrets.token_hex = lambda count: "0b5e55ed" * (count // 4)

    executor = start(num_workers=2)
    executor.run(known_secret)
    executor.run(initialised_again)
    executor.run(initialised_again)  # with a new meeting, which has that secret
    with pytest.raises(RuntimeError):
        executor.run(trained_digits.die, args=(1,))
    logs = Path(ray._private.worker._global_node.get_session_dir_path())
    found = subprocess.run(["grep", "-rlas", "0b5e55ed", logs], stdout=subprocess.PIPE, text=True).stdout
    commands = [word for process in psutil.process_iter() for word in command_of(process)]
    assert list(logs.glob("logs/worker-*"))
    assert found == "" and not [word for word in commands if "0b5e55ed" * 4 in word]


DRIVER = """
import sys
from pathlib import Path
import ray
from lightcc.ray import RayExecutor

def work(folder):
    import os, time
    import lightcc.numpy as hvd
    hvd.init()
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600)

ray.init(address=sys.argv[1])
executor = RayExecutor(None, num_workers=2)
executor.start()
executor.run(work, args=(sys.argv[2],))
"""


def test_the_workers_end_with_the_driver(cluster, tmp_path):
    import ray

    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, str(tmp_path)])
    try:
        wait_until(lambda: len(os.listdir(tmp_path)) == 2, "both ranks to begin")
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not [pid for pid in os.listdir(tmp_path) if Path("/proc", pid).exists()], "the ranks to end")
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "Ray to have all cores")


def test_a_lost_node_ends_the_run(cluster, start):
    import ray

    executor, runs = start(num_hosts=2), Path(os.environ["HOME"], "runs")

    def lose_a_node():
        wait_until(runs.exists, "the run to begin")
        cluster.remove_node(list(cluster.worker_nodes)[0], allow_graceful=False)

    losing = threading.Thread(target=lose_a_node)
    losing.start()

    def work():
        import numpy as np

        import lightcc.numpy as hvd
        hvd.init()
        hvd.barrier()
        runs.touch()
        while True:
            hvd.allreduce(np.ones(1))

    with pytest.raises(RuntimeError, match=r"^run: rank \d on host \S+ \(node \w+\) (has ended|raised an exception)"):
        executor.run(work)
    losing.join()
    executor.shutdown()
    wait_until(lambda: len([node for node in ray.nodes() if node["Alive"]]) == 1, "Ray to notice")
    cluster.add_node(num_cpus=2)  # for the other tests

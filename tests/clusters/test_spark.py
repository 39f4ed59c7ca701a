"""run() and HorovodRunner, in a classic session and by Spark Connect, whose server is on loopback."""
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from spark_session import OWN_MARK

import lightcc
import trained_digits
from jobs import MARK, command_of, kill, marked, wait_until

NEEDS = "pyspark"
DEADLINE_S = 600


def test_digits_have_the_losses_of_run(spark):
    from lightcc.spark import run
    assert run(trained_digits.train, num_proc=2) == lightcc.run(trained_digits.train, num_proc=2)


def test_variables_say_what_hvd_says_and_slots_are_the_default(spark):
    from lightcc.spark import run
    for rank, (said, variables, total) in enumerate(run(trained_digits.world)):
        assert said == variables and said[:2] == [rank, 2] and total == 1


def speak(text, size):
    print(text, os.environ["OURS"], os.environ[MARK])
    print("careful", file=sys.stderr)
    return b"x" * size


def test_arguments_output_and_large_results(spark):
    from lightcc.spark import run
    out, err, size = io.StringIO(), io.StringIO(), (16 << 20) + 5
    results = run(speak, args=("hello",), kwargs={"size": size}, num_proc=2, env={"OURS": "7"}, stdout=out, stderr=err)
    assert results == [b"x" * size] * 2
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:hello 7 {OWN_MARK}" for rank in range(2)]
    assert sorted(line for line in err.getvalue().splitlines() if "careful" in line) == [
        "[0]<stderr>:careful", "[1]<stderr>:careful"]


def test_an_exception_names_rank_and_host_and_the_session_goes_on(spark):
    from lightcc.spark import run

    def fail():
        import numpy as np

        import lightcc.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such image")
        hvd.allreduce(np.ones(1))

    with pytest.raises(RuntimeError, match=r"(?s)^run: rank 1 on host \S+ raised an exception\n\nTraceback.*"
                                           r"KeyError: 'no such image'\n$"):
        run(fail, num_proc=2)
    assert [total for _, _, total in run(trained_digits.world, num_proc=2)] == [1, 1]


def test_a_killed_rank_is_named(spark):
    from lightcc.spark import run
    with pytest.raises(RuntimeError, match=r"^run: rank 1 on host \S+ was killed by SIGKILL before its function"):
        run(trained_digits.die, args=(1,), num_proc=2)


def test_a_python_that_does_not_start_is_named(spark):
    from lightcc.spark import run
    with pytest.raises(RuntimeError, match=r"^run: rank \d on host \S+ exited with code 1 before its function"):
        run(trained_digits.world, num_proc=2, executable="/bin/false")


def begin_daemon():
    return subprocess.Popen(["sleep", "3600"], start_new_session=True).pid


def test_a_daemon_that_holds_the_output_open_does_not_hold_the_run(spark):
    from lightcc.spark import run
    (daemon,) = run(begin_daemon, num_proc=1)
    os.kill(daemon, signal.SIGKILL)


def test_too_few_slots(spark):
    from lightcc.spark import run
    with pytest.raises(TimeoutError, match=r"^run: Spark has not started 3 tasks at the same time within 1 s: it has 2 "
                                           r"slots for tasks\. Ask for fewer ranks"):
        run(trained_digits.world, num_proc=3, start_timeout=1)


def test_slots_that_other_jobs_have(spark, tmp_path):
    """The job is cancelled, and does not start later."""
    from lightcc.spark import run

    def hold(batches):
        Path(tmp_path, f"held.{os.getpid()}").touch()
        while not Path(tmp_path, "go").exists():
            time.sleep(0.02)
        yield from batches

    holding = threading.Thread(
        target=lambda: spark.range(0, 2, 1, 2).mapInArrow(hold, "id long").collect())
    holding.start()
    try:
        wait_until(lambda: len(list(tmp_path.glob("held.*"))) == 2, "the other job to begin")
        with pytest.raises(TimeoutError, match=r"it has 2 slots for tasks, and other jobs have some of them\."):
            run(trained_digits.world, num_proc=2, start_timeout=1)
    finally:
        Path(tmp_path, "go").touch()
        holding.join(DEADLINE_S)
    assert [total for _, _, total in run(trained_digits.world, num_proc=2)] == [1, 1]


def test_a_job_that_is_cancelled_at_once_does_not_start_later(spark):
    from lightcc.launch import pickling
    from lightcc.spark.session import Session
    from lightcc.spark.task import Call

    function = io.BytesIO()
    pickling.write(function, time.sleep, (3600,), {})
    stage = Session().begin(1, Call(function.getvalue(), {}, None, False))
    stage.cancel()
    assert stage.over.wait(DEADLINE_S) and stage.error is not None


def test_progress_of_other_queries_says_nothing_of_ours():
    """Spark Connect tells of all queries of a session, of each in the thread that waits for it."""
    from lightcc.spark.session import Stage

    class Connect:
        def __init__(self):
            self.handlers = []
            self.registerProgressHandler, self.removeProgressHandler = self.handlers.append, self.handlers.remove

        def addTag(self, tag):
            pass

        def tell(self, inflight_tasks):
            self.handlers[0](stages=[], inflight_tasks=inflight_tasks, operation_id="one", done=False)

    session, turns, told = Connect(), queue.Queue(), queue.Queue()

    def collect():
        while (tasks := turns.get()) is not None:
            session.tell(tasks)
            told.put(tasks)
        return []

    stage = Stage(session, None, collect)
    turns.put(0)
    assert told.get() == 0 and not stage.has_started()
    session.tell(2)
    assert not stage.has_started()
    turns.put(1)
    assert told.get() == 1 and stage.has_started()
    turns.put(None)
    assert stage.over.wait(DEADLINE_S) and session.handlers == [] and stage.error is None


def wait_for_ever(folder):
    import numpy as np

    import lightcc.numpy as hvd
    hvd.init()
    hvd.allreduce(np.ones(1))
    Path(folder, f"rank.{hvd.rank()}").write_text(str(os.getpid()))
    while True:
        hvd.allreduce(np.ones(1))


@pytest.mark.parametrize("spark", ["classic"], indirect=True)  # the other one has no executors
def test_a_lost_executor_ends_the_run_and_the_next_one_works(spark, tmp_path):
    from lightcc.spark import run

    def kill_an_executor():
        wait_until(lambda: len(list(tmp_path.glob("rank.*"))) == 2, "both ranks", within_s=DEADLINE_S)
        found = [process for process in marked(OWN_MARK)
                 if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command_of(process)]
        found[0].kill()

    killing = threading.Thread(target=kill_an_executor)
    killing.start()
    said = r"^run: (the job of Spark has failed: (?s:.)*ExecutorLostFailure|rank \d on)"  # whichever Spark hears first
    with pytest.raises(RuntimeError, match=said):
        run(wait_for_ever, args=(str(tmp_path),), num_proc=2)
    killing.join(DEADLINE_S)
    assert [total for _, _, total in run(trained_digits.world, num_proc=2)] == [1, 1]


def test_two_jobs_of_a_session_side_by_side(spark):
    from lightcc.spark import run
    totals = {}

    def use(index):
        totals[index] = [total for _, _, total in run(trained_digits.world, num_proc=1)]

    threads = [threading.Thread(target=use, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert totals == {0: [0], 1: [0]}


def test_horovod_runner(spark, capfd):
    from lightcc.spark import HorovodRunner

    def main(x):
        import lightcc.numpy as hvd
        hvd.init()
        return hvd.rank(), hvd.size(), x

    assert HorovodRunner(np=2).run(main, x=3) == (0, 2, 3)
    assert HorovodRunner(np=-2).run(main, x=4) == (0, 2, 4)
    assert HorovodRunner(np=0).run(main, x=5) == (0, 2, 5)
    with pytest.raises(ValueError, match="driver_log_verbosity='loud'"):
        HorovodRunner(np=1, driver_log_verbosity="loud")


def test_what_cannot_be_pickled_is_named(spark):
    from lightcc.spark import run
    with pytest.raises(TypeError, match=r"run: args\[0\], of type lock, cannot be pickled"):
        run(print, args=(threading.Lock(),))
    with pytest.raises(RuntimeError, match="(?s)^run: rank 0 on host .*pickle"):
        run(threading.Lock, num_proc=1)
    with pytest.raises(ValueError, match="num_proc=0"):
        run(print, num_proc=0)


def test_the_older_api_runs_ranks_too(spark):
    """That of Spark 3.3 and 3.4, which this Spark still has."""
    import pickle

    from lightcc.launch import pickling
    from lightcc.spark import session
    from lightcc.spark.task import RESULT, Call

    function = io.BytesIO()
    pickling.write(function, trained_digits.world, (), {})
    here = session.Session()
    if here._context is None:
        pytest.skip("Spark Connect has no RDDs")
    parts = session.by_rdd(here._context, 2, Call(function.getvalue(), {}, None, False))
    assert [pickle.loads(part.data)[2] for part in parts if part.kind == RESULT] == [1, 1]


INTERRUPTED = """
import sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from lightcc.spark import run

def work():
    Path(started).touch()
    time.sleep(3600)

started = sys.argv[1]
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
try:
    run(work, num_proc=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("signum", (signal.SIGINT, signal.SIGKILL))
def test_the_ranks_end_with_the_driver(signum, tmp_path):
    mark, program = f"driver {tmp_path}", tmp_path / "driver.py"
    own = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}  # not other sessions'
    program.write_text(INTERRUPTED)
    driver = subprocess.Popen(  # without preexec_fn, whose fork gRPC's threads of a session here may not survive
        [sys.executable, program, tmp_path / "started"], stdout=subprocess.PIPE, text=True,
        env={**own, "LIGHTCC_TEST_MARK": mark, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"})
    try:
        wait_until((tmp_path / "started").exists, "a rank to begin")
        driver.send_signal(signum)
        assert driver.communicate(timeout=DEADLINE_S)[0] == ("interrupted\n" if signum == signal.SIGINT else "")
        wait_until(lambda: not marked(mark), "Spark and the ranks to end", lambda: marked(mark))
    finally:
        kill(marked(mark))
        driver.wait()


def test_the_start_timeout_of_the_environment(spark, monkeypatch):
    from lightcc.spark import run
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "0.5")
    with pytest.raises(TimeoutError, match=r"within 0\.5 s: it has 2 slots"):
        run(trained_digits.world, num_proc=3)
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HOROVOD_SPARK_START_TIMEOUT=soon: expected seconds"):
        run(trained_digits.world, num_proc=2)


def test_no_session_and_dynamic_allocation(monkeypatch):
    from pyspark.sql import SparkSession

    from lightcc.spark import run

    class Dynamic:
        sparkContext = None
        conf = {"spark.dynamicAllocation.enabled": "true"}

    def none():
        raise RuntimeError("no session")

    monkeypatch.setattr(SparkSession, "active", lambda: Dynamic)
    with pytest.raises(RuntimeError, match="^run: all ranks must run at the same time.*dynamicAllocation"):
        run(print)
    monkeypatch.setattr(SparkSession, "active", none)
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", None)
    with pytest.raises(RuntimeError, match="^run: there is no active Spark session here"):
        run(print)

"""run_elastic(), while executors come and are lost."""
import io
import os
import threading
import time

import elastic_sizes
import psutil
import pytest

import trained_digits
from jobs import command_of, wait_until

NEEDS = "pyspark"
DEADLINE_S = 600


def lose_one(pid):
    """What Spark loses: the executor's JVM, which Spark starts again; in Spark's local mode, where there is none, the
    Python of the task. pid: of a rank there."""
    above = psutil.Process(pid).parents()
    agents = [process for process in above if "lightcc.launch.agent" in command_of(process)]
    found = [process for process in above if "org.apache.spark.executor.CoarseGrainedExecutorBackend"
             in command_of(process)] or [agents[0].parent()]
    found[0].kill()


def test_executors_are_lost_and_come(spark, tmp_path):
    from lightcc.spark import run_elastic
    outcome, said = [], io.StringIO()
    thread = threading.Thread(target=lambda: outcome.append(
        run_elastic(elastic_sizes.train, args=(str(tmp_path), "size.2.1"), num_proc=2, min_num_proc=1, stderr=said)))
    thread.start()

    def detail():
        return os.listdir(tmp_path), outcome, said.getvalue()

    try:
        wait_until(lambda: (tmp_path / "rank.1.2").exists(), "a world of two", detail, within_s=DEADLINE_S)
        lose_one(int((tmp_path / "rank.1.2").read_text()))
        wait_until(lambda: (tmp_path / "size.2.1").exists(), "a world of one", detail, within_s=DEADLINE_S)
        wait_until(lambda: (tmp_path / "size.3.2").exists(), "a world of two again", detail, within_s=DEADLINE_S)
    finally:
        (tmp_path / "stop").touch()
        thread.join(DEADLINE_S)
    assert outcome == [[[2, 1, 2]]]
    assert "lost host" in said.getvalue()


def speak(text):
    print(text, os.environ["OURS"])
    return trained_digits.world()[0][:2]


def test_results_output_and_what_goes_wrong(spark):
    from lightcc.spark import run_elastic
    out, err = io.StringIO(), io.StringIO()
    results = run_elastic(speak, args=("hello",), num_proc=2, env={"OURS": "7"}, stdout=out, stderr=err)
    assert results == [[0, 2], [1, 2]]
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:hello 7" for rank in range(2)]

    with pytest.raises(RuntimeError, match=r"(?s)^run: no host is left.*worker \d \(pid \d+ on host \S+\) raised an "
                                           r"exception\n\nTraceback.*KeyError: 'OURS'"):
        run_elastic(speak, args=("hello",), num_proc=2, stdout=out, stderr=err)
    with pytest.raises(TimeoutError, match=r"^run_elastic: Spark has not started 3 tasks .* it has 2 slots for"):
        run_elastic(time.sleep, args=(0,), num_proc=3, start_timeout=1)
    with pytest.warns(DeprecationWarning, match="min_np is deprecated, use min_num_proc"), \
            pytest.raises(ValueError, match=r"min_num_proc=3, num_proc=2, max_num_proc=2: expected 1 <= min"):
        run_elastic(time.sleep, args=(0,), num_proc=2, min_np=3)


@pytest.mark.parametrize("spark", ["connect"], indirect=True)  # a cluster tries each task four times
def test_tasks_that_cannot_reach_us_are_no_hosts(spark, monkeypatch):
    """As where a firewall is in between: port 1 of this host has no server."""
    from lightcc.launch.offers import Offers
    from lightcc.spark import run_elastic

    invitation = Offers.invitation
    monkeypatch.setattr(Offers, "invitation", lambda offers, number: invitation(offers, number)._replace(port=1))
    with pytest.raises(RuntimeError, match=r"(?s)^run_elastic: 3 tasks of Spark one after the other have failed before "
                                           r"they reached this process.*cannot be reached from host \S+ at port 1 "):
        run_elastic(time.sleep, args=(0,), num_proc=1)

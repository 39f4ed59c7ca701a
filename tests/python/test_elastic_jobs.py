"""Elastic jobs as users run them: lightccrun, workers that train, and deaths and hosts that come and go meanwhile."""
import contextlib
import os
import random
import re
import signal
import sys
import time

import psutil
import pytest

from elastic_jobs import TRAINING, agents, found, job, printed, result, trained, workers
from jobs import Job, launch, wait_until

pytestmark = pytest.mark.long

SEVERAL_HOSTS = ("--launch-command", "sh -c {command}")  # which are all this one


def test_an_unbroken_job():
    code, out, err = launch("-np", 2, "--min-np", 1, sys.executable, TRAINING, "/nonesuch", 2, TEST_FRAMEWORK="torch")
    assert code == 0, err
    assert result(out) == [2] * 24


def test_workers_know_that_their_job_is_elastic():
    code, out, _ = launch("-np", 2, "--min-np", 1, "sh", "-c",
                          "echo $HOROVOD_ELASTIC $HOROVOD_RANK $HOROVOD_LOCAL_RANK ${HOROVOD_HOSTNAME:+named}")
    assert code == 0 and sorted(out.splitlines()) == ["[0]<stdout>:1 0 0 named", "[1]<stdout>:1 1 1 named"]


@pytest.mark.parametrize("flags", [["-H"], ["--host-discovery-script"]], ids=str)
def test_workers_of_a_host_under_two_names_have_local_ranks_of_their_own(flags):
    hosts = "localhost:99999999999,127.0.0.1:2" if flags == ["-H"] else "echo localhost:1; echo 127.0.0.1:99999999999"
    code, out, err = launch("-np", 3, "--max-np", 3, *flags, hosts, "sh", "-c", "echo $HOROVOD_LOCAL_RANK of "
                            "$HOROVOD_LOCAL_SIZE, host $HOROVOD_CROSS_RANK of $HOROVOD_CROSS_SIZE")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{n}]<stdout>:{n} of 3, host 0 of 1" for n in range(3)]


@pytest.mark.parametrize("text", ["abc", "99", "1", "9" * 30])
def test_a_descriptor_of_the_driver_that_is_none(text):
    job = Job(sys.executable, "-c", "import lightcc.numpy as hvd; hvd.init()", LIGHTCC_DRIVER_FD=text)
    code, _, err = job.finish()
    assert code == 1 and f"ValueError: init: LIGHTCC_DRIVER_FD={text}: expected the number of a socket" in err, err


@pytest.mark.slow
def test_workers_die_one_after_another_and_are_replaced(tmp_path):
    """Each at another point of its loop, and one from outside; of none of them the launcher keeps a descriptor."""
    running = job(tmp_path, "-np", 2, "--min-np", 1, "--failures-per-host", 9, passes="inf", pause_s=0.02,
                  framework="torch")
    trained(running, 5)
    launcher = psutil.Process(running.process.pid)
    before = launcher.num_fds()
    orders = ("kill.batch.1", "kill.backward.0", "kill.commit.0", "kill.commit.1", None)
    for order in orders:
        if order:
            (tmp_path / order).touch()
        else:
            workers(running)[-1].kill()
        printed(running, "size 1\n")
        printed(running, "size 2\n")
        trained(running, 3)
    wait_until(lambda: launcher.num_fds() == before, f"{before} descriptors", launcher.num_fds)
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0 and err.count("was killed by signal 9 (SIGKILL)") == len(orders), err
    sizes = result(out)
    changes = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    assert changes == [2] + [1, 2] * len(orders), changes


def test_the_newcomer_of_a_reset_dies(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 2, "--failures-per-host", 3, passes="inf", pause_s=0.02)
    trained(running, 3)
    (tmp_path / "kill.start").touch()
    workers(running)[1].send_signal(signal.SIGKILL)
    wait_until(lambda: not (tmp_path / "kill.start").exists(), "the newcomer to die")
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0 and err.count("was killed by signal 9") == 2, err
    assert set(result(out)) == {2}


def test_too_few_are_left(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 2, "--failures-per-host", 2, passes="inf", pause_s=0.02)
    trained(running)
    (tmp_path / "kill.start").touch()  # of the newcomer, after which the host is used no more
    workers(running)[0].send_signal(signal.SIGKILL)
    code, _, err = running.finish()
    assert code == 137 and re.search(r"lightccrun: no host is left whose workers have not failed \(--failures-per-host "
                                     r"2\); the first: worker \d+ \(pid \d+ on host \S+\) was killed by signal 9 ", err)


def test_a_worker_that_raises_ends_itself_only(tmp_path):
    program = (f"import sys; sys.path.append({str(TRAINING.parent)!r})\n"
               "import elastic_with_numpy as elastic, lightcc.numpy as hvd, numpy\n"
               "hvd.init()\n"
               "@elastic.run\n"
               "def train(state):\n"
               "    if state.tries == 0 and hvd.size() == 2 and hvd.rank() == 1:\n"
               "        raise ValueError('of the user')\n"
               "    state.tries += 1\n"
               "    for _ in range(3):\n"
               "        hvd.allreduce(numpy.ones(1), name='x')\n"
               "    return hvd.size()\n"
               "print('returned', train(elastic.Base(tries=0)))\n")
    code, out, err = launch("-np", 2, "--min-np", 1, "-H", "h1:1,h2:1", *SEVERAL_HOSTS, sys.executable, "-c", program)
    assert code == 0 and out == "[0]<stdout>:returned 1\n" and "ValueError: of the user" in err, (out, err)


def test_hosts_come_and_go(tmp_path):
    """2, 4, 3, 1 and 2 workers by a discovery script."""
    hosts = tmp_path / "hosts"

    def offer(text):
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(hosts)

    offer("a:1\nb:1\n")
    running = job(tmp_path, "-np", 2, "--min-np", 1, "--host-discovery-script", f"cat {hosts}", *SEVERAL_HOSTS,
                  passes="inf", pause_s=0.05)
    for text, size in (("a:1\nb:1\nc:2", 4), ("a:1\nc:2", 3), ("c:1", 1), ("c:1\nd:1", 2)):
        trained(running, 3)
        offer(text)
        printed(running, f"size {size}\n")
    trained(running, 3)
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0, err
    sizes = result(out)
    changes = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    assert changes == [2, 4, 3, 1, 2]
    assert "was killed" not in err and "exited" not in err, err


def test_a_worker_that_is_not_wanted_any_more_exits_with_0(tmp_path):
    program = (f"import sys; sys.path.append({str(TRAINING.parent)!r})\n"
               "import elastic_with_numpy as elastic, lightcc.numpy as hvd, numpy\n"
               "hvd.init()\n"
               "@elastic.run\n"
               "def train(state):\n"
               "    while hvd.size() > 1:\n"
               "        hvd.allreduce(numpy.ones(1), name='x')\n"
               "        open(sys.argv[1], 'w').close()\n"
               "        state.commit()\n"
               "train(elastic.Base())\n")
    trains = tmp_path / "trains"
    code, out, err = launch("-np", 2, "--min-np", 1, *SEVERAL_HOSTS, "--host-discovery-script",
                            f"echo a:1; test -e {trains} || echo b:1", "sh", "-c",
                            '"$@"; echo $HOROVOD_RANK has left with $?', "sh", sys.executable, "-c", program, trains)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{n}]<stdout>:{n} has left with 0" for n in (0, 1)], (out, err)


def test_a_worker_that_is_stopped_for_a_while_is_waited_for(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 1, passes="inf", pause_s=0.02)
    trained(running, 3)
    (victim, _) = workers(running)
    victim.suspend()
    time.sleep(3)
    victim.resume()
    trained(running, 3)
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0, err
    assert set(result(out)) == {2}


def test_a_worker_that_is_stopped_for_too_long_is_replaced(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 1, "--failures-per-host", 2, "--worker-timeout", 6,
                  passes="inf", pause_s=0.02)
    trained(running, 3)
    workers(running)[1].suspend()
    for size in (1, 2):
        printed(running, f"size {size}\n")
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0 and "has not answered for 6 s (--worker-timeout); it is killed" in err, err
    assert {1, 2} == set(result(out))


def test_ctrl_c(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 1, passes="inf", pause_s=0.02)
    trained(running)
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.finish()
    lines = err.splitlines()
    assert code == 130 and "lightccrun: 2 workers have 5 s to end; a second Ctrl-C kills at once" in lines, err
    # On a machine that has much else to do they may need longer, and then it says so.
    assert lines[-1].startswith("lightccrun: interrupted by signal 2 (SIGINT); ended 2 workers"), err


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    running = job(tmp_path, "-np", 2, "--min-np", 1, "-H", "localhost:1,h1:1", *SEVERAL_HOSTS, passes="inf",
                  pause_s=0.02)
    trained(running)
    running.process.kill()
    running.finish()  # fails if somebody is


@pytest.mark.parametrize("flags", [["--min-np", 1], ["--host-discovery-script", "echo localhost:2"]], ids=str)
def test_a_command_that_does_not_exist(flags):
    code, out, err = launch("-np", 2, *flags, "./nonesuch")
    assert code == 127 and "cannot start './nonesuch': No such file or directory" in err, err


def test_a_script_that_fails_at_first_ends_the_job_and_later_is_tried_again(tmp_path):
    code, _, err = launch("-np", 1, "--host-discovery-script", "exit 3", "true")
    assert (code, err) == (1, "lightccrun: host discovery: exit 3 exited with code 3\n")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2")
    running = job(tmp_path, "-np", 2, "--host-discovery-script", f"cat {hosts}", passes=3, pause_s=0.1)
    trained(running)
    hosts.rename(tmp_path / "gone")
    code, out, err = running.finish()
    assert code == 0 and "exited with code 1: cat: " in err and "the hosts are those found before" in err, err


def test_a_script_that_hangs_holds_nothing_up_and_is_not_left(tmp_path):
    script = f"test -e {tmp_path}/asked && sleep 600; touch {tmp_path}/asked; echo localhost:2"
    running = job(tmp_path, "-np", 2, "--host-discovery-script", script, passes=4, pause_s=0.05)
    code, out, err = running.finish()  # fails if somebody is left
    assert code == 0, err
    assert set(result(out)) == {2}


def test_two_jobs_at_once_do_not_disturb_each_other(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = [job(folder, "-np", 2, "--min-np", 1, passes=6, pause_s=0.02) for folder in folders]
    trained(one, 2)
    (folders[0] / "kill.batch.1").touch()
    assert two.finish()[0] == 0
    code, out, err = one.finish()
    assert code == 137 and "no host is left" in err, err


def test_the_output_of_each_worker_has_a_file(tmp_path):
    code, out, err = launch("-np", 2, "--min-np", 1, "--output-filename", tmp_path / "out", "sh", "-c",
                            "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2")
    assert code == 0, err
    files = [tmp_path / "out" / f"rank.{rank}" / name for rank in (0, 1) for name in ("stdout", "stderr")]
    assert [file.read_text() for file in files] == ["out 0\n", "err 0\n", "out 1\n", "err 1\n"]


POINTS = ("batch", "allreduce", "backward", "commit", "broadcast")  # of each batch
POINTS_OF_RESETS = ("start", "meeting", "reset", "sync")            # which somebody's end brings about
KILLS_OF_A_JOB = 4


@pytest.mark.slow
def test_random_kills_lose_nothing(tmp_path):
    """Kills at random moments, from outside or at a point of the loop, of a worker or of a host."""
    seed = int(os.environ.get("LIGHTCC_TEST_SEED") or random.randrange(1 << 30))
    print(f"LIGHTCC_TEST_SEED={seed}")
    rng = random.Random(seed)
    left = int(os.environ.get("LIGHTCC_TEST_KILLS") or 4)
    while left > 0:
        left -= check_random_kills(tmp_path, rng, min(left, KILLS_OF_A_JOB))


def check_random_kills(tmp_path, rng, count):
    """Returns how many there were: a job may lose all workers that have its state, and ends then."""
    for order in [*tmp_path.glob("kill.*"), *tmp_path.glob("stop")]:
        order.unlink()
    where = rng.choice([(), ("-H", "localhost:1,b:2", *SEVERAL_HOSTS), ("-H", "a:1,b:2", *SEVERAL_HOSTS)])
    print("on", *where, flush=True)
    running = job(tmp_path, "-np", 3, "--min-np", 1, "--failures-per-host", 99, *where, passes="inf", pause_s=0.01,
                  framework="torch")
    if rng.random() < 0.2:
        time.sleep(rng.random() * 3)  # perhaps before there is a world
    else:
        trained(running)
    kills = 0
    while kills < count:
        kills += 1
        kill_somebody(tmp_path, rng, running, bool(where))
        until = "size 3\n" if rng.random() < 0.7 else ":batch "
        if not all(found(running, until) for _ in range(rng.randrange(1, 4))):
            break  # all have died
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert "Traceback" not in err, err  # or who was killed would not be why the job is lost
    if code != 0:
        assert "no worker that has the state of the job is left" in err, err
        print("lost")
    else:
        print("trained", len(result(out)))
    wait_until(lambda: not [name for name in os.listdir("/dev/shm") if "lightcc" in name], "shared memory to be gone")
    return kills


def kill_somebody(tmp_path, rng, running, hosts):
    several = len(workers(running)) > 2  # somebody is left after a death in a reset
    how = rng.choice(["now", *POINTS, *(POINTS_OF_RESETS if several else ()), *(["host"] if hosts else [])])
    print(how, flush=True)
    if how in POINTS:
        (tmp_path / f"kill.{how}{rng.choice(['', '.0'])}").touch()
        return
    if how in POINTS_OF_RESETS:
        (tmp_path / f"kill.{how}").touch()
    if victims := (agents if how == "host" else workers)(running):
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(victims).kill()

"""lightccrun and run(). Decisions and tagging are tested by script; processes only end to end, with programs that need
no framework."""

import contextlib
import functools
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest

from jobs import (
    CLEANS_FOR_EVER,
    DEADLINE_S,
    MARK,
    Job,
    expect_end_with_the_reader,
    expect_run_leaves_nobody,
    expect_whole_lines,
    launch,
    marked,
    program,
    start,
    wait_until,
)
from lightcc.launch import groups, hosts, local, pickling
from lightcc.launch.output import Sink, Tagger
from lightcc.launch.termination import FAILURE_GRACE_S, FAR_GRACE_S, GIVE_UP_S, TERM_GRACE_S, Cause, Termination
from lightcc.runner import run

# The first failure is the cause; an ending is a ladder of times and signals.

def test_first_failure_ends_the_job():
    termination = Termination(3)
    termination.exited({0: 0}, now=10)
    assert termination.cause is None and termination.wait_s(10) is None
    termination.exited({1: 3}, now=20)
    termination.exited({2: -9}, now=20.1)
    assert termination.cause == Cause(rank=1, code=3, others=1) and termination.cause.exit_code == 3
    assert termination.due(20 + FAILURE_GRACE_S / 2) == []
    assert termination.due(20 + FAILURE_GRACE_S) == [signal.SIGTERM]
    assert termination.due(20 + FAILURE_GRACE_S + TERM_GRACE_S) == [signal.SIGKILL]
    assert termination.due(20 + FAILURE_GRACE_S + TERM_GRACE_S + GIVE_UP_S) == [None]


def test_on_several_hosts_the_others_have_longer_to_notice():
    termination = Termination(2, FAR_GRACE_S)
    termination.exited({0: 1}, now=20)
    assert termination.due(20 + FAR_GRACE_S - 0.1) == [] and termination.due(20 + FAR_GRACE_S) == [signal.SIGTERM]
    assert FAR_GRACE_S > FAILURE_GRACE_S


def test_of_failures_seen_together_the_killed_rank_is_the_cause():
    termination = Termination(4)
    termination.exited({0: 1, 1: 1, 2: -9}, now=1)
    assert termination.cause == Cause(rank=2, code=-9, others=3) and termination.cause.exit_code == 137


def test_second_interrupt_kills_at_once():
    termination = Termination(2)
    assert termination.interrupted(signal.SIGINT, now=1) == "2 ranks have 5 s to end; a second Ctrl-C kills at once"
    assert termination.due(1) == [signal.SIGINT] and termination.cause.exit_code == 130
    assert termination.interrupted(signal.SIGTERM, now=2) == ""
    assert termination.due(2) == []
    termination.exited({0: 0}, now=2)
    assert termination.interrupted(signal.SIGINT, now=3) == "killing 1 rank" and termination.killed_text() == ""
    assert termination.due(3) == [signal.SIGKILL]
    assert termination.killed_text() == "; killed rank 1, which did not end"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_ask_politely(signum):
    termination = Termination(2)
    termination.interrupted(signum, now=1)
    assert termination.due(1 + TERM_GRACE_S) == [signal.SIGTERM, signal.SIGKILL]
    assert termination.cause.exit_code == 128 + signum


# Tagging: any cut of the bytes into chunks gives the same lines.

@pytest.mark.parametrize("text, tagged", [
    (b"one\ntwo\n", b"T:one\nT:two\n"),
    (b"\n\n", b"T:\nT:\n"),
    (b"no end", b"T:no end\n"),
    (b"dos\r\nunix\n", b"T:dos\r\nT:unix\n"),
    (b"\r 1%\r 2%\r 3%\ndone\n", b"T: 1%\rT: 2%\rT: 3%\nT:done\n"),
    (b"\xff\x00\xfe\n\x80", b"T:\xff\x00\xfe\nT:\x80\n"),
    (b"", b""),
])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_tagger(text, tagged, size):
    tagger = Tagger(b"T:")
    chunks = [tagger.feed(text[i:i + size]) for i in range(0, len(text), size)]
    assert b"".join(chunks) + tagger.finish() == tagged
    assert all(chunk.endswith((b"\n", b"\r")) for chunk in chunks if chunk)


def test_tagger_stamps_every_line():
    assert Tagger(b"T:", stamp=lambda: b"now").feed(b"a\nb\n") == b"nowT:a\nnowT:b\n"


def test_a_progress_bar_is_overwritten_by_its_owner_only():
    reader, writer = os.pipe()
    sink = Sink(writer, "pipe")
    for owner, block in (("a", b"a 1%\r"), ("a", b"a 2%\r"), ("b", b"b\n"), ("a", b"a 3%\n")):
        sink.put(owner, block)
    assert os.read(reader, 4096) == b"a 1%\ra 2%\r\nb\na 3%\n"
    os.close(reader)
    sink.put("a", b"more\n")
    assert isinstance(sink.error, BrokenPipeError) and not sink.pending_bytes
    os.close(writer)


def test_sink_does_not_wait_for_its_reader():
    reader, writer = os.pipe()
    sink = Sink(writer, "pipe")
    block = b"x" * 999 + b"\n"
    for _ in range(1000):
        sink.put("a", block)
    assert sink.pending_bytes > 0
    received = b""
    while len(received) < 1000 * len(block):
        received += os.read(reader, 1 << 20)
        sink.flush()
    assert received == 1000 * block
    os.close(reader)
    os.close(writer)


# lightccrun end to end.

@pytest.mark.parametrize("arguments, message", [
    (["-np", 5, "-H", "localhost:4", "true"], "5 processes do not fit"),
    (["-np", 0, "true"], "at least 1"),
    (["true"], "-np N"),
    (["-np", 2], "which command"),
    (["-np", 2, "--nonesuch", "true"], "unrecognized arguments: --nonesuch\n"),
    (["-np", 2, "--hostfil=h", "--start_timeout=3", "true"], "--hostfil=h --start_timeout=3; did you mean --hostfile, "
                                                             "--start-timeout?\n"),
    (["-np", 2, "--hostfile", "nosuch", "true"], "lightccrun: --hostfile nosuch: No such file or directory\n"),
    (["-np", 2, "--log-level", "LOUD", "true"], "'LOUD' is not one of TRACE, "),
])
def test_usage_errors(arguments, message):
    code, out, err = launch(*arguments)
    assert code == 2 and message in err and out == ""


def test_ranks_learn_who_they_are():
    show = program("print(*[os.environ['HOROVOD_' + k] for k in 'RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE'"
                   ".split()], os.environ['LIGHTCC_JOB_ID'], os.environ['LIGHTCC_SECRET'], sys.stdin.read())")
    jobs = []
    for _ in range(2):
        code, out, err = launch("-np", 3, "-H", "localhost:3", "--verbose", *show)
        assert code == 0
        lines = sorted(out.splitlines())
        assert [line.split()[:6] for line in lines] == [
            [f"[{rank}]<stdout>:{rank}", "3", str(rank), "3", "0", "1"] for rank in range(3)]
        (ids,) = {tuple(line.split()[6:]) for line in lines}
        assert re.fullmatch("[0-9a-f]{32}", ids[0]) and re.fullmatch("[0-9a-f]{64}", ids[1]) and ids[1] not in err
        jobs.append(ids)
    assert not set(jobs[0]) & set(jobs[1])


def test_flags_become_variables_and_the_command_keeps_its_own():
    flags = ["--start-timeout", 7, "--fusion-threshold-mb", 32, "--cache-capacity", 9, "--no-stall-check",
             "--stall-check-warning-time-seconds", 11, "--stall-check-shutdown-time-seconds", 12, "--log-level", "INFO",
             "--log-without-timestamp", "--timeline-filename", "t.json", "--timeline-mark-cycles", "--gloo"]
    names = "START_TIMEOUT FUSION_THRESHOLD CACHE_CAPACITY STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS " \
            "STALL_SHUTDOWN_TIME_SECONDS LOG_LEVEL LOG_HIDE_TIME TIMELINE TIMELINE_MARK_CYCLES"
    show = program(f"print(*[os.environ['HOROVOD_' + k] for k in '{names}'.split()], *sys.argv[1:])")
    code, out, _ = launch("-np", 1, *flags, *show, "-np", 3, "--verbose")
    assert (code, out) == (0, f"[0]<stdout>:7 {32 << 20} 9 1 11 12 INFO 1 t.json 1 -np 3 --verbose\n")


def test_a_job_inside_another_job_meets_elsewhere():
    show = program("print(os.environ.get('LIGHTCC_STORE_ADDR'))")
    job = Job(sys.executable, "-m", "lightcc.runner", "-np", "1", *show, LIGHTCC_STORE_ADDR="h1:4000")
    assert job.finish()[:2] == (0, "[0]<stdout>:None\n")


def test_lines_of_many_ranks_are_whole():
    """stdout and stderr lead to one pipe, lines are longer than a pipe's atomic write and come in two pieces."""
    expect_whole_lines("-np", 4)


def test_one_line_of_five_megabytes():
    code, out, _ = launch("-np", 2, *program("sys.stdout.write(str(rank) * 5_000_000)"))
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:" + str(rank) * 5_000_000 for rank in range(2)]


def test_lines_appear_at_once():
    job = start("-np", 2, sys.executable, "-c", "import time; print('here'); time.sleep(600)")
    job.wait_for("[0]<stdout>:here", "[1]<stdout>:here")
    job.process.terminate()
    assert job.finish()[0] == 143


def test_output_files_hold_what_ranks_wrote(tmp_path):
    folder = tmp_path / "a" / "b"
    text = program("print('out', rank); sys.stderr.write(f'err {rank}')")
    code, out, _ = launch("-np", 11, "--output-filename", folder, *text)
    assert code == 0 and sorted(os.listdir(folder)) == [f"rank.{rank:02}" for rank in range(11)]
    for rank in range(11):
        assert (folder / f"rank.{rank:02}" / "stdout").read_text() == f"out {rank}\n"
        assert (folder / f"rank.{rank:02}" / "stderr").read_text() == f"err {rank}"
        assert f"[{rank}]<stdout>:out {rank}\n" in out


def test_timestamps():
    _, out, _ = launch("-np", 1, "--prefix-output-with-timestamp", "echo", "hi")
    assert re.fullmatch(r"\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hi\n", out)


@pytest.mark.parametrize("end, code, how", [
    ("sys.exit(3)", 3, "exited with code 3"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"was killed by signal 9 \(SIGKILL\)"),
    ("raise ValueError", 1, "exited with code 1"),
])
def test_first_failure_is_named(end, code, how):
    """The other ranks follow with failures of their own."""
    text = f"if rank == 1: {end}\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(77))\ntime.sleep(600)"
    got, _, err = launch("-np", 4, *program(text))
    assert got == code
    assert re.search(rf"(?m)^lightccrun: rank 1 \(pid \d+, host .+\) {how}; ended the other 3 ranks$", err), err


def test_a_rank_that_ends_well_early_is_no_failure():
    code, out, err = launch("-np", 2, *program("if rank == 0: sys.exit()\ntime.sleep(0.3); print('done')"))
    assert (code, out, err) == (0, "[1]<stdout>:done\n", "")


def test_command_not_found(tmp_path):
    code, out, err = launch("-np", 2, "no-such-program")
    assert code == 127 and "cannot start 'no-such-program': No such file" in err and out == ""
    (tmp_path / "plain").write_text("text")
    code, _, err = launch("-np", 2, tmp_path / "plain")
    assert code == 126 and "Permission denied" in err


def test_a_script_in_the_place_of_a_command_and_options_after_it(tmp_path):
    """What is meant is said."""
    (tmp_path / "train.py").write_text("print('hi')")
    code, _, err = launch("-np", 2, tmp_path / "train.py", "--lr", 1)
    assert code == 126 and f"Permission denied; did you mean: python {tmp_path}/train.py --lr 1\n" in err
    code, _, err = launch("-np", 2, "train.py")
    assert code == 127 and "cannot start 'train.py': No such file or directory; did you mean: python train.py\n" in err
    (tmp_path / "train.py").chmod(0o755)
    code, _, err = launch("-np", 2, tmp_path / "train.py")
    assert code == 126 and f"did you mean: python {tmp_path}/train.py\n" in err
    for late in (["-np", 2], ["--num-proc=2"]):
        code, _, err = launch("python", "x.py", *late, "--lr", 1)
        given = " ".join(map(str, late))
        assert code == 2 and f"did you mean: lightccrun {given} python x.py --lr 1\n" in err, err


def test_python_m_lightcc_is_lightccrun():
    assert Job(sys.executable, "-m", "lightcc", "-np", "1", "echo", "hi").finish() == (0, "[0]<stdout>:hi\n", "")


def test_if_one_rank_cannot_start_the_others_end():
    mark = uuid.uuid4().hex
    job = local.Job(hosts.places(2), lambda rank: [["sleep", "600"], ["no-such-program"]][rank], settings={MARK: mark})
    with pytest.raises(local.StartError, match="rank 1: cannot start 'no-such-program'"), local.started(job):
        pytest.fail("nothing has started")
    assert marked(mark) == []


# Ends: nobody is left (Job.finish looks), with grandchildren in the background.

WITH_GRANDCHILDREN = ["sh", "-c", "sleep 600 & sh -c 'sleep 600; true' & echo up; wait"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_leave_nobody(signum):
    job = start("-np", 2, "--grace-period", DEADLINE_S, *WITH_GRANDCHILDREN)
    job.wait_for("[0]<stdout>:up", "[1]<stdout>:up")
    wait_until(lambda: len(job.living()) == 1 + 1 + 2 * 4, "launcher, watcher and 2 x 4 processes", job.living)
    job.process.send_signal(signum)
    code, _, err = job.finish()
    if signum == signal.SIGKILL:
        assert code == -signum
    else:
        assert code == 128 + signum
        patience = "lightccrun: 2 ranks have 300 s to end; a second Ctrl-C kills at once\n" * (signum == signal.SIGINT)
        assert err == f"{patience}lightccrun: interrupted by signal {int(signum)} ({signum.name}); ended 2 ranks\n"


def test_leftovers_of_a_good_job_end_with_it():
    assert launch("-np", 2, "sh", "-c", "sleep 600 & trap '' TERM; sleep 600 & true")[0] == 0


def test_interrupt_is_an_exception_in_python_and_a_second_one_kills():
    job = start("-np", 2, "--grace-period", DEADLINE_S, *CLEANS_FOR_EVER)
    job.wait_for("[0]<stdout>:up", "[1]<stdout>:up")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("[0]<stdout>:cleaning", "[1]<stdout>:cleaning")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 130
    assert err.splitlines() == ["lightccrun: 2 ranks have 300 s to end; a second Ctrl-C kills at once",
                                "lightccrun: killing 2 ranks",
                                "lightccrun: interrupted by signal 2 (SIGINT); ended 2 ranks; killed ranks 0, 1, "
                                "which did not end"]


def test_a_reader_that_does_not_read_cannot_hold_an_interrupt_up():
    job = start("-np", 2, "yes")
    job.wait_for("[0]<stdout>:y", "[1]<stdout>:y")
    time.sleep(0.5)  # now every pipe is full, and the ranks wait
    assert psutil.Process(job.process.pid).memory_info().rss < 64 << 20
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(DEADLINE_S) == 130
    job.finish()


def test_a_reader_that_leaves_ends_the_job():
    expect_end_with_the_reader(2, "-np", 2)


def test_members_are_living_processes_of_the_session():
    leader = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
    wait_until(lambda: len(groups.members([leader.pid])) == 2, "shell and sleep")
    assert groups.end([leader.pid]) == []
    assert groups.members([leader.pid]) == [] and leader.wait() == -signal.SIGTERM


# run()

def rank_of_env():
    return int(os.environ["HOROVOD_RANK"])


def test_run_returns_results_in_rank_order():
    base = 10
    results = run(lambda x, y: (rank_of_env(), int(os.environ["HOROVOD_SIZE"]), x + y + base), args=(1,),
                  kwargs={"y": 2}, num_proc=3, start_timeout=60)
    assert results == [(rank, 3, 13) for rank in range(3)]


def test_run_is_quiet_about_its_descriptors_and_tags_output(capfd):
    before = set(os.listdir("/proc/self/fd"))
    assert run(lambda: print("hello"), num_proc=2) == [None, None]
    assert set(os.listdir("/proc/self/fd")) <= before
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(rank_of_env) == [0]


def test_run_moves_large_arguments_and_results():
    data = os.urandom(1 << 20) * 50
    results = run(lambda d: d + bytes([rank_of_env()]), args=(data,), num_proc=2)
    assert all(results[rank] == data + bytes([rank]) for rank in range(2))


def test_run_names_the_rank_that_raised_first(tmp_path):
    """Rank 1 raises first but takes its time to end, so rank 0 is seen to end first."""
    def fail():
        import atexit
        if rank_of_env() == 1:
            atexit.register(time.sleep, 0.6)
            (tmp_path / "raises").touch()
            raise KeyError("the cause")
        while not (tmp_path / "raises").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        raise RuntimeError("a consequence")

    with pytest.raises(RuntimeError, match=r"(?s)run: rank 1 \(.*; ended the other rank\n.*KeyError: 'the cause'"):
        run(fail, num_proc=2)


@pytest.mark.parametrize("func, message", [
    (lambda: sys.exit(5), r"rank 0 \(pid \d+, host .+\) exited with code 5"),
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), r"rank 0 \(.+\) was killed by signal 11 \(SIGSEGV\)"),
    (lambda: os._exit(0), "rank 0 exited with code 0 before the function returned"),
    (lambda: threading.Lock(), "cannot pickle '_thread.lock' object"),
])
def test_run_errors(func, message):
    with pytest.raises(RuntimeError, match=message):
        run(func)


LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.parts = [1, {"lock": LOCK}]

    def get(self):
        return self.parts


HOLDER = Holder()


def uses_a_global():
    return HOLDER


def uses_another_function():
    return uses_a_global()


def uses_a_variable():
    lock = LOCK
    return lambda: lock


def has_a_default(lock=LOCK):
    return lock


@pytest.mark.parametrize("arguments, where", [
    ((rank_of_env, (1, {"a": LOCK})), r"args\[1\]\['a'\], of type lock,"),
    ((rank_of_env, (), {"x": HOLDER}), r"kwargs\['x'\]\.parts\[1\]\['lock'\], of type lock,"),
    ((HOLDER.get,), r"Holder\.get\(\)\.__self__\.parts\[1\]\['lock'\], of type lock,"),
    ((functools.partial(rank_of_env, LOCK),), r"partial\(\)\.args\[0\], of type lock,"),
    ((uses_another_function,), r"HOLDER\.parts\[1\]\['lock'\], of type lock, which uses_a_global\(\) uses,"),
    ((uses_a_variable(),), r"lock, of type lock, which uses_a_variable\.<locals>\.<lambda>\(\) uses,"),
    ((has_a_default,), r"default 0, of type lock, which has_a_default\(\) uses,"),
])
def test_what_cannot_be_pickled_is_named(arguments, where, monkeypatch):
    """Before anything is started. The functions travel whole, as those of __main__ do."""
    import cloudpickle
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        with pytest.raises(TypeError, match=f"run: {where} .*cannot pickle '_thread.lock' object"):
            pickling.write(io.BytesIO(), arguments[0], *([*arguments[1:], (), {}][:2]))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_run_checks_its_arguments(tmp_path, monkeypatch):
    with monkeypatch.context() as variables, pytest.raises(ValueError, match="LIGHTCC_GRACE_PERIOD=soon: expected sec"):
        variables.setenv("LIGHTCC_GRACE_PERIOD", "soon")
        run(rank_of_env)
    with pytest.raises(ValueError, match="use_gloo or use_mpi"):
        run(rank_of_env, use_gloo=True, use_mpi=True)
    with pytest.raises(ValueError, match="hosts or a hostfile"):
        run(rank_of_env, hosts="localhost:1", hostfile="hosts")
    with pytest.raises(TypeError, match=r"run: func is 3, of type int, .* run\(f, args=\(3,\)\)"):
        run(3)
    with pytest.raises(TypeError, match="run: args is 'ab', of type str"):
        run(rank_of_env, args="ab")
    with pytest.raises(FileNotFoundError, match="--hostfile nosuch: No such file"):
        run(rank_of_env, hostfile="nosuch")
    with pytest.raises(RuntimeError, match="cannot start '/no/python'"):
        run(rank_of_env, executable="/no/python")
    with pytest.warns(DeprecationWarning, match="np is deprecated"):
        assert run(rank_of_env, np=2, output_filename=str(tmp_path)) == [0, 1]
    assert sorted(os.listdir(tmp_path)) == ["rank.0", "rank.1"]


def test_run_has_the_names_and_defaults_of_horovod():
    parameters = inspect.signature(run).parameters.values()
    assert [(p.name, p.default) for p in parameters][:4] == [
        ("func", inspect.Parameter.empty), ("args", ()), ("kwargs", None), ("num_proc", 1)]
    assert [p.name for p in parameters if p.default is None] == (
        "kwargs min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile host_discovery_script "
        "start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args "
        "network_interface network_interfaces executable np min_np max_np").split()


def test_run_beside_a_handler_of_another_signal():
    """Python wakes us for every signal that has one: torch's DataLoader has one for SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        assert len(run(os.getpid, num_proc=2)) == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_run_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(rank_of_env, num_proc=2)))
    thread.start()
    thread.join(DEADLINE_S)
    assert results == [0, 1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_leaves_nobody(signum):
    expect_run_leaves_nobody(signum, "num_proc=2")

"""lightccrun on several hosts, which are all this machine: a launch command that starts the agent right here. What only
a network and ssh can show is in tests/multihost."""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jobs import (
    CLEANS_FOR_EVER,
    DEADLINE_S,
    Job,
    command_of,
    expect_end_with_the_reader,
    expect_whole_lines,
    kill,
    launch,
    program,
    start,
    wait_until,
)
from lightcc._version import __version__
from lightcc.launch import messages
from lightcc.launch.cores import usable_cores
from lightcc.launch.messages import Begin, End, Ended, Output, Over, Remark, Signal, Started, Unpacker, pack

HERE = ("--launch-command", "sh -c {command}")
TWO_AND_TWO = ("-np", 4, "-H", "h1:2,h2:2", *HERE)
MIXED = ("-np", 4, "-H", "localhost:1,h1:2,h2:1", *HERE)
WITH_GRANDCHILDREN = ["sh", "-c", "sleep 600 & sh -c 'sleep 600; true' & echo up; wait"]
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
UP = [f"[{rank}]<stdout>:up" for rank in range(4)]


def agents_of(job):
    found = [(p, command_of(p)) for p in job.living()]
    return [p for p, words in found if words[-2:] == ["-m", "lightcc.launch.agent"] and "python" in words[0]]


def before_agent(text):
    """A launch command that runs some shell first."""
    return shlex.join(["sh", "-c", text + '; exec sh -c "$1"', "sh", "{command}"])


# Messages: any cut of the bytes gives the same ones.

MESSAGES = [Begin("h", [[1, 2]], ["a b", "c\nd"], {"K": "\udc80\n"}, "/", "V", 2), Signal(3, 15), messages.Pause(True),
            End(), messages.Alive(), Started(1, 2), messages.Failed("no", 127), Output(7, 2, b"\x00\xff\r"),
            Output(7, 1, b""), Ended(1, -9), Remark("r"), Over("h", []), messages.Load(b"\x00f"),
            messages.StartRank([1, 2]), messages.Tell(1, b"\x00t"), messages.Said(1, b"\x00s"),
            messages.NotStarted(1, "no", 127), messages.Threads(1, 2, 3), messages.Input(b"\x00i"),
            messages.Taken(4, True), messages.HoldPort("20000-20100"), messages.PortHeld(20100),
            messages.ResultPart(3, True, 1 << 40, 1 << 41, 0.5, bytes(range(32)), b"p")]


@pytest.mark.parametrize("size", [1, 3, 7, 64, 10_000])
def test_messages_survive_any_cut(size):
    text = b"".join(map(pack, MESSAGES))
    unpacker = Unpacker()
    assert [m for i in range(0, len(text), size) for m in unpacker.feed(text[i:i + size])] == MESSAGES


@pytest.mark.parametrize("text", [b"Welcome to this host!", b"\x00\xff\xff\xff\xff", b"\x04\x00\x00\x00\x02{]",
                                  b"\x05\x00\x00\x00\x03[1]", b"\x07\x00\x00\x00\x01x",
                                  b'\x05\x00\x00\x00\x08[1, "2"]', b"\x0c\x00\x00\x00\x01x"])
def test_nonsense_is_told_from_messages(text):
    with pytest.raises(ValueError, match="no "):
        list(Unpacker().feed(text))


# Going well.

def test_ranks_learn_who_they_are():
    show = program("import json; print(json.dumps({k: os.environ.get(k) for k in 'HOROVOD_RANK HOROVOD_SIZE "
                   "HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME "
                   "LIGHTCC_JOB_ID LIGHTCC_SECRET LIGHTCC_STORE_ADDR LIGHTCC_IFACE LINES_OF_TEXT DBUS_X "
                   "PYTHONUNBUFFERED RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
                   "TORCHELASTIC_RUN_ID'.split()} | {'cwd': os.getcwd(), 'stdin': sys.stdin.read()}))")
    job = Job(sys.executable, "-m", "lightcc.runner", "-np", "4", "-H", "h0:1,h1:3", "--network-interfaces", "lo",
              "--launch-command", "env -u DBUS_X sh -c {command}", "--verbose", *show,
              LINES_OF_TEXT="a 'b'\n\"c\" $d \\", DBUS_X="of a session", TORCHELASTIC_RUN_ID="outer", RANK="7",
              LIGHTCC_PORT_RANGE="21000-21999")
    code, out, err = job.finish()
    assert code == 0, err
    ranks = [json.loads(line.partition(":")[2]) for line in sorted(out.splitlines())]
    assert [tuple(rank.values())[:7] for rank in ranks] == [
        ("0", "4", "0", "1", "0", "2", "h0"), ("1", "4", "0", "3", "1", "2", "h1"),
        ("2", "4", "1", "3", "0", "1", "h1"), ("3", "4", "2", "3", "0", "1", "h1")]
    assert [tuple(rank[name] for name in TORCH) for rank in ranks] == [
        ("0", "4", "0", "1", "h0"), ("1", "4", "0", "3", "h0"), ("2", "4", "1", "3", "h0"), ("3", "4", "2", "3", "h0")]
    (port,) = {rank["MASTER_PORT"] for rank in ranks}  # that the agent of h0 holds
    assert 21000 < int(port) <= 21999
    for rank in ranks:
        for name in (*TORCH, "MASTER_PORT"):
            del rank[name]
    ((job_id, secret, store, *others),) = {tuple(rank.values())[7:] for rank in ranks}
    assert re.fullmatch("[0-9a-f]{32}", job_id) and re.fullmatch("[0-9a-f]{64}", secret)
    assert re.fullmatch(r"h0:\d{5}", store)
    assert others == ["=lo", "a 'b'\n\"c\" $d \\", None, "1", None, os.getcwd(), ""]
    assert "lightcc.launch.agent" in err and "rank 3 is pid" in err and "on host h1" in err
    assert secret not in err


def test_omp_num_threads_is_what_each_host_has_for_each_rank_and_said_once_for_hosts_of_one_kind():
    code, out, err = launch(*MIXED, *program("print(os.environ['OMP_NUM_THREADS'])"), OMP_NUM_THREADS="")
    cores, by_itself = usable_cores(), len(os.sched_getaffinity(0))
    each = {1: cores, 2: max(1, cores // 2)}  # by ranks of a host
    assert (code, sorted(out.splitlines())) == (0, [f"[{rank}]<stdout>:{each[2 if rank in (1, 2) else 1]}"
                                                    for rank in range(4)])
    assert err.splitlines() == [  # a single rank of a host takes as many by itself
        f"lightccrun: OMP_NUM_THREADS is not set; it is {each[ranks]} for each rank: {cores} cores for {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} of a host" for ranks in each if each[ranks] != by_itself]
    assert launch(*MIXED, "true", OMP_NUM_THREADS="7") == (0, "", "")


def test_no_secret_is_on_a_command_line():
    job = start(*MIXED, *program("print(os.environ['LIGHTCC_SECRET']); time.sleep(600)"))
    (secret,) = {job.process.stdout.readline().decode().partition(":")[2].strip() for _ in range(4)}
    assert len(secret) == 64
    lines = [" ".join(command_of(process)) for process in job.living()]
    assert len(lines) >= 4 + 3 and not any(secret in line for line in lines)
    job.process.terminate()
    job.finish()


def test_outputs_are_as_those_of_one_host(tmp_path):
    text = program("print('out', rank); sys.stderr.write(f'err {rank}')")
    code, out, err = launch(*MIXED, "--output-filename", tmp_path, *text)
    assert code == 0 and sorted(out.splitlines()) == [f"[{rank}]<stdout>:out {rank}" for rank in range(4)]
    assert sorted(err.splitlines()) == [f"[{rank}]<stderr>:err {rank}" for rank in range(4)]
    for rank in range(4):
        assert (tmp_path / f"rank.{rank}" / "stdout").read_text() == f"out {rank}\n"
        assert (tmp_path / f"rank.{rank}" / "stderr").read_text() == f"err {rank}"


def test_lines_are_whole_and_in_order():
    expect_whole_lines(*MIXED)


def test_big_outputs_arrive_whole():
    text = program("sys.stdout.write((str(rank) * 99 + '\\n') * 200_000)")
    job = start(*TWO_AND_TWO, *text)
    lines = job.process.stdout.read().splitlines()
    assert len(lines) == 800_000 and set(lines) == {f"[{rank}]<stdout>:{str(rank) * 99}".encode() for rank in range(4)}
    assert job.finish()[0] == 0


def test_what_a_login_shell_prints_first_is_no_message():
    banner = before_agent(r"printf 'Welcome!\nlightcc-agent is not here\n\000\377 no end'; echo 'and a warning' >&2")
    code, out, err = launch("-np", 2, "-H", "h1:2", "--launch-command", banner, "echo", "hi")
    assert (code, sorted(out.splitlines()), err) == (0, ["[0]<stdout>:hi", "[1]<stdout>:hi"], "")


# Ends.

@pytest.mark.parametrize("end, code, how", [
    ("sys.exit(3)", 3, "exited with code 3"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"was killed by signal 9 \(SIGKILL\)"),
])
@pytest.mark.parametrize("rank", [0, 2])
def test_first_failure_is_named_with_its_host(rank, end, code, how):
    """The other ranks follow with failures of their own."""
    text = program(f"if rank == {rank}: {end}\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(77))\ntime.sleep(600)")
    got, _, err = launch(*MIXED, *text)
    host = "h1" if rank else ".+"
    assert got == code
    assert re.fullmatch(rf"lightccrun: rank {rank} \(pid \d+, host {host}\) {how}; ended the other 3 ranks\n", err), err


def test_command_not_found():
    code, out, err = launch(*TWO_AND_TWO, "no-such-program")
    assert code == 127 and out == ""
    assert re.match(r"lightccrun: host h[12]: rank [0-3]: cannot start 'no-such-program': No such file", err), err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_leave_nobody(signum):
    job = start(*MIXED, "--grace-period", DEADLINE_S, *WITH_GRANDCHILDREN)
    job.wait_for(*UP)
    job.process.send_signal(signum)
    code, _, err = job.finish()
    if signum == signal.SIGKILL:
        assert code == -signum
    else:
        assert code == 128 + signum
        patience = "lightccrun: 4 ranks have 300 s to end; a second Ctrl-C kills at once\n" * (signum == signal.SIGINT)
        assert err == f"{patience}lightccrun: interrupted by signal {int(signum)} ({signum.name}); ended 4 ranks\n"


def test_leftovers_of_a_good_job_end_with_it():
    assert launch(*MIXED, "sh", "-c", "sleep 600 & trap '' TERM; sleep 600 & true")[0] == 0


def test_interrupt_is_an_exception_in_python_and_a_second_one_kills():
    job = start(*MIXED, "--grace-period", DEADLINE_S, *CLEANS_FOR_EVER)
    job.wait_for(*UP)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(*(f"[{rank}]<stdout>:cleaning" for rank in range(4)))
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 130 and "lightccrun: killing 4 ranks\n" in err, err


def test_a_reader_that_does_not_read_cannot_hold_an_interrupt_up():
    job = start(*MIXED, "yes")
    job.wait_for("[0]<stdout>:y", "[1]<stdout>:y", "[3]<stdout>:y")
    time.sleep(1)  # now everything is full, and the ranks wait
    for process in [psutil.Process(job.process.pid), *agents_of(job)]:
        # Each pipe holds up to 1 MiB, which tags make seven times as long: 30 to 65 MiB in all. Without a bound on what
        # may be pending it was 400.
        assert process.memory_info().rss < 128 << 20
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(DEADLINE_S) == 130
    job.finish()


def test_a_reader_that_leaves_ends_the_job():
    expect_end_with_the_reader(4, *MIXED)


# Hosts that are lost, or never there.

def test_a_killed_agent_is_a_lost_host():
    job = start(*MIXED, *WITH_GRANDCHILDREN)
    job.wait_for(*UP)
    one = [agent for agent in agents_of(job) if len(agent.children()) == 3][0]  # two ranks and the watcher
    one.kill()
    code, _, err = job.finish()
    assert code == 1
    assert re.match(r"lightccrun: lost host h1 with ranks 1, 2: sh .*; ended the other 2 ranks\n", err), err


def test_a_broken_connection_is_a_lost_host_and_its_ranks_end():
    """What stands for ssh passes bytes both ways; the agent itself stays alive."""
    relay = shlex.join(["sh", "-c", 'cat | sh -c "$1" | cat', "sh", "{command}"])
    job = start("-np", 2, "-H", "localhost:1,h1:1", "--launch-command", relay, *WITH_GRANDCHILDREN)
    job.wait_for(*UP[:2])
    kill(p for p in job.living() if command_of(p) == ["cat"])
    code, _, err = job.finish()
    assert code == 1 and err.startswith("lightccrun: lost host h1 with rank 1: sh ") and "ended the other rank" in err


def launcher_with_silence_of(seconds):
    """The program of a launcher that calls an agent lost after so long a silence."""
    return ("import sys; from lightcc.launch import remote; from lightcc.runner import launch; "
            f"remote.SILENCE_S = {seconds}; sys.exit(launch.main())")


def test_a_silent_host_is_lost():
    job = Job(sys.executable, "-c", launcher_with_silence_of(8.0), "-np", "2", "-H", "localhost:1,h1:1",
              "--launch-command", "setsid -w sh -c {command}", "sh", "-c", "echo up; sleep 600")
    job.wait_for(*UP[:2])
    time.sleep(8)  # all is well as long as the agent speaks
    (agent,) = agents_of(job)
    agent.suspend()
    assert job.process.wait(DEADLINE_S) == 1
    agent.resume()
    _, _, err = job.finish()
    assert "lost host h1 with rank 1: it has been silent for 8 s; ended the other rank" in err


def test_a_stopped_launcher_goes_on_where_it_was():
    agent = "import sys; from lightcc.launch import agent; agent.ALIVE_S = 0.1; sys.exit(agent.main())"
    speaks_often = shlex.join(["sh", "-c", shlex.join([sys.executable, "-c", agent]), "sh", "{command}"])
    job = Job(sys.executable, "-c", launcher_with_silence_of(2.5), "-np", "2", "-H", "h1:2",
              "--launch-command", speaks_often,
              "sh", "-c", "echo up; sleep 5; echo done")
    job.wait_for(*UP[:2])
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    job.process.send_signal(signal.SIGCONT)
    assert job.finish()[0] == 0


@pytest.mark.parametrize("text, message", [
    ("echo 'no route to {host}' >&2; exit 255", "cannot start lightcc's agent on host h1: sh exited with code 255: "
     "no route to h1"),
    ("echo lightcc-agent 9.9; sleep 5", f"it is of lightcc 9.9, and this launcher of {__version__}"),
    (f"printf 'lightcc-agent {__version__}\\nand now for something completely different\\n'", "does not make sense"),
    ("exec nonesuch", "sh exited with code 127: sh: 1: exec: nonesuch: not found"),
])
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_started(text, message):
    code, out, err = launch("-np", 2, "-H", "localhost:1,h1:1", "--launch-command", before_agent(text), "echo", "hi")
    assert code == 1 and message in err and "h1" in err and out == ""


def test_a_launch_command_must_pass_input_on():
    code, _, err = launch("-np", 2, "-H", "h1:2", "--launch-command", before_agent("exec 0</dev/null"), "true")
    assert code == 1 and "its input on, as docker exec does with -i" in err


def test_a_host_that_does_not_answer_is_named():
    began = time.monotonic()
    code, out, err = launch("-np", 3, "-H", "localhost:1,h1:1,h2:1", "--start-timeout", 8, "--launch-command",
                            before_agent("test {host} = h1 || { echo 'connecting ...' >&2; exec sleep 600; }"), "true")
    assert (code, out) == (1, "") and time.monotonic() - began < 60
    assert err == "lightccrun: no answer within 8 s (--start-timeout) from lightcc's agent on h2; h2: connecting ...\n"


def test_an_interrupt_while_hosts_are_awaited():
    job = start("-np", 2, "-H", "h1:2", "--launch-command", before_agent("echo waiting >&2; exec sleep 600"), "true")
    wait_until(lambda: len(job.living()) > 1, "the launch command")
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == (130, "", "lightccrun: interrupted by signal 2 (SIGINT)\n")


@pytest.mark.parametrize("arguments, message", [
    (["--launch-command", "ssh {host}"], "does not say where {command} goes"),
    (["--launch-command", "sh -c '{command}"], "No closing quotation"),
    (["--network-interfaces", "nonesuch"], "no network interface of this host is '=nonesuch'; it has: "),
])
def test_usage_errors(arguments, message):
    code, out, err = launch("-np", 2, "-H", "localhost:1,h1:1", *arguments, "true")
    assert code == 2 and message in err and out == ""


# The agent alone.

def test_an_agent_says_where_its_ranks_work_if_there_is_no_such_folder():
    agent = subprocess.Popen([sys.executable, "-m", "lightcc.launch.agent"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, cwd="/", env={**os.environ, "OMP_NUM_THREADS": "1"})
    place = ["h1", False, 5, 6, 0, 1, 0, 1]
    agent.stdin.write(pack(Begin("h1", [place], ["sh", "-c", "echo $HOROVOD_RANK; pwd; exit 3"], {}, "/nonesuch",
                                 "", 0)))
    agent.stdin.flush()
    text, said, unpacker = b"", [], Unpacker()
    while not any(isinstance(message, Ended) for message in said):
        text += os.read(agent.stdout.fileno(), 4096)
        found = messages.find_greeting(text)
        if found:
            said += unpacker.feed(text[found[1]:])
            text = text[:found[1]]
    agent.stdin.write(pack(End()))
    agent.stdin.flush()
    said += unpacker.feed(agent.stdout.read())
    assert agent.wait(DEADLINE_S) == 0
    said = [message for message in said if message != messages.Alive()]
    assert said[0] == Remark("cannot work in /nonesuch: No such file or directory; its ranks work in /")
    assert isinstance(said[1], Started) and Ended(5, 3) in said and said[-1] == Over("h1", [])
    assert b"".join(m.chunk for m in said if isinstance(m, Output) and m.stream == 1) == b"5\n/\n"


def test_the_launcher_needs_no_native_library_and_no_framework():
    code = ("import lightcc.runner.launch, lightcc.launch.agent, sys\n"
            "print(sorted({'lightcc.core.lib', 'numpy', 'torch', 'tensorflow'} & set(sys.modules)))")
    assert subprocess.check_output([sys.executable, "-c", code], timeout=DEADLINE_S) == b"[]\n"

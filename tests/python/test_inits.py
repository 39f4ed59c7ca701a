"""A rank that ends before init, or during it: the launcher tells those who wait for it. Who is told what, by script;
then under each launcher of ours. Nothing here takes as long as HOROVOD_START_TIMEOUT."""
import os
import re
import subprocess
import sys

import pytest

from jobs import launch, program
from lightcc.launch.inits import Cancel, Inits
from lightcc.runner import run

PATIENCE_S = 600  # what ranks would wait for each other; none does

# All who wait are told, but one that has not begun when the first has failed is ended by the launcher.
INIT = """
import sys
import lightcc.numpy as hvd
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    print(error, flush=True)
    sys.exit(5)
print("formed", hvd.size(), flush=True)
"""


def begin(inits, rank, number, ranks="all"):
    return inits.heard(rank, f"begin {number} {ranks}\n".encode())


def formed(inits, rank, number):
    return inits.heard(rank, f"formed {number}\nleft {number}\n".encode())


def test_who_waits_for_a_rank_that_has_ended_is_told():
    inits = Inits()
    assert begin(inits, 0, 17) == begin(inits, 2, 19) == []
    cause = "rank 1 exited before it called init(), and the others wait for it there"
    told = inits.ended(1, "rank 1 exited")
    assert told == [Cancel(0, "17", 1, cause), Cancel(2, "19", 1, cause)]
    assert told[0].chunk == f"cancel 17 {cause}\n".encode()
    (late,) = begin(inits, 3, 23)  # which comes later
    assert late.rank == 3 and late.chunk.startswith(b"cancel 23 rank 1 exited before")


def test_of_a_rank_that_ends_during_init_they_hear_when():
    inits = Inits()
    begin(inits, 0, 1)
    begin(inits, 1, 2)
    (cancel,) = inits.ended(1, "rank 1 was killed")
    assert cancel.rank == 0 and b"rank 1 was killed during init()" in cancel.chunk


def test_a_late_rank_hears_of_the_one_that_ended_first():
    inits = Inits()
    begin(inits, 0, 1)
    inits.ended(1, "rank 1 exited")
    inits.ended(0, "rank 0 exited")  # as it was told of rank 1
    (cancel,) = begin(inits, 2, 3)
    assert cancel.ended == 1 and cancel.cause.startswith("rank 1 exited before")


def test_a_rank_that_had_met_the_others_may_end():
    inits = Inits()
    for rank in (0, 1):
        begin(inits, rank, rank)
    formed(inits, 1, 1)
    assert inits.ended(1, "rank 1 exited") == []  # though rank 0 is still at the last step
    formed(inits, 0, 0)
    (again,) = begin(inits, 0, 5)
    assert again.rank == 0 and b"before it called init() again" in again.chunk


def test_worlds_of_some_ranks_wait_for_their_own():
    inits = Inits()
    assert begin(inits, 0, 1, "0,2") == begin(inits, 1, 1, "1,3") == []
    assert [cancel.rank for cancel in inits.ended(3, "rank 3 exited")] == [1]
    assert formed(inits, 0, 1) == []
    assert [cancel.rank for cancel in inits.ended(2, "rank 2 exited")] == []
    assert [cancel.rank for cancel in begin(inits, 0, 2, "0,2")] == [0]  # another one of these ranks


def test_ranks_that_say_nothing_are_told_nothing():
    inits = Inits()
    assert inits.heard(0, b"hello\nbegin\nbegin x all\nformed 7\n\xff\n") == []
    assert inits.ended(1, "rank 1 exited") == inits.ended(0, "rank 0 exited") == []


def test_lines_come_in_pieces():
    inits = Inits()
    inits.ended(1, "rank 1 exited")
    assert inits.heard(0, b"begin 1") == inits.heard(0, b"7 al") == []
    assert [cancel.chunk[:10] for cancel in inits.heard(0, b"l\n")] == [b"cancel 17 "]


@pytest.mark.parametrize("end, how", [
    ("sys.exit(0)", "exited with code 0 before it called init()"),
    ("import lightcc.numpy", "exited with code 0 before it called init()"),
    ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL) before it called init()"),
])
def test_a_rank_that_ends_before_init(end, how):
    text = f"if rank == 0: {end}\nelse:\n" + "".join(f"    {line}\n" for line in INIT.strip().splitlines())
    code, out, err = launch("-np", 3, "--start-timeout", PATIENCE_S, sys.executable, "-c", program(text)[-1])
    assert code == (137 if "SIGKILL" in how else 5), err
    lines = sorted(out.splitlines())
    assert (lines or code == 137) and all("init: rank 0 (pid " in line and ") on host " in line and how in line
                                   for line in lines), out + err
    if "code 0" in how:
        assert f"lightccrun: {lines[0].partition('init: ')[2]}\n" in err, err


DIE_DURING_INIT = """
import threading
if rank == 2:
    sys.stdin.read()  # there is none, and then it waits for the others' end
    import time
    while True:
        time.sleep(60)
if rank == 0:
    import lightcc.core.lib
    threads = len(os.listdir("/proc/self/task")) + 1
    def die():
        while len(os.listdir("/proc/self/task")) <= threads:  # init listens to the launcher in one of its own
            time.sleep(0.01)
        os._exit(7)
    threading.Thread(target=die, daemon=True).start()
"""


@pytest.mark.parametrize("hosts", ["localhost:3", "localhost:1,h1:2"])
def test_a_rank_that_dies_during_init(hosts):
    code, out, err = launch("-np", 3, "-H", hosts, "--launch-command", "sh -c {command}", "--start-timeout", PATIENCE_S,
                            sys.executable, "-c", program(DIE_DURING_INIT + INIT)[-1])
    assert code == 7, err
    # By the launcher, or by the connection to rank 0. If rank 1 begins later than that, it is ended.
    assert re.fullmatch(r"(\[1\]<stdout>:init: rank 0 (\(pid \d+\) on host \S+ exited with code 7 during init\(\), and "
                        r"the others wait for it there|(at \S+ )?left while the ranks met)\n)?", out), out


@pytest.mark.parametrize("first", [0, 1])
def test_on_several_hosts(first):
    """Rank 0 is at the others' meeting place, or one of the others; the agents pass it on."""
    text = f"if rank == {first}: sys.exit(0)\n" + INIT
    code, out, err = launch("-np", 3, "-H", "h0:1,h1:2", "--launch-command", "sh -c {command}", "--start-timeout",
                            PATIENCE_S, sys.executable, "-c", program(text)[-1])
    assert code == 5, err
    assert re.search(rf"init: rank {first} \(pid \d+\) on host h{first} exited with code 0 before it called init", out)


def test_run_raises_it():
    def init():
        import os
        import sys
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit(0)
        import lightcc.numpy as hvd
        hvd.init()

    with pytest.raises(RuntimeError, match=r"init: rank 1 \(pid \d+\) on host \S+ exited with code 0 before it called"):
        run(init, num_proc=2, start_timeout=PATIENCE_S)


def test_a_process_of_a_rank_that_has_not_the_socket_waits_as_before():
    """Its number may be another file's there."""
    text = f"""
import subprocess
with open("/dev/null") as other:
    os.dup2(other.fileno(), int(os.environ["LIGHTCC_LAUNCHER_FD"].split(":")[0]))
    sys.exit(subprocess.call([sys.executable, "-c", {INIT!r}], close_fds=False) if rank else 0)
"""
    code, out, err = launch("-np", 2, "--start-timeout", 1, *program(text))
    assert "rank 0 did not come before HOROVOD_START_TIMEOUT (1 s)" in out and code == 5, err


def test_those_who_have_met_are_left_alone():
    text = INIT + """
if rank == 0:
    sys.exit(0)
print("on", flush=True)
"""
    code, out, err = launch("-np", 3, sys.executable, "-c", program(text)[-1])
    assert code == 0 and out.count(">:formed 3") == 3 and out.count(">:on") == 2, err


@pytest.mark.parametrize("last", [0, 1])
def test_a_worker_of_an_elastic_job_ends_it(tmp_path, last):
    """Whether it is the first or the last, the other does not wait for another one."""
    begun = tmp_path / "begun"
    code, out, err = launch("-np", 2, "--min-np", 2, "--elastic-timeout", PATIENCE_S, sys.executable, "-c", program(f"""
import pathlib
begun = pathlib.Path({str(begun)!r})
if rank == 0:
    while {last} and not begun.exists():
        time.sleep(0.01)
    sys.exit(0)
import lightcc.numpy as hvd
begun.touch()
hvd.init()
""")[-1])
    assert (code, out) == (0, ""), err
    assert re.search(r"lightccrun: worker 0 \(pid \d+ on host \S+\) exited with code 0 before it had met", err), err


# Without a launcher that tells

@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("name, value, says", (
    ("HOROVOD_TIMELINE", "/nowhere/{rank}.json", "HOROVOD_TIMELINE on rank {rank}, host .*: cannot write"),
    ("LIGHTCC_SELECT", "allreduce=ring\nx", r"LIGHTCC_SELECT=allreduce=ring\\nx: expected text without line breaks"),
    ("HOROVOD_CACHE_CAPACITY", "x" * 100_000, r"HOROVOD_CACHE_CAPACITY=x+\.\.\. \(100000 bytes\): expected at most")))
def test_what_one_rank_cannot_do_by_itself_the_others_hear_at_once(rank, name, value, says):
    """As under mpirun: nobody but the rank itself says so."""
    ranks = []
    for one in range(2):
        env = {**os.environ, "HOROVOD_RANK": str(one), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": str(one),
               "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_START_TIMEOUT": str(PATIENCE_S)}
        if one == rank:
            env[name] = value
        ranks.append(subprocess.Popen([sys.executable, "-c", """
import lightcc.numpy as hvd
print("ready", flush=True)
input()
try:
    hvd.init()
except (ValueError, hvd.HorovodInternalError) as error:
    print(error)
"""], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert [process.stdout.readline() for process in ranks] == ["ready\n"] * 2
    for process in ranks:
        process.stdin.write("\n")
        process.stdin.flush()
    own, heard = (ranks[one].communicate(timeout=PATIENCE_S / 10)[0] for one in (rank, 1 - rank))
    says = says.format(rank=rank)
    assert re.match(says, own) and re.match(f"rank {rank}: {says}", heard), (own, heard)

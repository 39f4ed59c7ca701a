"""init_at is cancelled by another thread: a world that cannot form any more ends on the ranks that have come at once,
with the cause, and they form another. Members are processes that do as they are told."""
import select
import subprocess
import sys
import time
import uuid

import pytest

SOON_MS, NOTICE_MS = 10_000.0, 15_000.0  # HOROVOD_START_TIMEOUT is 30 s; who fails gives the others time to hear of it
CAUSE = "member 2 died"
cancelled = 0.0  # when a member last was, on the clock that all processes share

MEMBER = """
import os, sys, threading, time
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import lib


def say(*words):
    print(*words, flush=True)


def init(rank, size, job, where):
    try:
        lib.init_at(int(rank), int(size), job, "secret", where)
        say("formed")
    except hvd.HorovodInternalError as error:
        say("failed", time.monotonic(), error.status, error)


def cancel(job, cause):
    lib.cancel_init(job, cause.replace("_", " "))


def allreduce():
    say(hvd.allreduce(np.full(1000, hvd.rank() + 1, np.float32), op=hvd.Sum).tolist() == [3.0] * 1000)


threads = []  # of init()


def left():  # descriptors, those of sockets among them, threads, memory that ranks share
    for thread in threads:  # they have said what came of it, and end; join() may return just before the thread is gone
        thread.join()
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):
            time.sleep(0.001)
    threads.clear()
    with open("/proc/self/maps") as maps:
        shared = sum("memfd" in line for line in maps)
    say(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared)


def cancel_in_child(job):  # where nobody is who waits for it
    child = os.fork()
    if child == 0:
        lib.cancel_init(job, "the child's")
        lib.init_at(0, 1, "the child's", "secret", lib.open_meeting())
        os._exit(lib.size() - 1)
    say(os.waitpid(child, 0)[1])


def spent():
    say(time.process_time())


say("ready")
for line in sys.stdin:
    command, *words = line.split()
    if command == "init":
        threads.append(threading.Thread(target=init, args=words))
        threads[-1].start()
    elif command == "open":
        say(lib.open_meeting())
    else:
        {"cancel": cancel, "allreduce": allreduce, "left": left, "shutdown": lib.shutdown,
         "cancel_in_child": cancel_in_child, "spent": spent}[command](*words)
"""


class Member:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", MEMBER], text=True, bufsize=1, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")

    def line(self, timeout=200.0):
        assert select.select([self.process.stdout], [], [], timeout)[0], "the member says nothing"
        return self.process.stdout.readline().strip()

    def ask(self, *words):
        self.tell(*words)
        return self.line()

    def is_quiet(self, seconds=0.3):
        return not select.select([self.process.stdout], [], [], seconds)[0]

    def expect_cancelled(self, by=("", "rank 1: "), before_ms=SOON_MS):
        """by: who may have been first, and told this one."""
        word, when, status, text = self.line().split(" ", 3)
        assert (word, status) == ("failed", "5") and text in [f"{who}init: {CAUSE}" for who in by]
        ms = 1000 * (float(when) - cancelled)
        assert ms < before_ms
        print(f"{ms:.1f} ms from cancel to error")


@pytest.fixture
def members():
    both = [Member(), Member()]
    for member in both:
        assert member.line() == "ready"
    yield both
    for member in both:
        member.process.kill()
        member.process.communicate()


def begin(members, size):
    """Inits of as many of the ranks as there are members, the first of which is rank 0. Returns the job."""
    job, where = uuid.uuid4().hex, members[0].ask("open")
    for rank, member in enumerate(members):
        member.tell("init", rank, size, job, where)
    return job


def cancel(members, job):
    global cancelled
    cancelled = time.monotonic()
    for member in members:
        member.tell("cancel", job, CAUSE.replace(" ", "_"))


def expect_world(members):
    """A world of two, in which an all-reduce is right, and its end."""
    job = begin(members, 2)
    assert [member.line() for member in members] == ["formed", "formed"]
    for member in members:
        member.tell("allreduce")
    assert [member.line() for member in members] == ["True", "True"]
    for member in members:
        member.tell("shutdown")
    return job


def test_those_that_have_come_form_another_world_at_once(members):
    for order in (1, -1):  # either is rank 0 of the next
        job = begin(members, 3)
        assert members[0].is_quiet() and members[1].is_quiet(0)
        cancel(members, job)
        for member in members:
            member.expect_cancelled()
        expect_world(members[::order])


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_nobody_has_joined_yet(members, rank):
    where = members[0].ask("open") if rank == 0 else "127.0.0.1:1"
    members[0].tell("init", rank, 3, "job", where)
    assert members[0].is_quiet()
    cancel(members[:1], "job")
    members[0].expect_cancelled()
    expect_world(members)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_hear_the_cause_of_one_that_was_cancelled_alone(members, rank):
    job = begin(members, 3)
    assert members[0].is_quiet()
    cancel([members[rank]], job)
    members[rank].expect_cancelled([""])
    members[1 - rank].expect_cancelled(["rank 1: " if rank == 1 else ""], NOTICE_MS)


def test_a_cancel_that_comes_first_is_remembered(members):
    where = members[0].ask("open")
    for job in ("first", "second"):
        cancel(members, job)
    for job in ("first", "second"):
        for rank, member in enumerate(members):
            member.tell("init", rank, 3, job, where)
            member.expect_cancelled()
    expect_world(members)


def test_of_another_job_or_too_late_it_does_nothing(members):
    job, where = uuid.uuid4().hex, members[0].ask("open")
    members[0].tell("init", 0, 2, job, where)
    assert members[0].is_quiet()
    cancel(members, "another")
    assert members[0].is_quiet()
    members[1].tell("init", 1, 2, job, where)
    assert [member.line() for member in members] == ["formed", "formed"]
    cancel(members, job)
    for member in members:
        member.tell("allreduce")
    assert [member.line() for member in members] == ["True", "True"]


def test_in_a_forked_child_it_does_nothing_to_the_parent(members):
    job, where = uuid.uuid4().hex, members[0].ask("open")
    members[0].tell("init", 0, 2, job, where)
    assert members[0].is_quiet()
    assert members[0].ask("cancel_in_child", job) == "0"
    before = float(members[0].ask("spent"))
    assert members[0].is_quiet(1.0)
    assert float(members[0].ask("spent")) - before < 0.2, "it sleeps on"
    members[1].tell("init", 1, 2, job, where)
    assert [member.line() for member in members] == ["formed", "formed"]


def test_many_leave_nothing_behind(members):
    expect_world(members)
    before = [member.ask("left") for member in members]
    for round in range(50):
        job = begin(members, 3)
        time.sleep(0.01 * (round % 3))
        cancel(members, job)
        for member in members:
            member.expect_cancelled()
    expect_world(members)
    assert [member.ask("left") for member in members] == before

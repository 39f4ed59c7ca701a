"""Starts lightccrun from a test and sees to it that nothing stays behind. Every process of a test carries a mark in its
environment, by which left-overs are found."""
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid

import psutil

DEADLINE_S = 300
LONGEST_S = 900  # of a job that is watched by its output
MARK = "LIGHTCC_TEST_MARK"


class Job:
    """One launcher and whatever it starts. A job that is not over at the end of its test is a failure.

    popen: warm.Popen where a test is not about how processes start."""

    def __init__(self, *command, stderr=subprocess.PIPE, cwd=None, stdin=subprocess.DEVNULL,
                 popen=subprocess.Popen, **variables):
        self.mark = uuid.uuid4().hex
        # pytest may run in the background of a shell, where SIGINT is ignored; a launcher would keep that.
        self.process = popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **variables}, stdin=stdin,
            stdout=subprocess.PIPE, stderr=stderr, cwd=cwd,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        # Whoever reads its output has no deadline of their own.
        watchdog = threading.Timer(LONGEST_S, self.process.kill)
        watchdog.daemon = True
        watchdog.start()

    def finish(self, deadline_s=DEADLINE_S):
        """Returns exit code, output and errors, after a check that nobody is left."""
        try:
            out, err = self.process.communicate(timeout=deadline_s)
            self.expect_nobody()
            return self.process.returncode, out.decode(), (err or b"").decode()
        finally:
            kill(self.living())

    def living(self):
        return marked(self.mark)

    def expect_nobody(self):
        wait_until(lambda: not self.living(), "all processes of the job to end", self.living)

    def wait_for(self, *lines):
        """Reads until all these lines have come, in any order."""
        missing = set(lines)
        while missing:
            line = self.process.stdout.readline()
            assert line, f"the output ended before {missing}: {self.finish()}"
            missing.discard(line.decode().rstrip("\n"))


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(processes):
    """Those that have not ended by themselves meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def command_of(process):
    """Its words; [] if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(condition, what, detail=lambda: "", within_s=DEADLINE_S):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}: {detail()}"
        time.sleep(0.02)


def start(*arguments, **options):
    return Job(sys.executable, "-m", "lightcc.runner", *map(str, arguments), **options)


def launch(*arguments, **options):
    return start(*arguments, **options).finish()


def environment(*arguments):
    """Of a single rank that lightccrun has started; and lightccrun's errors."""
    code, out, err = launch("-np", 1, *arguments, "env")
    assert code == 0, err
    return dict(re.findall(r"(?m)^\[0\]<stdout>:(\w+)=(.*)$", out)), err


def program(text):
    return [sys.executable, "-S", "-c", "import os, signal, sys, time\nrank = int(os.environ['HOROVOD_RANK'])\n" + text]


# A program that only SIGKILL ends once it was interrupted. Each sleep is short, since Python sleeps on if the signal
# comes just before it falls asleep.
CLEANS_FOR_EVER = program("""
try:
    print("up")
    while True:
        time.sleep(0.1)
except KeyboardInterrupt:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("cleaning")
    time.sleep(600)
""")


def expect_whole_lines(*arguments):
    """Of four ranks that write long lines in two pieces, on two streams that lead to one pipe."""
    text = program("""
for i in range(2500):
    line = f"{rank} {i} " + "x" * (i % 100 * (100 if i % 50 == 0 else 1)) + " end\\n"
    stream = sys.stderr if i % 2 else sys.stdout
    stream.write(line[:3]); stream.flush(); stream.write(line[3:]); stream.flush()
""")
    code, out, _ = launch(*arguments, *text, stderr=subprocess.STDOUT)
    assert code == 0
    seen = {(rank, stream): [] for rank in "0123" for stream in ("stdout", "stderr")}
    for line in out.splitlines():
        match = re.fullmatch(r"\[(\d)\]<(stdout|stderr)>:(\d) (\d+) x* end", line)
        assert match and match[1] == match[3], line
        seen[match[1], match[2]].append(int(match[4]))
    for (_, stream), numbers in seen.items():
        assert numbers == list(range(stream == "stderr", 2500, 2))


def expect_end_with_the_reader(ranks, *arguments):
    """Of a job of so many ranks that nobody listens to any more."""
    job = start(*arguments, "yes")
    job.wait_for(f"[{ranks - 1}]<stdout>:y")
    job.process.stdout.close()
    assert job.process.wait(DEADLINE_S) == 141
    assert f"nobody reads our output any more; ended {ranks} ranks".encode() in job.process.stderr.read()
    job.process.stderr.close()
    job.expect_nobody()


def expect_run_leaves_nobody(signum, arguments):
    """Of a program that is ended by a signal while it is in run() of two ranks. arguments: of run(), as they are
    written behind the function."""
    job = Job(sys.executable, "-c", f"""
import subprocess
from lightcc.runner import run
def wait():
    child = subprocess.Popen(["sleep", "600"])
    print("up")
    child.wait()
try:
    run(wait, {arguments})
except KeyboardInterrupt:
    print("interrupted", flush=True)
""")
    job.wait_for("[0]<stdout>:up", "[1]<stdout>:up")
    job.process.send_signal(signum)
    code, out, _ = job.finish()
    assert (code, out) == ((0, "interrupted\n") if signum == signal.SIGINT else (-signum, ""))

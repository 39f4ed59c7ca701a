"""Jobs of lightccrun on emulated hosts that are watched while something happens to them: their output goes to files,
so that no wait for it is without a deadline.

    with Watched(hosts, "h0:2,h1:2") as job:
        job.wait_ready()
        hosts.cut("h1")
        job.wait_for("error", ranks=(0, 1))
"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid

from jobs import DEADLINE_S, MARK, kill, marked

_WHAT_HARP_COSTS = re.compile(r".*LIGHTCC_NET=\w+: large tensors may take .*\n")  # what rank 0 of each such job says

# What every rank does. Its words: collectives of all sizes until the file `stop` exists, or what else it was told to do
# first. It says what it raises and when, and what it holds after shutdown.
PROGRAM = """
import gc, os, signal, sys, time
import numpy as np
import lightcc.numpy as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the ranks that are left, which want to tell first
stop, words = sys.argv[1], dict(word.partition("=")[::2] for word in sys.argv[2:])

def held():
    gc.collect()
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{fd}")]
    found = [link for link in links if link.startswith(("socket:", "anon_inode:", "/memfd:"))]
    with open("/proc/self/maps") as maps:
        found += [line.split()[-1] for line in maps if "memfd:" in line]
    return [one for one in found if one not in inherited] + ["thread"] * (len(os.listdir("/proc/self/task")) - threads)

def work():
    step, said, over = 0, 0.0, False
    rank, size = hvd.rank(), hvd.size()
    bases = [(np.arange(n) % 7).astype(np.float32) for n in (1, 1000, 100_000, 1_500_000)]
    while not over:
        if step == 5 and words.get("fail") == str(rank):
            raise ValueError("its own")
        if "compute" in words:
            time.sleep(float(words["compute"]))
        handles = [hvd.allreduce_async(base + (rank + step % 5), name=f"a{i}", op=hvd.Sum)
                   for i, base in enumerate(bases)]
        for handle, base in zip(handles, bases):
            expected = size * base + (size * (step % 5) + size * (size - 1) // 2)
            assert np.array_equal(hvd.synchronize(handle), expected), f"step {step} is wrong"
        over = bool(hvd.allreduce(np.array([os.path.exists(stop)], np.int32), name="over", op=hvd.Max)[0])
        step += 1
        if over or time.monotonic() > said + 0.05:
            said = time.monotonic()
            print("step", step, flush=True)

threads, inherited = len(os.listdir("/proc/self/task")), []
inherited = held()  # the socket by which the launcher hears of init()
hvd.init()
if "fork" in words and os.fork() == 0:  # as a worker of a DataLoader, which outlives its rank and has its descriptors
    time.sleep(60)
    os._exit(0)
print("ready", os.getpid(), flush=True)
try:
    work()
    print("done", flush=True)
except hvd.HorovodInternalError as error:
    print("error", time.monotonic(), error, flush=True)
hvd.shutdown()
if "again" in words:
    while not os.path.exists(stop):
        time.sleep(0.05)
    hvd.init()
    print("again", int(hvd.allreduce(np.array([1]), op=hvd.Sum)[0]), flush=True)
    hvd.shutdown()
print("held", held(), flush=True)
"""


class Watched:
    """A job that is not over at the end of its test is ended; where it should be over, finish() says so."""

    def __init__(self, hosts, places, *words, **variables):
        self.hosts, self.places = hosts, places
        self.mark = uuid.uuid4().hex
        self.folder = tempfile.TemporaryDirectory(prefix="lightcc-test-")
        self.stop_file = os.path.join(self.folder.name, "stop")
        self.ranks = range(sum(int(place.partition(":")[2]) for place in places.split(",")))
        self.host = [name for name, _, slots in (place.partition(":") for place in places.split(","))
                     for _ in range(int(slots))]
        self.pids = {}
        script = os.path.join(self.folder.name, "program.py")
        with open(script, "w") as out:
            out.write(variables.pop("program", PROGRAM))
        options = variables.pop("options", ())
        command = [sys.executable, "-m", "lightcc.runner", "-np", str(len(self.ranks)), "-H", places,
                   "--launch-command", hosts.launch_command, *options, sys.executable, script, self.stop_file, *words]
        with self._file("out", "wb") as out, self._file("err", "wb") as err:
            self.process = subprocess.Popen(
                command, env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        deadline = time.monotonic() + DEADLINE_S
        while living := marked(self.mark):  # the launcher's watchers and agents see to the rest, too
            kill(living)
            assert time.monotonic() < deadline, f"these do not end: {living}"
            time.sleep(0.02)
        self.process.wait()
        self.folder.cleanup()

    def _file(self, name, mode="r"):
        return open(os.path.join(self.folder.name, name), mode)

    def out(self):
        with self._file("out") as file:
            return file.read()

    def err(self):
        with self._file("err") as file:
            return file.read()

    def lines(self, rank, word=""):
        """What a rank printed: the lines that begin with this word."""
        return re.findall(rf"(?m)^\[{rank}\]<stdout>:({word}.*)\n", self.out())

    def wait_for(self, word, ranks=None, count=1, seconds=DEADLINE_S):
        """Until each of these ranks has printed so many lines that begin with it."""
        ranks = self.ranks if ranks is None else ranks
        deadline = time.monotonic() + seconds
        while True:
            over = self.process.poll() is not None  # and then everything has been said
            missing = [rank for rank in ranks if len(self.lines(rank, word)) < count]
            if not missing:
                break
            assert not over and time.monotonic() < deadline, (
                f"ranks {missing} of {self.places} have not said '{word}'"
                f"{'' if over else f' in {seconds} s'}:\n{self.tail()}")
            time.sleep(0.05)
        return {rank: self.lines(rank, word) for rank in ranks}

    def wait_ready(self, steps=2):
        self.pids = {rank: int(line.split()[1]) for rank, (line,) in self.wait_for("ready").items()}
        self.go_on(steps)

    def go_on(self, steps=2, seconds=DEADLINE_S):
        """Until all ranks have said that they make steps, from now on."""
        before = {rank: len(self.lines(rank, "step")) for rank in self.ranks}
        for rank in self.ranks:
            self.wait_for("step", [rank], before[rank] + steps, seconds)

    def name(self, rank):
        return f"rank {rank} (pid {self.pids[rank]}) on host {self.host[rank]}"

    def on(self, host):
        return [rank for rank in self.ranks if self.host[rank] == host]

    def kill(self, rank, signum=signal.SIGKILL):
        os.kill(self.pids[rank], signum)

    def errors(self, ranks, seconds=DEADLINE_S):
        """rank -> when it raised, on this machine's one monotonic clock, and what."""
        found = {}
        for rank, (line, *_) in self.wait_for("error", ranks, seconds=seconds).items():
            _, when, text = line.split(" ", 2)
            found[rank] = float(when), text
        return found

    def let_stop(self):
        open(self.stop_file, "w").close()

    def stop(self):
        """All ranks leave after this step, with nothing left; returns what the launcher and the ranks complained of."""
        self.let_stop()
        self.wait_for("done")
        return self.finish()

    def finish(self, expected=0, ranks=None):
        """Once it has ended: with this exit code, these ranks (or all) holding nothing after shutdown."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.places} does not end:\n{self.tail()}") from None
        assert code == expected, f"exit code {code}:\n{self.tail()}"
        for rank in self.ranks if ranks is None else ranks:
            assert self.lines(rank, "held") == ["held []"], f"rank {rank}:\n{self.tail()}"
        assert not marked(self.mark)
        return _WHAT_HARP_COSTS.sub("", self.err())

    def tail(self):
        return self.out()[-3000:] + self.err()[-3000:]


class ByHand:
    """Ranks that are started one by one, with variables of their own, as no launcher would. places: a host's name, or
    None for this machine itself."""

    def __init__(self, places, program, store, variables, hosts=None):
        self.mark = uuid.uuid4().hex
        self.said = {}
        self.processes = []
        for rank, place in enumerate(places):
            env = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "HOROVOD_RANK": str(rank),
                   "HOROVOD_SIZE": str(len(places)), "LIGHTCC_JOB_ID": self.mark, "LIGHTCC_SECRET": self.mark,
                   "LIGHTCC_STORE_ADDR": store, **variables[rank]}
            command = [sys.executable, "-c", env.pop("program", program), store]
            self.processes.append(subprocess.Popen(
                hosts.command(place, command) if place else command, env=env, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
        assert not marked(self.mark)

    def finish(self, rank):
        """What the rank has said, once it has ended."""
        if rank not in self.said:
            try:
                self.said[rank] = self.processes[rank].communicate(timeout=DEADLINE_S)[0]
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} does not end; the others have said {self.said}") from None
        return self.said[rank]

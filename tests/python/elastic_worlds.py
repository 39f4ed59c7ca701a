"""Workers that form one world after the other, as a driver would have them do; who is in which is known beforehand.

    with elastic_worlds.Nursery(module="...") as nursery:
        texts = nursery.run(worlds=[[0, 1, 2], [0, 2], [0, 2, 3]], folder=tmp_path, options={...})

calls module.prepare() once, and module.work(worlds, options) in a process for each name in worlds, which starts when
the first world that it is in may begin; worlds is a Worlds, with
    worlds.enter(...)                     init(...), into the first world
    worlds.leave_and_enter()              shutdown and init into the next one, for run_fn; ends who is not in it
Returns what those of the last world printed. Processes meet by files in the folder. They are forked from one that has
imported the framework, as that is what takes time.
"""
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

DEADLINE_S = 300
HERE = Path(__file__).parent


class Meeting:
    """What HorovodBasics.init takes for a communicator."""

    def __init__(self, file, members, me):
        self._file, self._members, self._me = file, members, me

    def Get_rank(self):
        return self._members.index(self._me)

    def Get_size(self):
        return len(self._members)

    def bcast(self, value, root):
        if self.Get_rank() == root:
            half = self._file.with_suffix(".half")
            half.write_text(json.dumps(value))
            half.rename(self._file)
            return value
        deadline = time.monotonic() + DEADLINE_S
        while not self._file.exists():
            assert time.monotonic() < deadline, f"{self._me} waited {DEADLINE_S} s for {self._file}"
            time.sleep(0.002)
        return json.loads(self._file.read_text())


class Worlds:
    """The worlds that this process is in."""

    def __init__(self, worlds, folder, me):
        self._worlds, self._folder, self.me = worlds, folder, me
        self.number = first_of(worlds, me) - 1

    def enter(self, **arguments):
        from lightcc.core.job import init
        self.number += 1
        if self.me not in self.members:
            sys.exit(0)
        if self.number and set(self.members) - set(self._worlds[self.number - 1]):
            (self._folder / f"ready{self.number}").touch()  # those that are new may start
        init(Meeting(self._folder / f"world{self.number}", self.members, self.me), **arguments)

    def leave_and_enter(self):
        from lightcc.core.job import shutdown
        shutdown()
        self.enter()

    @property
    def members(self):
        return self._worlds[self.number]

    @property
    def is_last(self):
        return self.number == len(self._worlds) - 1

    @property
    def lost(self):
        """Those of this world that are not in the next."""
        return set() if self.is_last else set(self.members) - set(self._worlds[self.number + 1])

    @property
    def grows(self):
        return not self.is_last and bool(set(self._worlds[self.number + 1]) - set(self.members))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def first_of(worlds, me):
    return next(number for number, members in enumerate(worlds) if me in members)


class Nursery:
    """The process that the workers are forked from."""

    def __init__(self, module, **variables):
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, module], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_ELASTIC": "1", "PYTHONPATH": path, **variables})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.communicate()

    def run(self, worlds, folder, options, **variables):
        """AssertionError if one of the last world does not end well, or another is neither killed nor done."""
        self._process.stdin.write(json.dumps([worlds, str(folder), options, variables]) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        texts = {me: (Path(folder) / f"output{me}").read_text() for me, _ in codes}
        assert {me for me, _ in codes} == {me for members in worlds for me in members}, f"not all began: {texts}"
        for me, code in codes:
            assert code in ((0,) if me in worlds[-1] else (0, -signal.SIGKILL)), f"{me} ended with {code}: {texts}"
        return {me: texts[me] for me in worlds[-1]}


def raise_workers(work, worlds, folder, options, variables):
    """Starts the workers, each as soon as its first world may begin; returns names and exit codes. After DEADLINE_S
    those that are left are killed."""
    waiting = sorted({me for members in worlds for me in members}, key=lambda me: first_of(worlds, me))
    living, codes, deadline = {}, [], time.monotonic() + DEADLINE_S
    while living or (waiting and not codes):
        while waiting and (not first_of(worlds, waiting[0]) or
                           (folder / f"ready{first_of(worlds, waiting[0])}").exists()):
            me = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                child(work, Worlds(worlds, folder, me), options, variables)
            living[pid] = me
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes.append((living.pop(pid), os.waitstatus_to_exitcode(status)))
        elif time.monotonic() < deadline:
            time.sleep(0.002)
        else:
            for pid in living:
                os.kill(pid, signal.SIGABRT)  # faulthandler says where it is
            deadline += DEADLINE_S
    return codes


def child(work, worlds, options, variables):
    code = 1
    try:
        os.environ.update(variables)
        output = os.open(worlds._folder / f"output{worlds.me}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        work(worlds, options)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(module):
    work = importlib.import_module(module).work
    importlib.import_module(module).prepare()
    faulthandler.enable()
    for line in sys.stdin:
        worlds, folder, options, variables = json.loads(line)
        print(json.dumps(raise_workers(work, worlds, Path(folder), options, variables)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

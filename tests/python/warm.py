"""Starts programs of Python in processes that have imported the framework already, since most of a short job's time
goes into imports.

warm_server.py has imported it. For each program it forks a process, which takes the program's arguments, environment,
folder and standard streams and runs it as Python would; what this process starts in turn is forked from it. So a job's
launcher and all its ranks cost one import a test session. Tests that are about how processes start, and about what a
program imports, take subprocess.Popen.
"""
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

# What Python and the frameworks read of their environment when they are imported. PYTHONPATH and PYTHONUNBUFFERED are
# heeded again in the forked process.
_READ_EARLY = ("ATEN_", "CUDA", "DNNL_", "GOMP_", "KERAS_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_",
               "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TF_", "TORCH", "XLA_")
_READ_AGAIN = ("PYTHONPATH", "PYTHONUNBUFFERED")
MOST_BYTES = 200_000  # of a request
start_by_exec = subprocess.Popen._execute_child
_parameters = inspect.signature(start_by_exec)


class Call:
    """What subprocess.Popen is asked to start."""

    def __init__(self, popen, arguments):
        self._popen = popen
        self.options = _parameters.bind(popen, *arguments).arguments
        self.program = self.options["args"]
        self.environment = dict(os.environ if self.options["env"] is None else self.options["env"])

    def can_be_forked(self):
        """Whether it is a program of this Python, and all options are such that a forked process can heed."""
        options, program = self.options, self.program
        return (isinstance(program, list) and len(program) > 1 and program[0] == sys.executable
                and (not program[1].startswith("-") or program[1] in ("-c", "-m") and len(program) > 2)
                and options["close_fds"] and not options["shell"] and options["umask"] < 0
                and all(options[other] is None for other in ("executable", "gid", "gids", "uid"))
                and not any(Path(folder, "sitecustomize.py").exists() for folder in folders(self.environment)))

    def streams(self):
        """The descriptors that become its standard input, output and errors."""
        ends = (self.options["p2cread"], self.options["c2pwrite"], self.options["errwrite"])
        return [standard if end == -1 else end for standard, end in enumerate(ends)]

    def is_started(self, pid):
        """Has Popen do what it does when the process is there."""
        self._popen.pid = pid
        self._popen._child_created = True
        self._popen._close_pipe_fds(*(self.options[end] for end in (
            "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def read_early(environment):
    return {name: value for name, value in environment.items()
            if name.startswith(_READ_EARLY) and name not in _READ_AGAIN}


def folders(environment):
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


class Popen(subprocess.Popen):
    """subprocess.Popen whose program is forked from a server, with the signals of a terminal: preexec_fn is not called.
    Other programs are started by exec, as usual."""

    _server_says = None  # a socket; the process is the server's child

    def _execute_child(self, *arguments):
        call = Call(self, arguments)
        if not call.can_be_forked() or call.options["pass_fds"]:
            start_by_exec(self, *arguments)
            return
        self._server_says, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = {"program": call.program, "environment": call.environment,
                       "folder": os.path.abspath(call.options["cwd"] or "."),
                       "session": call.options["start_new_session"],
                       "process_group": call.options.get("process_group", -1)}
            socket.send_fds(_server(tuple(sorted(read_early(call.environment).items()))),
                            [json.dumps(request).encode()], [*call.streams(), theirs.fileno()])
        call.is_started(self._hear())

    def _hear(self):
        said = self._server_says.recv(16)
        if not said:
            raise ChildProcessError("the server of warm processes has ended")
        return int(said)

    def _wait_for(self, pid, flags):
        """os.waitpid()"""
        if self._server_says is None:
            return os.waitpid(pid, flags)
        if flags & os.WNOHANG and not select.select([self._server_says], [], [], 0)[0]:
            return 0, 0
        status = self._hear()
        self._server_says.close()
        return pid, status

    def _internal_poll(self, _deadstate=None, **_):
        return super()._internal_poll(_deadstate, _waitpid=self._wait_for)

    def _try_wait(self, wait_flags):
        return self._wait_for(self.pid, wait_flags)


def run(program, deadline_s, cwd=None, **variables):
    """subprocess.run() with these variables; output and errors are text."""
    command = [*map(str, program)]
    with Popen(command, text=True, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
               env={**os.environ, "OMP_NUM_THREADS": "1", **variables}) as started:
        try:
            out, err = started.communicate(timeout=deadline_s)
        except BaseException:
            started.kill()
            raise
    return subprocess.CompletedProcess(command, started.returncode, out, err)


@functools.lru_cache(maxsize=None)
def _server(variables):
    """The socket of a server that has these variables of those that are read early. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_EARLY)}
    again = {name: os.environ[name] for name in _READ_AGAIN if name in os.environ}
    with theirs:
        room = "." * 100_000  # the server's words and environment are made this long: those of programs overwrite them
        subprocess.Popen([sys.executable, str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno()), room],
                         env={**others, **again, **dict(variables), "LIGHTCC_TEST_ROOM": room},
                         pass_fds=[theirs.fileno()])
    return ours

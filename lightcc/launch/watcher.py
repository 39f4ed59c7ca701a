"""The watcher (groups.py), as the process sees it whose end it watches."""
import contextlib
import os
import subprocess
import sys
import threading

from lightcc.launch import groups
from lightcc.launch.pipes import piped


class Watcher:
    """Ends the process groups that were added when this process is gone, however that comes about. Any thread may call
    it. To be closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(groups.__file__), str(os.getpid())], cwd="/", bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self._pipe = piped(self._process.stdin)
        self._lock = threading.Lock()  # guards the pipe's end

    def add(self, group: int) -> None:
        self._write(group)

    def forget(self, group: int) -> None:
        """Is to be called before the leader is reaped, since its number may be another group's from then on."""
        self._write(-group)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._pipe.close()

    def _write(self, number: int) -> None:
        # Without a reader somebody has killed the watcher, which is a second safeguard only.
        with self._lock, contextlib.suppress(BrokenPipeError):
            if not self._pipe.closed:
                self._pipe.write(b"%d\n" % number)

"""Process groups: who is in them and how they end. As a script: the watcher of one job.

Every rank is started as the leader of a process group of its own, so whatever it starts (DataLoader workers, shells,
helpers) belongs to the same group, unless that process left on purpose with setpgid or setsid.

The watcher outlives a launcher that was killed with SIGKILL and ends the groups in its place. It reads the
group numbers, one a line, from its stdin, and does nothing until the launcher is gone; a number with a minus takes the
group back. It is run by path, with
nothing but the standard library, so that it starts in milliseconds. Linux only.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Collection

LEFTOVER_GRACE_S = 1.0  # multiprocessing's resource tracker needs a moment to remove shared memory
KILL_WAIT_S = 5.0       # a process that SIGKILL does not end by then sleeps in the kernel; waiting longer is no help
SCAN_S = 0.02


def members(groups: Collection[int]) -> list[int]:
    """The living processes of these groups; zombies have ended and do not count."""
    wanted, found = set(groups), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.getpgid(int(name)) in wanted and not _is_zombie(name):
                found.append(int(name))
        except OSError:  # it ended while we looked
            continue
    return found


def _is_zombie(pid: str) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")


def end(groups: Collection[int], grace_s: float = LEFTOVER_GRACE_S) -> list[int]:
    """SIGTERM to every member, SIGKILL after the grace. Returns who still lives: processes stuck in the kernel."""
    now = time.monotonic()
    kill_at, give_up_at = now + grace_s, now + grace_s + KILL_WAIT_S
    terminated: set[int] = set()  # which have got SIGTERM
    while True:
        alive = members(groups)
        now = time.monotonic()
        if not alive or now >= give_up_at:
            return alive
        for pid in alive:
            if now >= kill_at:
                _send(pid, signal.SIGKILL)
            elif pid not in terminated:  # a second SIGTERM would interrupt its clean-up
                _send(pid, signal.SIGTERM)
                terminated.add(pid)
        time.sleep(SCAN_S)


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):  # gone, or it became another user's
        pass


def watch(launcher: int) -> None:
    """Collects group numbers from stdin until the launcher is gone, then ends them."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:  # its forked children may hold the pipe open after its death; its pidfd they cannot
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    except ProcessLookupError:
        pass
    groups: set[int] = set()
    line = b""
    while True:
        events = dict(poll.poll())
        chunk = os.read(0, 65536) if 0 in events else b""
        *numbers, line = (line + chunk).split(b"\n")
        for number in map(int, numbers):
            (groups.add if number > 0 else groups.discard)(abs(number))
        if not chunk:  # end of file, or only the pidfd is ready
            break
    if groups:
        end(groups)


if __name__ == "__main__":
    watch(int(sys.argv[1]))

"""A rank that a scheduler's task has started: python -m lightcc.launch.placed_child PARENT_PID CONNECTION_FD RANK. The
task carries what it says to the others (placed.py), and it ends with the task."""
import io
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, List, NamedTuple

import cloudpickle

from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.job import shutdown
from lightcc.launch import placed
from lightcc.launch.local import die_with

VALUE, FAILED = b"v", b"f"  # the first byte of an answer; a pickle follows


class Failed(NamedTuple):
    traceback: str
    follows: bool  # most likely from the failure of another rank


class Start(NamedTuple):
    """What the task sends once all ranks have said who they are."""

    processes: List[placed.Process]
    meeting: placed.Meeting
    gpus: List[str]  # all that the ranks of this host have
    function: bytes  # of launch/pickling.py


def main(parent: int, connection_fd: int, rank: int) -> int:
    die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    connection.send((placed.here(), placed.open_meeting() if rank == 0 else None))
    code = 0
    try:
        answer = VALUE + cloudpickle.dumps(_run(rank, Start(*connection.recv())))
    except Exception as error:
        sys.last_value = error  # as Python does for what nobody catches: shutdown tells the other ranks
        shutdown()
        traceback.print_exc()
        answer = FAILED + pickle.dumps((traceback.format_exc(), isinstance(error, HorovodInternalError)))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    connection.send_bytes(answer)
    return code


def _run(rank: int, start: Start) -> Any:
    if start.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
    placed.place(rank, start.processes, start.meeting)
    memory = io.BytesIO(start.function)
    sys.path.extend(path for path in pickle.load(memory) if path not in sys.path)
    func, args, kwargs = pickle.load(memory)
    return func(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))

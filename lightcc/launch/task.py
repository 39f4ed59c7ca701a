"""The rank's side of run(): python -m lightcc.launch.task LAUNCHER_PID FUNCTION_FD RESULT_FD."""

import os
import pickle
import sys
import time
import traceback
from typing import Any, BinaryIO

import cloudpickle

from lightcc.launch import result_file
from lightcc.launch.local import die_with


def main(launcher: int, function_fd: int, result_fd: int) -> int:
    if os.getppid() == launcher:  # not under a wrapper script, whose end is not ours
        die_with(launcher)
    for fd in (function_fd, result_fd):
        os.set_inheritable(fd, False)
    with open(result_fd, "wb") as result:
        try:
            with open(f"/proc/self/fd/{function_fd}", "rb") as memory:  # from its begin; ranks share the descriptor's
                sys.path.extend(path for path in pickle.load(memory) if path not in sys.path)
                func, args, kwargs = pickle.load(memory)
            os.close(function_fd)
            _leave(result, func(*args, **kwargs))
            return 0
        except Exception as error:
            failed_at = time.monotonic()
            sys.last_value = error  # as Python does for what nobody catches: shutdown tells the other ranks
            traceback.print_exc()
            result_file.begin(result)
            result.write(traceback.format_exc().encode(errors="replace"))
            result_file.commit(result, is_error=True, time_s=failed_at)
            return 1


def _leave(result: BinaryIO, value: Any) -> None:
    result_file.begin(result)
    try:
        cloudpickle.dump(value, result)
    except Exception as error:
        whose = "worker" if os.environ.get("HOROVOD_ELASTIC") == "1" else "rank"
        raise RuntimeError(f"the result of {whose} {os.environ.get('HOROVOD_RANK')}, of type {type(value).__name__}, "
                           f"cannot be pickled: {error}") from error
    result_file.commit(result, is_error=False, time_s=time.monotonic())


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))

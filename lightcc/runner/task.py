"""The rank's side of run(): python -m lightcc.runner.task LAUNCHER_PID PAYLOAD_FD RESULT_FD."""

import mmap
import os
import pickle
import sys
import time
import traceback

import cloudpickle

from lightcc.runner import record
from lightcc.runner.local import die_with


def main(launcher: int, payload_fd: int, result_fd: int) -> int:
    if os.getppid() == launcher:  # not under a wrapper script, whose end is not ours
        die_with(launcher)
    for fd in (payload_fd, result_fd):
        os.set_inheritable(fd, False)
    with open(result_fd, "wb") as result:
        try:
            with mmap.mmap(payload_fd, 0, access=mmap.ACCESS_READ) as payload:
                sys.path.extend(path for path in pickle.load(payload) if path not in sys.path)
                func, args, kwargs = pickle.load(payload)
            os.close(payload_fd)
            value = func(*args, **kwargs)
            record.begin(result)
            cloudpickle.dump(value, result)
            record.commit(result, is_error=False, time_s=time.monotonic())
            return 0
        except Exception:
            failed_at = time.monotonic()
            traceback.print_exc()
            record.begin(result)
            result.write(traceback.format_exc().encode(errors="replace"))
            record.commit(result, is_error=True, time_s=failed_at)
            return 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))

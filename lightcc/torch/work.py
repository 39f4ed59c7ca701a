"""Work of torch.distributed: what the functions of a process group return.

A Work that is written in Python has a half in C++, which can do nothing once the half in Python is gone: its wait()
never returns. Where C++ asks a group for a Work, torch wraps the answer in an object of C++ that keeps both halves.
Where Python hands a Work to C++, it does not; those few functions are given the same wrapper here.
"""
import functools
from datetime import timedelta
from typing import Any, List, Optional

import torch
import torch.distributed as dist

from lightcc.torch.futures import Operation, future_of
from lightcc.torch.spans import spanned


class Work(dist.Work):
    """A collective in flight. What it failed with, a HorovodInternalError, is raised by wait and by the future."""

    def __init__(self, operation: Operation, outputs: List[torch.Tensor], timeout: timedelta):
        super().__init__()
        self._operation, self._outputs, self._timeout = operation, outputs, timeout
        self._future: Optional[torch.futures.Future] = None

    @spanned("lightcc.wait")
    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Returns True when it is done; HorovodInternalError after `timeout` (default: the group's)."""
        self._operation.wait((timeout or self._timeout).total_seconds())
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._operation.done()

    def is_success(self) -> bool:
        return self._operation.done() and self._operation.error is None

    def exception(self) -> Optional[Exception]:
        return self._operation.error

    def result(self) -> List[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """A future of the list of outputs."""
        if self._future is None:
            self._future = future_of(self._operation, self._outputs, self._timeout.total_seconds())
        return self._future

    def boxed(self) -> Any:
        """For TorchScript."""
        return kept(self).boxed()


class _Asked(dist.ProcessGroup):
    """A group of which C++ asks for one Work."""

    def __init__(self, work: Work):
        super().__init__(0, 1)
        self._work = work

    def barrier(self, opts=None) -> Work:
        return self._work


def kept(work: Work) -> dist.Work:
    """The work in the wrapper that C++ can keep; only waiting and the future pass through it."""
    return dist.ProcessGroup.barrier(_Asked(work))


def _keep_what_is_given_to(owner: Any, name: str) -> None:
    function = getattr(owner, name, None)
    if function is None:  # in this version of torch
        return

    @functools.wraps(function)
    def keeping(*arguments, **named):
        return function(*(kept(x) if isinstance(x, Work) else x for x in arguments),
                        **{key: kept(x) if isinstance(x, Work) else x for key, x in named.items()})
    setattr(owner, name, keeping)


_keep_what_is_given_to(dist.Reducer, "_set_forward_pass_work_handle")  # DistributedDataParallel.join
_keep_what_is_given_to(torch._C._distributed_c10d, "_register_work")  # functional collectives

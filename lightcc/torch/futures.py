"""torch futures of operations in flight: who completes them, and operations that nobody waits for.

Nobody calls Python when an operation is done: a callback would need the interpreter's lock inside the engine. So
somebody must ask. In a backward pass that is autograd itself, at its end, in the thread that called backward or, with
tensors of a GPU, in autograd's thread of that device (the caller then waits in C++, and sees a Ctrl-C when it returns):
a callback queued by the last bucket runs before the one with which DistributedDataParallel waits for its buckets. That
takes no thread of lightcc's, and an error leaves backward as the exception it is. Everywhere else a thread asks,
started when it is first needed; in a backward pass only for futures that are GRACE_S old, in case somebody waits for
one before the end. The thread ends before the interpreter does: torch's code aborts in a thread that Python ends by
force.

An operation on tensors of a GPU is done when its work is queued there; device_order.py says which streams go on behind
it.
"""
import logging
import os
import threading
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from lightcc.core import lib, request
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.exiting import at_exit
from lightcc.torch.device_order import order_of, own_stream_of

GRACE_S = 0.02
_STEP_MS = 2  # how long the thread waits for one operation before it asks for the others
_STOP_S = 5.0  # how long the end of the process waits for the thread, which may be in a callback of the user's

_engine = torch.autograd.Variable._execution_engine
_completing = threading.local()
_logger = logging.getLogger("lightcc")


class Operation:
    """A request of the core, or its failure. Any thread may call."""

    def __init__(self, handle: int, keep_alive: Any = None, finish: Optional[Callable[[int], Any]] = None,
                 at_end: Callable[[], Any] = lambda: None, error: Optional[Exception] = None,
                 tensors: Sequence[torch.Tensor] = ()):
        """handle: 0 if it is done. keep_alive: what must live until then. finish: called with the handle when it has
        succeeded. at_end: called in any case. tensors: all that it reads and writes."""
        self._handle, self._finish, self._at_end = handle, finish, at_end
        self.order = order_of(handle, tensors) if handle else None  # None: on the CPU
        self._lock = threading.Lock()
        self._epoch = lib.epoch
        self.error = error
        if _abandoned:
            _reap()
        if handle:
            request.register(handle, keep_alive, None)  # it may outlive this object

    def wait(self, timeout_s: Optional[float] = None, since: Optional[float] = None) -> None:
        """Returns when it is done, and what the current stream of its GPU is given then runs behind it; raises what it
        failed with, and HorovodInternalError when the time is over, which began now or at `since`."""
        with self._lock:
            if self._handle:
                begin = time.monotonic() if since is None else since
                self._end(None if timeout_s is None else begin + timeout_s, timeout_s)
            if self.error is not None:
                raise self.error
            if self.order is not None:
                self.order.follow()

    def done(self) -> bool:
        """Whether it is done, successfully or not; never blocks for it."""
        if self._handle and self._lock.acquire(blocking=False):
            try:
                if self._handle and (self._epoch != lib.epoch or not lib.initialized() or
                                     lib.poll(self._handle)):
                    with own_stream_of(self.order):
                        self._end(None, None)
            except Exception as error:  # of poll: the epoch has ended meanwhile; of CUDA: there is no own stream
                if self._handle:
                    if self._epoch == lib.epoch:
                        lib.release(self._handle)
                    self._failed(error)
            finally:
                self._lock.release()
        return not self._handle

    def wait_a_little(self) -> None:
        """Waits for a moment at most."""
        if self._lock.acquire(timeout=1e-3 * _STEP_MS):
            try:
                if self._handle and self._epoch == lib.epoch:
                    lib._wait(self._handle, _STEP_MS)
            finally:
                self._lock.release()

    def __del__(self):
        if self._handle and self._epoch == lib.epoch:
            _abandoned.append(self)  # so it lives until it is done
            if self._finish is not None:
                _completer.wake()

    def _end(self, deadline: Optional[float], timeout_s: Optional[float]) -> None:
        def step(handle: int, timeout_ms: int) -> int:
            if deadline is None:
                return lib._wait(handle, timeout_ms)
            left_ms = max(0, int(1e3 * (deadline - time.monotonic())))
            status = lib._wait(handle, min(timeout_ms, left_ms))
            if status == lib.PENDING and left_ms == 0:
                raise HorovodInternalError(
                    f"Rank {lib.rank()} has waited {timeout_s:g} s for a collective; other ranks may not have called "
                    "it, or work longer. A warning names them after HOROVOD_STALL_CHECK_TIME_SECONDS.")
            return status

        if self._epoch != lib.epoch or not lib.initialized():
            self._failed(HorovodInternalError("lightcc was shut down while a collective was in flight."))
            return
        status = lib.wait(self._handle, step)
        try:
            if status:
                self.error = lib.error(status)
            elif self.order is not None:
                self.order.end(self._handle, self._finish)
            elif self._finish is not None:
                self._finish(self._handle)
        except Exception as error:
            self.error = error
        finally:
            lib.release(self._handle)
            self._forget()

    def _failed(self, error: Exception) -> None:
        self.error = error
        self._forget()

    def _forget(self) -> None:
        request.unregister(self._handle)
        self._handle, self._finish = 0, None
        self._at_end()


_abandoned: List[Operation] = []  # nobody will wait for these; any thread may append and remove


def _reap() -> None:
    """Ends abandoned operations that are done: their results go where they belong, and what they held is given back."""
    for operation in _abandoned[:]:
        if operation.done():
            try:
                _abandoned.remove(operation)
            except ValueError:  # another thread was here first
                continue
            if operation.error is not None and operation._epoch == lib.epoch and lib.initialized():
                _logger.warning("a collective that nobody waits for has failed: %s", operation.error)


def wait_for_abandoned(timeout_s: float) -> None:
    """Before a group ends: what was started must not fail on the ranks that wait for it."""
    deadline = time.monotonic() + timeout_s
    _reap()
    while _abandoned and time.monotonic() < deadline:
        for operation in _abandoned[:1]:
            operation.wait_a_little()
        _reap()


class Future(torch.futures.Future):
    """What DistributedDataParallel and users of torch.distributed wait for."""

    def __init__(self, operation: Operation, value: Any, timeout_s: Optional[float]):
        super().__init__(devices=operation.order.devices() if operation.order is not None else None)
        self._operation, self._value, self._timeout_s = operation, value, timeout_s
        self._in_backward = torch._C._current_graph_task_id() != -1
        self._begin = time.monotonic()
        self._once = threading.Lock()
        self._set = False

    def wait(self) -> Any:
        """The value, once the operation is done; raises what it failed with."""
        self._operation.wait(self._timeout_s)
        self.complete()
        return self._value

    def late(self) -> bool:
        """Whether it took longer than it may: who waits in C++ for what comes after it has no timeout."""
        return self._timeout_s is not None and time.monotonic() > self._begin + self._timeout_s

    def complete(self, since: Optional[float] = None) -> Optional[Exception]:
        """Waits for the operation and gives the future its value, or its error, which is returned."""
        try:
            self._operation.wait(self._timeout_s, since)
        except Exception as error:
            failure: Optional[Exception] = error
        else:
            failure = None
        self._settle(None if self._in_backward else failure)  # backward raises it after DDP is done with its buckets
        return failure

    def _settle(self, failure: Optional[Exception]) -> None:
        """Whoever comes first gives the future its value, or the error."""
        with self._once:
            if self._set:
                return
            self._set = True
        if failure is None:
            self.set_result(self._value)
        else:
            self.set_exception(failure)


def future_of(operation: Operation, value: Any, timeout_s: Optional[float] = None) -> torch.futures.Future:
    """A future that will have this value when the operation is done. timeout_s: how long a wait for it may take."""
    future = Future(operation, value, timeout_s)
    if operation._handle == 0 and operation.error is None:
        future.complete()
        return future
    grace_s = 0.0
    if future._in_backward:
        _engine.queue_callback(lambda: _complete_in_backward(future))
        grace_s = 0.0 if getattr(_completing, "now", False) else GRACE_S
    if operation._handle:
        _completer.add(future, grace_s)
    else:
        future.complete()
    return future


def _complete_in_backward(future: Future) -> None:
    """A final callback of a backward pass. Those queued by now, with which DDP finishes its buckets, run before one
    that raises: so the model can be used again after an error."""
    _completing.now = True
    try:
        failure = future.complete()
    finally:
        _completing.now = False
    if failure is not None:
        _engine.queue_callback(lambda: _raise(failure))


def _raise(failure: Exception) -> None:
    raise failure


class _Completer:
    """The thread, and what it looks after."""

    def __init__(self):
        self._changed = threading.Condition()
        self._futures: List[Tuple[float, Future]] = []  # with the time from which on they are the thread's
        self._idle = True
        self._stopped = False
        self._thread: Optional[threading.Thread] = None

    def add(self, future: Future, grace_s: float) -> None:
        with self._changed:
            if not self._stopped:
                self._futures.append((time.monotonic() + grace_s, future))
                if self._thread is None or self._idle or not grace_s:
                    self._wake()
                return
        future.complete()  # the process is ending, and nobody else would do it later

    def wake(self) -> None:
        """Says that an operation was abandoned which has a result to deliver. The garbage collector may call it."""
        with self._changed:
            if not self._stopped:
                self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            at_exit(_stop_completer)
            self._thread = threading.Thread(target=self._run, name="lightcc-futures", daemon=True)
            self._thread.start()
        else:
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread; what is not done by now is completed by who waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                _logger.warning("a callback of a torch future has not returned for %.0f s; the process ends without it",
                                _STOP_S)
        self._futures = []

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._futures = [entry for entry in self._futures if not entry[1]._set]
                now = time.monotonic()
                ready = [future for due, future in self._futures if due <= now]
                abandoned = [operation for operation in _abandoned if operation._finish is not None]
                if not ready and not abandoned:
                    self._idle = not self._futures
                    self._changed.wait(min(due for due, _ in self._futures) - now if self._futures else None)
                    self._idle = False
                    continue
            for future in ready:  # in any order, since one may depend on what somebody does after another
                if future._operation.done() or future.late():
                    try:
                        with own_stream_of(future._operation.order):
                            future.complete(future._begin)
                    except Exception as error:  # of CUDA; the thread lives on, for the others
                        future._settle(error)
            if abandoned:
                _reap()
            operations = [future._operation for future in ready] + abandoned
            if all(operation._handle for operation in operations):
                operations[0].wait_a_little()


_completer = _Completer()


def _stop_completer() -> None:
    _completer.stop()


def _forget_completer() -> None:
    """In the child of a fork, which has neither the thread nor, maybe, the right to its lock."""
    global _completer
    _completer = _Completer()


os.register_at_fork(after_in_child=_forget_completer)

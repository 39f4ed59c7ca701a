"""A base for data loaders, and a mix-in that makes one fetch ahead in a thread. Needs no framework and no job.

Every iteration has a thread and batches of its own (_Prefetcher), so nothing of one epoch is left over for the next.
Iterations that are still going on when the process ends are closed then: a framework's code aborts in a thread that
Python ends by force.
"""
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable

from lightcc.core.exiting import at_exit

_CLOSE_S = 10.0  # how long close waits for _iterate to hand over; it may be waiting for a disk
_EXIT_S = 5.0    # how long all of them together may take when the process ends
_LOOK_S = 1.0    # how often who waits for the other side looks around
_END = object()

_logger = logging.getLogger("lightcc")


class BaseDataLoader:
    """Iterates over _process_batch(batch) for each batch of _iterate(). Give it _iterate and __len__.

    Source: horovod.data.

    >>> class Numbers(BaseDataLoader):
    ...     def __len__(self):
    ...         return 3
    ...     def _iterate(self):
    ...         yield from range(3)
    ...     def _process_batch(self, batch):
    ...         return batch * 10
    >>> list(Numbers())
    [0, 10, 20]
    """

    def __len__(self) -> int:
        """Batches in an epoch. NotImplementedError unless a subclass says it."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__: it should return the batches of an epoch")

    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch. NotImplementedError unless a subclass gives them."""
        raise NotImplementedError(f"{type(self).__name__} has no _iterate: it should yield the batches of an epoch")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What becomes of a batch before it is handed out, in the consumer's thread."""
        return batch


class AsyncDataLoaderMixin:
    """Makes a BaseDataLoader fetch ahead: put it before the loader among the bases.

    async_loader_queue_size: batches that may be ready ahead of the consumer; 0 means no thread. debug_data_loader:
    print to stderr how long the consumer waited in each epoch. Other arguments go to the loader.

    An iteration starts a daemon thread, which ends with it: at the end of the epoch, when the consumer leaves the loop,
    in close_async_loader(). What _iterate raises is raised to the consumer, after the batches before it.
    Source: horovod.data.

    >>> class Numbers(BaseDataLoader):
    ...     def __init__(self, count):
    ...         self.count = count
    ...     def __len__(self):
    ...         return self.count
    ...     def _iterate(self):
    ...         yield from range(self.count)
    >>> class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    ...     pass
    >>> list(AsyncNumbers(count=3, async_loader_queue_size=2))
    [0, 1, 2]
    """

    def __init__(self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args, **kwargs):
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._prefetchers: list[_Prefetcher] = []  # of iterations that are going on
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Stops the threads and waits for them; an iteration that is going on ends. The loader can be used again."""
        for prefetcher in list(self._prefetchers):
            prefetcher.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        prefetcher = _Prefetcher(self._iterate, self.async_loader_queue_size)
        self._prefetchers.append(prefetcher)
        try:
            for batch in prefetcher.batches():
                yield self._process_batch(batch)
        finally:  # also when the consumer leaves the loop and drops the iterator
            self._prefetchers.remove(prefetcher)
            prefetcher.close()
            if self.debug_data_loader:
                print(f"{type(self).__name__}: waited {prefetcher.waited_s:.3f} s for {prefetcher.taken} batches, "
                      f"with up to {self.async_loader_queue_size} ahead", file=sys.stderr)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Prefetcher:
    """One iteration's thread, and the batches between it and the consumer."""

    def __init__(self, iterate: Callable[[], Iterator[Any]], size: int) -> None:
        self.waited_s = 0.0
        self.taken = 0
        self._iterate = iterate
        self._size = size
        self._changed = threading.Condition()  # guards the two below
        self._ready: "deque[Any]" = deque()
        self._closed = False
        self._given_up = False  # _iterate did not come back, and is not waited for again
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._fetch, name="lightcc data loader", daemon=True)
        self._thread.start()
        at_exit(_close_all)
        _running.difference_update([prefetcher for prefetcher in list(_running) if not prefetcher._thread.is_alive()])
        _running.add(self)

    def _fetch(self) -> None:
        last: Any = _END
        try:
            for batch in self._iterate():
                if not self._put(batch):
                    return
        except BaseException as error:  # SystemExit too: the consumer is to hear of it, whatever it is
            last = _Failure(error)
        self._put(last)

    def _put(self, batch: Any) -> bool:
        """Waits for room. False if the iteration is over; nobody takes the batch then."""
        with self._changed:
            while len(self._ready) >= self._size and not self._closed:
                self._changed.wait(_LOOK_S)
            if self._closed:
                return False
            self._ready.append(batch)
            self._changed.notify_all()
            return True

    def batches(self) -> Iterator[Any]:
        while True:
            batch = self._take()
            if batch is _END:
                return
            if isinstance(batch, _Failure):
                raise batch.error
            self.taken += 1
            yield batch

    def _take(self) -> Any:
        self._refuse_fork()
        began = time.monotonic()
        with self._changed:
            while not self._ready and not self._closed:
                self._changed.wait(_LOOK_S)
                if not (self._thread.is_alive() or self._ready or self._closed):
                    raise RuntimeError("the data loader's thread has ended before its time")
            self.waited_s += time.monotonic() - began
            if self._closed:
                return _END
            self._changed.notify_all()
            return self._ready.popleft()

    def _refuse_fork(self) -> None:
        """The lock of a forked process may be held by a thread that is not there."""
        if os.getpid() != self._process:
            raise RuntimeError("this iteration over a data loader began before the process was forked, and its thread "
                               "is in the parent: iterate anew")

    def close(self) -> None:
        """From any thread."""
        self.stop()
        self.wait(_CLOSE_S)

    def stop(self) -> None:
        """Tells the thread to end at its next batch, and does not wait for it."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def wait(self, wait_s: float) -> None:
        """For the thread's end, once: who has not come by then may take for ever."""
        if os.getpid() != self._process or self._given_up:
            return
        if threading.current_thread() is self._thread:  # it collected garbage, a forgotten iterator among it
            return
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._given_up = True
            _logger.warning("the data loader's _iterate has not come to its next batch; its thread will end when "
                            "it does")


_running: "set[_Prefetcher]" = set()  # those whose threads may not have ended


def _close_all() -> None:
    """At the end of the process, where an iteration may be going on: a script keeps its iterator in a variable."""
    deadline = time.monotonic() + _EXIT_S
    running = list(_running)
    for prefetcher in running:
        prefetcher.stop()
    for prefetcher in running:
        prefetcher.wait(max(0.0, deadline - time.monotonic()))

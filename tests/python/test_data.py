"""lightcc.data: loaders that fetch ahead in a thread, which comes to its end with the iteration."""
import gc
import itertools
import os
import re
import threading
import time

import pytest

from lightcc.data import AsyncDataLoaderMixin, BaseDataLoader
from lightcc.data import data_loader_base as base

DEADLINE_S = 200


class Numbers(BaseDataLoader):
    """Counts what it has fetched, and by which threads."""

    def __init__(self, count=5, fail_at=None, error=ValueError):
        self.count = count
        self.fail_at = fail_at
        self.error = error
        self.fetched = 0
        self.threads = set()
        self.process_threads = set()
        self.ended = threading.Event()  # the generator's clean-up has run

    def __len__(self):
        return self.count

    def _iterate(self):
        self.ended.clear()
        try:
            for number in range(self.count):
                if number == self.fail_at:
                    raise self.error(f"batch {number}")
                self.threads.add(threading.current_thread())
                self.fetched += 1
                yield number
        finally:
            self.ended.set()

    def _process_batch(self, batch):
        self.process_threads.add(threading.current_thread())
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_base_loader_gives_processed_batches():
    loader = Numbers()
    assert len(loader) == 5 and list(loader) == list(loader) == [0, 10, 20, 30, 40]
    assert loader.threads == {threading.current_thread()}


@pytest.mark.parametrize("call", [len, list])
def test_an_unfinished_loader_says_what_is_missing(call):
    class Unfinished(BaseDataLoader):
        pass
    with pytest.raises(NotImplementedError, match="Unfinished has no __(len|iter)|Unfinished has no _iterate"):
        call(Unfinished())


def test_defaults_are_horovods():
    loader = AsyncNumbers()
    assert (loader.async_loader_queue_size, loader.debug_data_loader) == (64, False)


@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_batches_and_order_do_not_depend_on_the_queue(size):
    loader = AsyncNumbers(size, count=40)
    for _ in range(3):
        assert list(loader) == list(range(0, 400, 10))
    assert len(loader) == 40 and loader.fetched == 120


def test_a_thread_fetches_and_the_consumer_processes():
    loader = AsyncNumbers()
    list(loader)
    assert threading.current_thread() not in loader.threads
    assert loader.process_threads == {threading.current_thread()}
    assert all(thread.daemon for thread in loader.threads)


def test_without_a_queue_there_is_no_thread():
    loader = AsyncNumbers(async_loader_queue_size=0)
    assert list(loader) == [0, 10, 20, 30, 40] and loader.threads == {threading.current_thread()}


def test_it_fetches_ahead_as_far_as_the_queue_goes():
    loader = AsyncNumbers(3, count=100)
    batches = iter(loader)
    assert next(batches) == 0
    wait_until(lambda: loader.fetched >= 5)  # one taken, three in the queue, one in the thread's hand
    time.sleep(0.1)
    assert loader.fetched == 5
    batches.close()


def test_two_iterations_at_once_are_apart():
    loader = AsyncNumbers(2)
    assert list(zip(loader, loader)) == [(n, n) for n in range(0, 50, 10)]


def test_an_epoch_begins_anew_after_one_that_was_left():
    loader = AsyncNumbers(2, count=50)
    assert list(itertools.islice(loader, 3)) == [0, 10, 20]
    gc.collect()
    assert loader.ended.wait(DEADLINE_S)
    assert list(loader) == list(range(0, 500, 10))


@pytest.mark.parametrize("size", [0, 1, 64])
@pytest.mark.parametrize("fail_at", [0, 3])
def test_what_the_thread_raises_reaches_the_consumer_after_the_batches_before(size, fail_at):
    loader = AsyncNumbers(size, fail_at=fail_at)
    seen = []
    with pytest.raises(ValueError, match=f"batch {fail_at}") as caught:
        for batch in loader:
            seen.append(batch)
    assert seen == list(range(0, fail_at * 10, 10))
    assert "_iterate" in [entry.name for entry in caught.traceback]  # where it happened


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_not_only_exceptions_do(error):
    with pytest.raises(error):
        list(AsyncNumbers(2, fail_at=1, error=error))


def test_exceptions_as_batches_are_batches():
    class Errors(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self):
            yield ValueError("a batch")
    (batch,) = Errors()
    assert isinstance(batch, ValueError)


def test_closing_stops_the_thread_and_ends_the_iteration():
    loader = AsyncNumbers(2, count=10**9)
    batches = iter(loader)
    assert next(batches) == 0
    (thread,) = loader.threads
    loader.close_async_loader()
    assert not thread.is_alive() and loader.ended.is_set()
    assert list(batches) == []
    assert next(iter(loader)) == 0  # it can be used again
    loader.close_async_loader()
    loader.close_async_loader()


def test_closing_a_loader_that_was_never_used():
    AsyncNumbers().close_async_loader()


def test_closing_frees_a_consumer_that_waits():
    go = threading.Event()

    class Slow(AsyncDataLoaderMixin, BaseDataLoader):
        def __len__(self):
            return 2

        def _iterate(self):
            yield 0
            go.wait(DEADLINE_S)
            yield 1

    loader, seen = Slow(1), []
    consumer = threading.Thread(target=lambda: seen.extend(loader))
    consumer.start()
    wait_until(lambda: loader._prefetchers and loader._prefetchers[0].taken == 1)
    threading.Timer(0.1, go.set).start()
    loader.close_async_loader()
    consumer.join(DEADLINE_S)
    assert not consumer.is_alive() and seen in ([0], [0, 1])


def test_close_does_not_wait_for_ever_for_a_loader_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr(base, "_CLOSE_S", 0.05)
    go = threading.Event()

    class Hangs(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self):
            yield 0
            go.wait(DEADLINE_S)
            yield from range(10)

    loader = Hangs(1)
    batches = iter(loader)
    next(batches)
    thread = loader._prefetchers[0]._thread
    loader.close_async_loader()
    assert thread.is_alive() and "its thread will end when it does" in caplog.text
    go.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and [*batches] == []


def test_closing_at_any_time_ends_both_sides():
    """Many times, with the thread and the consumer wherever they are."""
    for round in range(200):
        loader = AsyncNumbers(1 + round % 3, count=10**9)
        consumer = threading.Thread(target=lambda loader=loader: [None for _ in loader])
        consumer.start()
        wait_until(lambda loader=loader: loader._prefetchers)
        time.sleep(round % 7 * 1e-4)
        loader.close_async_loader()
        consumer.join(DEADLINE_S)
        assert not consumer.is_alive() and loader.ended.is_set()


def test_a_dropped_iterator_stops_its_thread():
    loader = AsyncNumbers(1, count=10**9)
    batches = iter(loader)
    next(batches)
    (thread,) = loader.threads
    del batches
    gc.collect()
    assert not thread.is_alive()


def test_a_fork_in_the_middle_of_an_epoch_is_said_in_the_child():
    loader = AsyncNumbers(1, count=100)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            list(batches)
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    batches.close()


def test_debugging_tells_how_long_the_consumer_waited(capsys):
    list(AsyncNumbers(2, True))
    assert re.search(r"AsyncNumbers: waited \d+\.", capsys.readouterr().err)


def test_it_goes_through_pickle():
    import pickle
    loader = pickle.loads(pickle.dumps(Plain(2)))
    assert list(loader) == [1, 2]


class Plain(AsyncDataLoaderMixin, BaseDataLoader):
    def __len__(self):
        return 2

    def _iterate(self):
        yield from (1, 2)

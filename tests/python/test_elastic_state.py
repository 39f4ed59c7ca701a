"""The elastic loop and its state, without a framework: what is committed, who hears of hosts, what is called when."""
import random
import sys
import threading
import types

import pytest

import lightcc.numpy as hvd
import ranks
from lightcc.core import elastic_notifications, elastic_state, lib, objects
from lightcc.core.elastic_notifications import WorkerNotificationManager
from lightcc.core.elastic_state import HorovodInternalError, HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State

DEADLINE_S = 30
removed, added, mixed = HostUpdateResult.removed, HostUpdateResult.added, HostUpdateResult.mixed


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def alone(value):
    """The broadcast of a world of one."""
    return value


class Recorded(State):
    """Writes down what is called."""

    def __init__(self, bcast=alone, rank=0):
        super().__init__(bcast, lambda: rank)
        self.calls = []
        for name in ("save", "restore", "sync", "reset"):
            setattr(self, name, lambda name=name: self.calls.append(name))


# State

@pytest.mark.parametrize("messages, skip", [
    ([(3, removed)], True), ([(3, added)], False), ([(3, mixed)], False), ([(3, removed), (4, removed)], True),
    ([(4, removed), (3, added)], False), ([(1, added), (3, removed)], True)])  # what is not newer than 2 is known
def test_all_that_is_news_counts(messages, skip):
    state = Recorded()
    state._last_updated_timestamp = 2
    for message in messages:
        state.on_hosts_updated(*message)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync is skip
    assert state._last_updated_timestamp == max(timestamp for timestamp, _ in messages)
    assert state._host_messages.empty()
    state.check_host_updates()


def test_what_is_no_news_is_forgotten():
    state = Recorded()
    state._last_updated_timestamp = 2
    state.on_hosts_updated(2, added)
    state.check_host_updates()
    assert state._host_messages.empty()


def test_ranks_but_the_first_learn_from_it_alone():
    told = []
    state = Recorded(lambda update: told.append(update) or (5, 7, int(removed)), rank=1)
    state.on_hosts_updated(9, added)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync is True and told == [(0, 0, 0)]
    assert state._last_updated_timestamp == 7, "it may be the first rank of the next world"


def test_commit_saves_before_it_is_interrupted():
    state = Recorded()
    state.commit()
    state.on_hosts_updated(1, added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert state.calls == ["save", "save"]


def test_a_reset_forgets_messages_and_calls_back_in_order():
    state = Recorded()
    state.register_reset_callbacks([lambda: state.calls.append("first")])
    state.register_reset_callbacks([lambda: state.calls.append("second"), lambda: state.calls.append("third")])
    state.on_hosts_updated(1, added)
    state.on_reset()
    assert state.calls == ["reset", "first", "second", "third"]
    state.check_host_updates()


@pytest.mark.parametrize("method", ["save", "restore", "sync"])
def test_a_state_is_abstract(method):
    state = State(alone, lambda: 0)
    assert state.reset() is None
    with pytest.raises(NotImplementedError):
        getattr(state, method)()


# ObjectState

def test_a_commit_shares_nothing_with_what_is_alive():
    state = ObjectState(alone, lambda: 0, epoch=1, seen=[1], nested={"a": [1]})
    state.seen.append(2)
    state.nested["a"].append(2)
    state.restore()
    assert (state.seen, state.nested) == ([1], {"a": [1]}), "also what it was made with is a commit"
    state.epoch, state.seen = 2, [1, 2]
    state.commit()
    for _ in range(2):  # a second time too, after what the first has restored was changed
        state.epoch = 3
        state.seen.append(3)
        state.restore()
        assert (state.epoch, state.seen) == (2, [1, 2])


def test_sync_makes_the_commit_of_rank_0_that_of_all():
    state = ObjectState(lambda saved: {**saved, "epoch": 7, "seen": [4]}, lambda: 1, epoch=1, seen=[], other=5)
    state.other = 6
    state.sync()
    assert (state.epoch, state.seen, state.other) == (7, [4], 5)
    state.seen.append(5)
    state.restore()
    assert (state.epoch, state.seen) == (7, [4])


# The loop

def rounds(state, *outcomes, resets=()):
    """What is called of the state, the function, whose calls end like this one after the other, and of reset."""
    outcomes, resets = list(outcomes), list(resets)

    def end(outcomes):
        outcome = outcomes.pop(0) if outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def func(given, *args, **kwargs):
        assert given is state and args == (1,) and kwargs == {"b": 2}
        state.calls.append("func")
        return end(outcomes)

    def reset():
        assert sys.exc_info()[1] is None, "the failed step is still kept alive"
        state.calls.append("shutdown+init")
        end(resets)

    return elastic_state.run_fn(func, reset)(state, 1, b=2)


AGAIN = ["shutdown+init", "reset"]


def test_the_loop_of_a_run_without_events():
    state = Recorded()
    assert rounds(state, "result") == "result"
    assert state.calls == ["sync", "func"]


def test_a_failure_restores_and_an_interrupt_keeps():
    state = Recorded()
    failure = HorovodInternalError("a peer died")
    assert rounds(state, failure, HostsUpdatedInterrupt(True), HostsUpdatedInterrupt(False), failure, 5) == 5
    assert state.calls == ["sync", "func", "restore", *AGAIN,
                           "sync", "func", "save", *AGAIN,
                           "func", "save", *AGAIN,  # without sync, as hosts have only gone
                           "sync", "func", "restore", *AGAIN,
                           "sync", "func"]


def test_a_failure_after_hosts_have_gone_syncs():
    state = Recorded()
    rounds(state, HostsUpdatedInterrupt(True), resets=[HorovodInternalError("another one")])
    assert state.calls == ["sync", "func", "save", "shutdown+init", "restore", *AGAIN, "sync", "func"]


def test_failures_in_sync_reset_and_callbacks_are_failures():
    state, left = Recorded(), [HorovodInternalError("in sync"), HorovodInternalError("in sync again")]
    state.sync = lambda: state.calls.append("sync") or raise_one(left)
    bad = [HorovodInternalError("in a callback")]
    state.register_reset_callbacks([lambda: raise_one(bad)])
    assert rounds(state, 5, resets=[HorovodInternalError("in init")]) == 5
    assert state.calls == ["sync", "restore", "shutdown+init", "restore", *AGAIN, "restore", *AGAIN,
                           "sync", "restore", *AGAIN, "sync", "func"]


def raise_one(errors):
    if errors:
        raise errors.pop(0)


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("where", ["func", "reset"])
def test_any_other_exception_ends_the_worker(where, error):
    state, manager = Recorded(), elastic_state.notification_manager
    outcomes = [error] if where == "func" else [HorovodInternalError("a peer died")]
    with pytest.raises(type(error)) as raised:
        rounds(state, *outcomes, resets=[error])
    assert raised.value is error
    assert state not in manager._listeners


def test_a_function_keeps_its_name_and_hears_of_hosts_while_it_runs():
    state, seen = Recorded(), []

    def train(state):
        """Trains."""
        elastic_state.notification_manager.handle_hosts_updated(len(seen) + 1, removed)
        seen.append(state._host_messages.qsize())
        if len(seen) < 3:
            state.commit()

    wrapped = elastic_state.run_fn(train, lambda: None)
    assert (wrapped.__name__, wrapped.__doc__) == ("train", "Trains.")
    wrapped(state)
    assert seen == [1, 1, 1]
    elastic_state.notification_manager.handle_hosts_updated(9, removed)
    assert state._host_messages.qsize() == 1, "the listener was not removed"


# How a worker hears of hosts

class Listener:
    def __init__(self):
        self.heard = []

    def on_hosts_updated(self, timestamp, update_res):
        self.heard.append((timestamp, update_res))


def test_results_add_up():
    assert [result.value for result in (HostUpdateResult.no_update, removed, added, mixed)] == [0, 1, 2, 3]
    assert removed | added == mixed and isinstance(mixed, int)


def test_listeners():
    manager, first, second = WorkerNotificationManager(), Listener(), Listener()
    manager.register_listener(first)
    manager.register_listener(second)
    manager.handle_hosts_updated(1, added)
    manager.remove_listener(first)
    manager.remove_listener(first)
    manager.handle_hosts_updated(2, removed)
    assert (first.heard, second.heard) == ([(1, added)], [(1, added), (2, removed)])


def test_a_listener_may_remove_itself():
    manager, listener = WorkerNotificationManager(), Listener()
    listener.on_hosts_updated = lambda *_: manager.remove_listener(listener)
    manager.register_listener(listener)
    thread = threading.Thread(target=manager.handle_hosts_updated, args=(1, added), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and manager._listeners == []


def test_many_threads():
    manager, seed = WorkerNotificationManager(), random.randrange(1 << 30)
    print(f"seed {seed}")
    kept, failures = Listener(), []
    manager.register_listener(kept)

    def work(number):
        try:
            for _ in range(200):
                listener = Listener()
                manager.register_listener(listener)
                manager.handle_hosts_updated(number, added)
                manager.remove_listener(listener)
                assert (number, added) in listener.heard
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failures == [] and len(kept.heard) == 800 and manager._listeners == [kept]


@pytest.mark.parametrize("available", [False, True])
def test_init_asks_the_driver_if_there_is_one(available, monkeypatch):
    subscribed = []
    worker = types.SimpleNamespace(available=lambda: available, subscribe=subscribed.append)
    monkeypatch.setattr(elastic_notifications, "elastic_worker", worker)
    manager, listener = WorkerNotificationManager(), Listener()
    manager.register_listener(listener)
    for _ in range(2):
        manager.init()
    assert len(subscribed) == available
    for callback in subscribed:
        callback(3, mixed)
    assert listener.heard == [(3, mixed)] * len(subscribed)


def disagreement():
    error = HorovodInternalError("ranks disagree")
    error.status = lib.MISMATCH
    return error


@pytest.mark.parametrize("commits, calls", [(False, 2), (True, 4)])
def test_a_disagreement_that_comes_back_without_a_commit_is_raised(commits, calls):
    """Which is a fault of the program; another failure may come as often as it likes."""
    state, called = Recorded(), []

    def train(state):
        called.append(1)
        if len(called) == 4:
            return "done"
        if commits:
            state.commit()
        raise disagreement() if commits or len(called) < 3 else HorovodInternalError("a peer died")

    run = elastic_state.run_fn(train, reset=lambda: None)
    if commits:
        assert run(state) == "done"
    else:
        with pytest.raises(HorovodInternalError, match="ranks disagree"):
            run(state)
    assert len(called) == calls


def test_names_are_horovods():
    assert elastic_state.HostUpdateResult is elastic_notifications.HostUpdateResult
    assert elastic_state.WorkerNotificationManager is elastic_notifications.WorkerNotificationManager
    assert isinstance(elastic_state.notification_manager, WorkerNotificationManager)


# On ranks

def by_pickle(value):
    return objects.broadcast_object(value, 0)


@pytest.mark.parametrize("bcast", [objects.broadcast_object, by_pickle], ids=["numbers", "pickle"])
def check_all_ranks_are_interrupted_together(job, bcast):
    state = ObjectState(bcast, hvd.rank, step=0)
    for step in range(6):
        if hvd.rank() == 0 and step in (2, 4):
            state.on_hosts_updated(1.5e9 + step, removed if step == 2 else added)
        try:
            state.commit()
            raised = None
        except HostsUpdatedInterrupt as interrupt:
            raised = interrupt.skip_sync
        assert raised is {2: True, 4: False}.get(step)
    assert state._last_updated_timestamp == 1.5e9 + 4


def check_the_state_is_sent_unless_all_can_do_without(job):
    """A rank to which the message came and one whose broadcast failed; and a rank that is new."""
    for skipping in range(hvd.size() + 1):
        state, calls = ObjectState(objects.broadcast_object, hvd.rank, mine=hvd.rank()), []

        def train(state, calls=calls, skipping=skipping):
            calls.append(state.mine)
            if len(calls) == 1:
                state.mine = 10 + hvd.rank()
                if hvd.rank() < skipping:
                    raise HostsUpdatedInterrupt(True)
                raise HorovodInternalError("the broadcast failed")

        elastic_state.run_fn(train, lambda: None)(state)
        kept = 10 + hvd.rank() if skipping == hvd.size() else 10 if skipping else 0
        assert calls == [0, kept]


def check_all_ranks_begin_as_rank_0(job):
    state = ObjectState(objects.broadcast_object, hvd.rank, values=[hvd.rank()])
    assert elastic_state.run_fn(lambda state: state.values, lambda: None)(state) == [0]

"""The elastic loop and what it keeps: a state that is committed, restored and made equal on all ranks. Of no framework.

A worker whose job loses members goes back to its last commit; one whose job shall change goes on from where it is. Both
then form a new world. What holds at each moment:
1. A commit is whole. save() only copies on this rank, and sync() changes the commit only once all has arrived, so a
   rank that becomes the root of the next sync has a state that it was in.
2. Rank 0 alone hears of hosts, and check_host_updates() tells all ranks, so that they stop behind the same batch.
3. Ranks may still leave a world for different reasons: a broadcast may reach one and fail on another. So they agree at
   the head of each round whether the state is sent, and it is unless all can do without.
"""
import contextlib
import copy
import functools
import logging
import queue
import struct
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Tuple

from lightcc.core import carried_sets, elastic_worker, lib, metrics, objects, ops
from lightcc.core.elastic_notifications import HostUpdateResult, WorkerNotificationManager
from lightcc.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State",
           "WorkerNotificationManager", "notification_manager", "run_fn"]

notification_manager = WorkerNotificationManager()

_logger = logging.getLogger("lightcc")
_Update = Tuple[float, float, int]  # the last timestamp that was acted on, the newest, and what has happened since
_UPDATE = struct.Struct("<ddq")


class State:
    """What an elastic job takes from one world to the next. Abstract: save, restore and sync are for subclasses.

    bcast_object: called as bcast_object(obj), returns rank 0's object on all ranks. get_rank: returns this rank.
    A subclass may define reset(), which is called in each new world before the callbacks.
    Source: horovod.common.elastic.

    >>> from lightcc.common.elastic import State
    >>> class Counter(State):
    ...     count = saved = 0
    ...     def save(self): self.saved = self.count
    ...     def restore(self): self.count = self.saved
    ...     def sync(self): self.count = self.saved = self._bcast_object(self.count)
    >>> state = Counter(hvd.broadcast_object, hvd.rank)
    >>> state.count = 1; state.commit(); state.count = 2; state.restore(); state.count
    1
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]):
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: "queue.Queue[Tuple[float, HostUpdateResult]]" = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: List[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions without arguments that are called in each new world, in this order: say, to scale a learning
        rate to its size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """There is a new world: forgets what was said of hosts before, calls reset() and the callbacks."""
        _drain(self._host_messages)
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Queues what the driver says of hosts until check_host_updates; any thread may call it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keeps the state as that to go back to, then check_host_updates(). All ranks call it, between two steps."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if rank 0 has heard of new or lost hosts. All ranks call it."""
        previous, latest, update = self._from_rank_0(self._heard())
        if latest > previous:
            self._last_updated_timestamp = latest  # on all ranks, as any may be rank 0 of the next world
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keeps a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes all ranks equal to rank 0; what they have then is also what they go back to."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called in each new world."""

    def _heard(self) -> _Update:
        """What rank 0 has heard since this was last asked."""
        previous = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        for timestamp, result in _drain(self._host_messages) if self._rank() == 0 else ():
            if timestamp > previous:
                latest = max(latest, timestamp)
                update |= result
        return previous, latest, int(update)

    def _from_rank_0(self, update: _Update) -> _Update:
        """Each commit sends this, so where it is lightcc that sends, three numbers do without a pickle."""
        if self._bcast_object is not objects.broadcast_object:
            return self._bcast_object(update)
        data = bytearray(_UPDATE.pack(*update))
        ops.broadcast_(data, 0, "elastic.host_updates")
        return _UPDATE.unpack(data)


class ObjectState(State):
    """A state of plain values: each keyword argument becomes an attribute, to be changed at will.

    save() keeps deep copies, and restore() sets attributes to copies of these; so the values must be such that
    copy.deepcopy and pickle take them. sync() makes rank 0's last save that of all ranks, and restores it; a value that
    was set since and is to count needs a commit() before. Other attributes are not looked at.
    bcast_object, get_rank: as for State. Source: horovod.common.elastic.

    >>> from lightcc.common.elastic import ObjectState
    >>> state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, losses=[])
    >>> state.epoch = 1; state.losses.append(0.5); state.commit()
    >>> state.losses.append(0.25); state.restore(); state.epoch, state.losses
    (1, [0.5])
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any):
        super().__init__(bcast_object, get_rank)
        self._saved_state: Dict[str, Any] = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keeps deep copies of the values."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Sets the attributes to copies of what was saved."""
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Makes what rank 0 has saved that of all ranks, and restores it."""
        self._saved_state = self._bcast_object(self._saved_state)
        ObjectState.restore(self)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wraps func(state, ...) so that it is called again, in a new world, when members were lost or hosts have changed.

    HorovodInternalError from func restores the state; HostsUpdatedInterrupt saves it as it is. Then come reset(), which
    leaves the old world and enters the new one, state.on_reset(), state.sync() and func again. sync() is left out if
    hosts have only gone and all ranks know it. Before the first call of func there is a sync(), too. An
    HorovodInternalError in reset or sync counts like one in func. If ranks disagree about a collective (another shape,
    say) twice without a commit in between, that is passed on; so is any other exception, and what func returns.
    Source: horovod.common.elastic.

    >>> from lightcc.common.elastic import HorovodInternalError, ObjectState, run_fn
    >>> failures = [HorovodInternalError("a peer died")]
    >>> def train(state):
    ...     state.step += 1
    ...     if failures: raise failures.pop()
    ...     return state.step
    >>> run_fn(train, reset=lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
    1
    """
    return run_translated(func, reset, contextlib.nullcontext)


def run_translated(func: Callable[..., Any], reset: Callable[[], None],
                   translated: Callable[[], ContextManager[None]]) -> Callable[..., Any]:
    """run_fn for a framework with errors of its own. translated: its context makes them HorovodInternalError.

    >>> run_translated(lambda state: state.step, lambda: None, contextlib.nullcontext)(
    ...     ObjectState(hvd.broadcast_object, hvd.rank, step=1))
    1
    """
    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        carried_sets.training()
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _rounds(state, lambda: func(state, *args, **kwargs), reset, translated)
        finally:
            notification_manager.remove_listener(state)
    return wrapper


def _rounds(state: State, func: Callable[[], Any], reset: Callable[[], None],
            translated: Callable[[], ContextManager[None]]) -> Any:
    """Calls func in one world after the other until it returns. Each reset waits for the other members, so that
    failures in a row do not spin."""
    new_world = skip_sync = False
    disagreed_at = -1  # how many commits there were when ranks last disagreed about a collective
    while True:
        try:
            with translated():
                if new_world:  # not in a handler below, where the traceback keeps what the step that failed has left
                    reset()
                    metrics.count_elastic_reset()
                    state.on_reset()
                new_world = True
                if not _all_skip(skip_sync):
                    state.sync()
                elastic_worker.synced()
                return func()
        except HorovodInternalError as error:
            if error.status == lib.MISMATCH:
                if disagreed_at == state._commits:  # the program's fault, which would come back for ever
                    raise
                disagreed_at = state._commits
            _logger.warning("elastic training goes back to the last commit: %s", error)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            _logger.info("elastic training goes on with other hosts")
            state.save()
            skip_sync = interrupt.skip_sync


def _all_skip(skip: bool) -> bool:
    """Whether all ranks say so. In a world that lightcc has not made, this rank alone is asked."""
    if not lib.initialized():
        return skip
    return all(ops.allgather(bytearray([skip]), "elastic.skip_sync"))


def _drain(messages: "queue.Queue[Any]") -> List[Any]:
    found = []
    while True:
        try:
            found.append(messages.get_nowait())
        except queue.Empty:
            return found

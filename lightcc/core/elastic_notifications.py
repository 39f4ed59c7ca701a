"""How a worker hears that hosts have come or gone. Any thread may call what is here.

The connection to the driver is in lightcc.core.elastic_worker.
"""
import enum
import threading
from typing import Any, List

from lightcc.core import elastic_worker


class HostUpdateResult(enum.IntFlag):
    """What has happened to the set of hosts; of several updates it is their `|`.

    >>> HostUpdateResult.removed | HostUpdateResult.added == HostUpdateResult.mixed
    True
    """

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class WorkerNotificationManager:
    """Passes on what the driver says of hosts to listeners: to their on_hosts_updated(timestamp, update_res).

    >>> class Listener:
    ...     def on_hosts_updated(self, timestamp, update_res): print(timestamp, update_res.name)
    >>> manager = WorkerNotificationManager(); manager.init(); manager.register_listener(Listener())
    >>> manager.handle_hosts_updated(7.5, HostUpdateResult.added)
    7.5 added
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: List[Any] = []
        self._connected = False

    def init(self) -> None:
        """Begins to hear of the driver; does nothing where there is none, and the second time."""
        with self._lock:
            if not self._connected and elastic_worker.available():
                elastic_worker.subscribe(
                    lambda timestamp, result: self.handle_hosts_updated(timestamp, HostUpdateResult(result)))
                self._connected = True

    def register_listener(self, listener: Any) -> None:
        """From now on the listener is told, once for each time that it was registered."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """Undoes one register_listener; nothing if there was none."""
        with self._lock:
            for index, known in enumerate(self._listeners):
                if known is listener:
                    del self._listeners[index]
                    return

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tells all listeners. timestamp: a number of the driver's that only grows."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:  # without the lock: a listener may remove itself
            listener.on_hosts_updated(timestamp, HostUpdateResult(update_res))

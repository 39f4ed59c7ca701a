"""Looks for hosts again and again, beside the driver's loop, which a slow script must not hold up."""
import os
import threading
from typing import Optional

from lightcc.runner.elastic.discovery import HostDiscovery
from lightcc.runner.hosts import Host

PERIOD_S = 1.0


class DiscoveryThread:
    """`fd` becomes readable when there is something to take. To be closed."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery
        self._stop = threading.Event()
        self._lock = threading.Lock()             # guards what follows, and the pipe's end
        self._hosts: Optional[list[Host]] = None  # that were found last, and not taken
        self._error = ""                          # of the last try
        self.fd, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lightcc-discovery", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Optional[list[Host]], str]:
        """The hosts that were found since the last call, None if they are the same or there was an error; and that."""
        os.read(self.fd, 4096)
        with self._lock:
            hosts, self._hosts = self._hosts, None
            error, self._error = self._error, ""
            return hosts, error

    def close(self) -> None:
        """Waits for nothing."""
        self._discovery.stop()
        with self._lock:
            self._stop.set()
            os.close(self.fd)
            os.close(self._wake)

    def _run(self) -> None:
        last: Optional[list[Host]] = None
        while not self._stop.is_set():
            error = ""
            try:
                hosts = [Host(*item) for item in self._discovery.find_available_hosts_and_slots().items()]
            except Exception as raised:
                hosts, error = last, str(raised) or type(raised).__name__
            with self._lock:
                if self._stop.is_set():
                    return
                if hosts != last or error:
                    os.write(self._wake, b"!")
                if hosts != last:
                    self._hosts = last = hosts
                self._error = error
            self._stop.wait(PERIOD_S)

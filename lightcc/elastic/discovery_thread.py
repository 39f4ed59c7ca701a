"""Looks for hosts again and again, and which of them are this one, beside the driver's loop, which neither a slow
script nor a slow answer of the name service must hold up."""
import os
import threading
import time
from typing import Callable, Optional

from lightcc.launch.discovery import HostDiscovery
from lightcc.launch.hosts import Host

PERIOD_S = 1.0
RESOLVE_S = 10.0  # for the answer whether a host is this one; then it is taken for another


class DiscoveryThread:
    """`fd` becomes readable when there is something to take. To be closed.

    is_here: whether a host is this one. Each new name is asked for in a thread of its own, and the host counts as found
    once that is known, so that one whose name is slow holds up no other. At first all are waited for, since the order
    of hosts is that in which they are found."""

    def __init__(self, discovery: HostDiscovery, is_here: Callable[[str], bool] = lambda name: False) -> None:
        self._discovery = discovery
        self._resolve = is_here
        self._changed = threading.Condition()       # guards what follows, and the pipe's end
        self._stopped = False
        self._here: dict[str, Optional[bool]] = {}  # None: not known yet
        self._ask_until: dict[str, float] = {}
        self._found: Optional[list[Host]] = None    # by the last look that found some
        self._told: Optional[list[Host]] = None     # those of them whose names were known
        self._hosts: Optional[list[Host]] = None    # the same, until they are taken
        self._error = ""                            # of the last look
        self.fd, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lightcc-discovery", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Optional[list[Host]], str]:
        """The hosts that were found since the last call, None if they are the same or there was an error; and that."""
        os.read(self.fd, 4096)
        with self._changed:
            hosts, self._hosts = self._hosts, None
            error, self._error = self._error, ""
            return hosts, error

    def is_here(self, name: str) -> bool:
        """Whether a host that was taken is this one."""
        return bool(self._here[name])

    def close(self) -> None:
        """Waits for nothing."""
        self._discovery.stop()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            os.close(self.fd)
            os.close(self._wake)

    def _run(self) -> None:
        while not self._stopped:
            error = ""
            try:
                found = [Host(*item) for item in self._discovery.find_available_hosts_and_slots().items()]
                for host in found:
                    self._ask(host.name)
                self._found = found
            except Exception as raised:
                error = str(raised) or type(raised).__name__
            self._tell(error, time.monotonic() + PERIOD_S)

    def _tell(self, error: str, until: float) -> None:
        """What is known, and what comes to be known until then."""
        with self._changed:
            if self._stopped:
                return
            self._error = error
            if error:
                os.write(self._wake, b"!")
            while not self._stopped and (now := time.monotonic()) < until:
                hosts = self._known(now)
                if hosts != self._told:
                    self._hosts = self._told = hosts
                    os.write(self._wake, b"!")
                pending = [self._ask_until[name] for name, here in self._here.items() if here is None]
                self._changed.wait(min([until, *pending]) - now)

    def _known(self, now: float) -> Optional[list[Host]]:
        for name, here in self._here.items():
            if here is None and now >= self._ask_until[name]:
                self._here[name] = False
        known = [host for host in self._found or () if self._here[host.name] is not None]
        return known if self._found is not None and (self._told is not None or known == self._found) else None

    def _ask(self, name: str) -> None:
        if name in self._here:
            return

        def answer() -> None:
            here = False
            try:
                here = self._resolve(name)
            finally:
                with self._changed:
                    if self._here[name] is None:
                        self._here[name] = here
                        self._changed.notify_all()

        with self._changed:
            self._here[name], self._ask_until[name] = None, time.monotonic() + RESOLVE_S
        threading.Thread(target=answer, name=f"lightcc-resolve-{name}", daemon=True).start()

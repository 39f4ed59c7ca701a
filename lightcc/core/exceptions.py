"""Exception types, by Horovod's names; lightcc.common.exceptions is where its programs import them from."""
from typing import Any, Tuple


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, a rank was lost, the job was shut down or a stall was ended.

    The text names the first cause, with rank and host. After a disagreement the next operation works; otherwise call
    shutdown() and init() again, or exit.
    """

    status = 0  # the core's code (lightcc.h), where it was the core that failed


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; `skip_sync` says whether the state need not be broadcast again."""

    def __init__(self, skip_sync: bool):
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of HorovodVersionMismatchError.

    >>> get_version_mismatch_message("torch", "2.1", "2.0")
    'lightcc expects torch 2.1, but 2.0 is installed.'
    """
    return f"lightcc expects {name} {version}, but {installed_version} is installed."


class HorovodVersionMismatchError(ImportError):
    """An installed framework is of a version that lightcc cannot work with."""

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.name, self.version, self.installed_version)

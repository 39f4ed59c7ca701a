"""How many cores this host has for us, and so how many threads each of its ranks shall compute with. The same rules as
in csrc/base/cores.cc, since the launcher does not load the library.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Optional

VARIABLE = "OMP_NUM_THREADS"


def threads_each(environment: Mapping[str, str], cores: int, ranks: int) -> Optional[int]:
    """None if the user has said it. Else each rank would start as many threads as the host has cores."""
    return None if environment.get(VARIABLE) else max(1, cores // ranks)


def usable_cores(root: str = "/") -> int:
    """Those that we may run on, at least one and not more than our control group, of version 2 or 1, has a quota for.
    A part of a core counts as one."""
    bound = len(os.sched_getaffinity(0))
    quotas = [quota for quota in _quotas(root) if quota > 0]
    return max(1, min(bound, math.ceil(min(quotas)))) if quotas else bound


def _quotas(root: str) -> Iterator[float]:
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():  # "0::/path" (v2), "4:cpu,cpuacct:/path"
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _upwards(mount, path):
                yield _ratio(_text(os.path.join(folder, "cpu.max")).split())  # "150000 100000", or "max 100000"
        elif "cpu" in controllers.split(","):
            for folder in _upwards(os.path.join(mount, controllers), path):
                yield _ratio([_text(os.path.join(folder, f"cpu.cfs_{name}_us")) for name in ("quota", "period")])


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The group and all groups around it. Inside a container the path may be the host's and not exist here; walking up
    ends at the mount, which is then the container's own group."""
    parts = [] if ".." in path else path.strip("/").split("/")
    for count in range(len(parts), -1, -1):
        yield os.path.join(mount, *parts[:count])


def _ratio(words: list[str]) -> float:
    """0 is none. Kernels and containers differ in what they show."""
    try:
        quota, period = map(float, words)
        return quota / period
    except (ValueError, ZeroDivisionError):
        return 0.0


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""

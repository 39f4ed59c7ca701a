"""The two exceptions by which an elastic job begins again, under the name where scripts look for them.

The rest of horovod.common.elastic (State, ObjectState, run_fn) is not in this version.
"""
from lightcc.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

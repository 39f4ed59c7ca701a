"""Horovod's module of this name."""
from lightcc.core.elastic_state import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    WorkerNotificationManager,
    notification_manager,
    run_fn,
)

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State",
           "WorkerNotificationManager", "notification_manager", "run_fn"]

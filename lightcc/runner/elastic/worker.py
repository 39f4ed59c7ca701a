"""Horovod's module of this name."""
from lightcc.core.elastic_notifications import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]

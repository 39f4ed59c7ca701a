"""Horovod's module of this name."""
from lightcc.launch.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]

"""Horovod's module of this name."""
from lightcc.common import util
from lightcc.core.basics import MPI, HorovodBasics
from lightcc.core.process_sets import ProcessSet, global_process_set

__all__ = ["MPI", "HorovodBasics", "ProcessSet", "global_process_set", "util"]

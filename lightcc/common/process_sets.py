"""Horovod's module of this name."""
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lightcc.core.util import is_iterable

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "is_iterable", "remove_process_set"]

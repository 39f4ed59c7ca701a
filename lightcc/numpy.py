"""lightcc for numpy arrays: `import lightcc.numpy as hvd`.

The functions are those of lightcc.core.ops, and their examples run here as they stand.
"""
import numpy  # noqa: F401  so that a missing numpy is named here

from lightcc.core import lib
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.job import *  # noqa: F401,F403
from lightcc.core.job import Adasum, HorovodBasics, Max, Min, Product, is_homogeneous, shutdown  # noqa: F401
from lightcc.core.job import __all__ as _job
from lightcc.core.job import basics as _basics
from lightcc.core.objects import allgather_object, broadcast_object
from lightcc.core.ops import *  # noqa: F401,F403
from lightcc.core.ops import __all__ as _verbs
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

init = _basics.init
lib.name_package("lightcc.numpy")

__all__ = _verbs + _job + [
    "Adasum", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "add_process_set", "allgather_object",
    "broadcast_object", "global_process_set", "init", "is_homogeneous", "remove_process_set", "shutdown",
]

"""lightcc for numpy arrays: `import lightcc.numpy as hvd`.

The functions are those of lightcc.core.ops, and their examples run here as they stand.
"""
import numpy  # noqa: F401  so that a missing numpy is named here

from lightcc.core import job as _job
from lightcc.core import lib
from lightcc.core import ops as _ops
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.job import *  # noqa: F401,F403
from lightcc.core.job import Adasum, HorovodBasics, Max, Min, Product, is_homogeneous, shutdown  # noqa: F401
from lightcc.core.job import basics as _basics
from lightcc.core.objects import allgather_object, broadcast_object
from lightcc.core.ops import *  # noqa: F401,F403
from lightcc.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

init = _basics.init
lib.name_package("lightcc.numpy")

__all__ = [
    "Adasum", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "add_process_set", "allgather_object",
    "broadcast_object", "global_process_set", "init", "is_homogeneous", "remove_process_set", "shutdown",
]
__all__ += _job.__all__
__all__ += _ops.__all__

"""The checks that run on a double of CUDA everywhere else (tests/python/test_gpu_*.py), with tensors of a real GPU:
collectives, streams, errors, ranks that disagree and ranks that join. Every rank runs it:

    python -m lightcc.runner -np 2 python -m pytest -o python_functions='check_*' tests/gpu/check_collectives.py
"""
import os

import test_gpu_arrays
import test_gpu_collectives
import test_gpu_errors
import test_gpu_streams
from test_join import backwards  # noqa: F401  a fixture

ALONE = int(os.environ["HOROVOD_SIZE"]) == 1
LEFT_OUT = {
    # These are about arrays that only the double has.
    "check_an_array_whose_library_makes_none", "check_what_is_refused", "check_a_device_that_is_not_there",
    "check_prepared_requests",
    # These take a second GPU.
    "check_streams_of_a_gpu_are_of_that_gpu", "check_a_list_on_different_devices_is_this_ranks_error",
}
MODULES = [test_gpu_collectives, test_gpu_streams, test_gpu_arrays]
if ALONE:
    LEFT_OUT.add("check_process_sets")  # there is none but the global one
else:
    MODULES.append(test_gpu_errors)     # of ranks that disagree

for _module in MODULES:
    for _name, _check in vars(_module).items():
        if _name.startswith("check_") and _name not in LEFT_OUT:
            globals()[f"{_name}__{_module.__name__}"] = _check  # two modules have a check_process_sets

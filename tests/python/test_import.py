"""What an import may cost: no thread, no module that only some calls need, and little time (bench/import_time.py)."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightcc

DEADLINE_S = 400

REPORT = """
import os, sys
{before}
modules, threads, variables = set(sys.modules), set(os.listdir("/proc/self/task")), dict(os.environ)
children = open("/proc/self/task/%d/children" % os.getpid()).read()
import {timed}
assert set(os.listdir("/proc/self/task")) == threads, "a thread was started"
assert open("/proc/self/task/%d/children" % os.getpid()).read() == children == "", "a process was started"
assert dict(os.environ) == variables, "the environment was changed"
print(*sorted(set(sys.modules) - modules))
"""


def loaded(timed, before=""):
    """The modules that an import loads in a fresh process, which may start no thread by it."""
    done = subprocess.run([sys.executable, "-c", REPORT.format(timed=timed, before=before)], capture_output=True,
                          text=True, timeout=DEADLINE_S, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_lightcc_alone_loads_two_files():
    assert loaded("lightcc") == ["lightcc", "lightcc._version"]


def test_lightcc_alone_says_which_module_has_horovods_functions():
    with pytest.raises(AttributeError, match=r"has no attribute 'init': .* import lightcc\.torch as hvd"):
        lightcc.init()
    with pytest.raises(AttributeError, match=r"has no attribute '__wrapped__'$"):  # of one who looks around
        getattr(lightcc, "__wrapped__")  # noqa: B009


def test_lightcc_torch_loads_little_beside_torch():
    others = [name for name in loaded("lightcc.torch", "import torch") if name.partition(".")[0] != "lightcc"]
    assert set(others) <= {"_hashlib", "_hmac", "hmac", "secrets", "sysconfig"}


@pytest.mark.parametrize("package, framework", [
    ("lightcc.torch", "torch"), ("lightcc.torch.elastic", "torch"), ("lightcc.numpy", "numpy"),
    ("lightcc.data", "sys"), ("lightcc.common.util", "sys"),
    ("lightcc.as_horovod", "sys")])
def test_what_only_some_calls_need_is_not_loaded(package, framework):
    found = loaded(package, f"import {framework}")
    assert package in found
    assert set(found).isdisjoint({"cloudpickle", "mpi4py", "psutil", "tensorflow", "torch", "yaml",
                                  "lightcc.runner.api"})
    assert ("lightcc.core.elastic_state" in found) == (package == "lightcc.torch.elastic")


def test_import_starts_nothing_even_in_a_rank():
    """Joining the job is init's business."""
    code = "import lightcc.torch as hvd, sys; sys.exit(hvd.is_initialized())"
    rank = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "LIGHTCC_JOB_ID": "alone"}
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, env={**os.environ, **rank}).returncode == 0


def test_init_of_a_world_of_one_is_where_threads_begin():
    """So that the count above would see one."""
    code = ("import os, lightcc.numpy as hvd; before = len(os.listdir('/proc/self/task')); hvd.init()\n"
            "assert len(os.listdir('/proc/self/task')) > before")
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode == 0


def test_the_source_folder_is_not_the_package():
    done = subprocess.run([sys.executable, "-c", "import lightcc.numpy"], cwd=Path(__file__).resolve().parents[2],
                          capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "ImportError: you are in lightcc's source folder: " in done.stderr and "Run from elsewhere" in done.stderr


@pytest.mark.slow
def test_the_bench_runs_and_prints_the_ratio():
    bench = Path(__file__).resolve().parents[2] / "bench" / "import_time.py"
    done = subprocess.run([sys.executable, str(bench), "--repeats", "1"], capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    share = re.search(r"import torch, lightcc.torch takes (\d\.\d+) of the time of import torch", done.stdout)
    assert share and float(share[1]) > 1
    assert len(re.findall(r"goal < \d+ ms: (ok|MISSED)", done.stdout)) == 3

"""What mypy says of programs that use the package, as an editor says it while they are written."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="missing: mypy")
EXAMPLES = Path(__file__).parents[2] / "examples"
OTHERS = ("cloudpickle", "keras", "matplotlib", "numpy", "psutil", "sklearn", "tensorflow", "torch", "torchvision",
          "tqdm", "yaml")
DEADLINE_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where mypy runs, and keeps what it knows of the package."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(f"""[mypy]
ignore_missing_imports = True
check_untyped_defs = True
implicit_reexport = False
[mypy-lightcc.*]
follow_imports = silent
[mypy-{",".join(f"{package}.*" for package in OTHERS)}]
follow_imports = skip
follow_imports_for_stubs = True
""")
    return folder


def said_of(folder, *files):
    """mypy's lines about these files. Of other packages than this one nothing is known."""
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_types_of_results_and_faults_in_calls_are_told(folder):
    (folder / "program.py").write_text("""
import lightcc.numpy as hvd
import lightcc.torch as torch_hvd

hvd.init()
reveal_type(hvd.size())
reveal_type(torch_hvd.local_rank())
reveal_type(hvd.allgather("of any type"))
reveal_type(hvd.grouped_allreduce([1.5], op=hvd.Sum))
hvd.allreduce(1.5, name=3)
hvd.broadcast(1.5)
""")
    said = [line.split(": ", 1) for line in said_of(folder, "program.py")[:-1]]
    assert [place for place, _ in said] == [f"program.py:{line}" for line in (6, 7, 8, 9, 10, 11)]
    assert [text.split('"')[1] for _, text in said] == [
        "builtins.int", "builtins.int", "builtins.str", "builtins.list[builtins.float]", "name", "root_rank"]


def test_nothing_is_said_of_the_examples(folder):
    files = sorted(EXAMPLES.glob("*.py"))
    assert said_of(folder, *files) == [f"Success: no issues found in {len(files)} source files"]

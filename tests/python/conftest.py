"""The job, and each framework with each of its dtypes, for checks on ranks (see ranks.py); which files want a framework
that is not there. LIGHTCC_TEST_SIZES ("0,2,3") says on how many ranks checks run, 0 standing for the tests that do not
run checks on ranks; else all."""
import ast
import importlib.util
import os
from pathlib import Path

import pytest
from cases import FLOATS, FRAMEWORKS, INTEGERS, Case

import ranks

NEEDS = {"torch": "torch", "training": "torch", "tensorflow": "tensorflow", "keras": "keras",
         "kerases": "keras"}  # import: framework


def _missing(path):
    """The frameworks that a file imports as it is imported itself and that are not there."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.split(".")[0] for node in imports
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    return sorted({NEEDS[name] for name in names if name in NEEDS and not importlib.util.find_spec(NEEDS[name])})


FILES = sorted(Path(__file__).parent.glob("test_*.py"))
LEFT_OUT = {path: missing for path in FILES if (missing := _missing(path))}


class _LeftOut(pytest.Module):
    def collect(self):
        return []


def pytest_pycollect_makemodule(module_path, parent):
    """collect_ignore would not hold for files that are named in pytest's arguments."""
    return _LeftOut.from_parent(parent, path=module_path) if module_path in LEFT_OUT else None


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"frameworks: {', '.join(FRAMEWORKS)}")
    for missing in sorted({", ".join(missing) for missing in LEFT_OUT.values()}):
        files = [path.name for path, of in LEFT_OUT.items() if ", ".join(of) == missing]
        terminalreporter.write_line(f"not collected, as there is no {missing} here: {', '.join(files)}")


def pytest_collection_modifyitems(config, items):
    sizes = os.environ.get("LIGHTCC_TEST_SIZES", "0,1,2,3,4").split(",")
    left_out = [item for item in items if str(_ranks_of(item)) not in sizes]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.originalname == "test_on_ranks":
            ranks.share(str(item.path), _ranks_of(item))
        elif item.originalname == "test_with_tf_keras":
            ranks.share(str(item.path), 2, TF_USE_LEGACY_KERAS="1")


def _ranks_of(item):
    """On how many ranks a test starts its file's checks."""
    if item.originalname == "test_with_tf_keras":
        return 2
    return item.callspec.params["np"] if item.originalname in ("test_on_ranks", "test_on_fresh_ranks") else 0


@pytest.fixture(scope="module")
def job():
    """The world, entered and left by each file as by a script."""
    import lightcc.numpy as hvd
    hvd.init()
    yield hvd
    hvd.shutdown()


@pytest.fixture(params=FRAMEWORKS)
def framework(request, job):
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=[name for name, framework in FRAMEWORKS.items() if framework.has_handles])
def handled(request, job):
    """A framework that has handles, and operations in place."""
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=[name for name, framework in FRAMEWORKS.items() if hasattr(framework, "gradients")])
def differentiable(request, job):
    """A framework in which collectives have gradients."""
    return FRAMEWORKS[request.param]()


def _cases(dtypes):
    pairs = [(name, dtype) for name, framework in FRAMEWORKS.items() for dtype in framework.dtypes if dtype in dtypes]
    return {"params": pairs, "ids": ["-".join(pair) for pair in pairs]}


@pytest.fixture(**_cases(INTEGERS + FLOATS + ("bool",)))
def case(request, job):
    """Each framework with each of its dtypes."""
    return Case(FRAMEWORKS[request.param[0]](), request.param[1])


@pytest.fixture(**_cases(INTEGERS + FLOATS))
def number(request, job):
    """The same without bool, which has no average and no factors."""
    return Case(FRAMEWORKS[request.param[0]](), request.param[1])


@pytest.fixture
def boolean(framework):
    return Case(framework, "bool")


@pytest.fixture(scope="module")
def kit(job):
    """The Keras of this process."""
    from kerases import Kit
    return Kit()


@pytest.fixture(params=["new", "legacy"])
def family(request, kit):
    """The modules that Keras has optimizers in."""
    if request.param == "legacy" and kit.is_3:
        pytest.skip("Keras 3 has no legacy optimizers")
    return kit.families[request.param == "legacy"]

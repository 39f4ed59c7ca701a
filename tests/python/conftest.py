"""The job, and each framework with each of its dtypes, for checks on ranks (see ranks.py); which files want a framework
that is not there. LIGHTCC_TEST_SIZES ("0,2,3") says on how many ranks checks run, 0 standing for the tests that do not
run checks on ranks; else all."""
import ast
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from cases import FLOATS, FRAMEWORKS, INTEGERS, Case

import ranks

NEEDS = {"torch": "torch", "training": "torch", "tensorflow": "tensorflow", "keras": "keras",
         "kerases": "keras"}  # import: framework


def _needed(tree):
    """The frameworks that a file imports as it is imported itself."""
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.split(".")[0] for node in imports
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    return {NEEDS[name] for name in names if name in NEEDS}


def _marks(tree):
    """Those of all tests of a file."""
    assigned = [node.value for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    return {node.attr for value in assigned for node in ast.walk(value)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"}


FILES = {path: ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("test_*.py"))}
NEEDED = {path: _needed(tree) for path, tree in FILES.items()}
MARKS = {path: _marks(tree) | ({"tensorflow"} if NEEDED[path] & {"tensorflow", "keras"} else set())
         for path, tree in FILES.items()}
LEFT_OUT = {path: missing for path, needed in NEEDED.items()
            if (missing := sorted(name for name in needed if not importlib.util.find_spec(name)))}
# Tests that share ranks with those of other files, if one process of pytest's runs them; what these ranks have in their
# environment.
SHARING = {"test_on_ranks": {}, "test_with_tf_keras": {"TF_USE_LEGACY_KERAS": "1"}}
OF_FILES = {"tensorflow", "newest_tensorflow", "sizes", "torch_sizes"}  # marks that only whole files have


def _is_chosen(path, expression):
    """Whether -m may choose a test of the file: so that the other files need not be imported. A mark of single tests
    may be there or not."""
    names = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    marks = ({name: name in MARKS[path] if name in OF_FILES else marked for name in names} for marked in (False, True))
    return not names or any(eval(expression, one) for one in marks)


class _LeftOut(pytest.Module):
    def collect(self):
        return []


def pytest_pycollect_makemodule(module_path, parent):
    """collect_ignore would not hold for files that are named in pytest's arguments."""
    if module_path in LEFT_OUT or module_path in FILES and not _is_chosen(module_path, parent.config.option.markexpr):
        return _LeftOut.from_parent(parent, path=module_path)
    return None


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"frameworks: {', '.join(FRAMEWORKS)}")
    for missing in sorted({", ".join(missing) for missing in LEFT_OUT.values()}):
        files = [path.name for path, of in LEFT_OUT.items() if ", ".join(of) == missing]
        terminalreporter.write_line(f"not collected, as there is no {missing} here: {', '.join(files)}")


def pytest_itemcollected(item):
    if "tensorflow" in MARKS.get(item.path, ()):
        item.add_marker("tensorflow")
    if item.originalname.endswith("with_tf_keras"):  # as Keras 3 here, and as Keras 2 of older TensorFlow
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # -m has left out what it leaves out
def pytest_collection_modifyitems(config, items):
    sizes = os.environ.get("LIGHTCC_TEST_SIZES", "0,1,2,3,4").split(",")
    left_out = [item for item in items if str(_ranks_of(item)) not in sizes]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.originalname in SHARING:
            ranks.share(str(item.path), _ranks_of(item), **SHARING[item.originalname])


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


@pytest.fixture
def folder(job):
    """One that all ranks see."""
    path = job.broadcast_object(tempfile.mkdtemp() if job.rank() == 0 else None)
    yield path
    job.barrier()
    if job.rank() == 0:
        shutil.rmtree(path)


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


@pytest.fixture
def keras(kit):
    return kit.keras


@pytest.fixture
def E(kit):
    return kit.embedding


@pytest.fixture(params=["new", "legacy"])
def family(request, kit):
    """The modules that Keras has optimizers in."""
    if request.param == "legacy" and kit.is_3:
        pytest.skip("Keras 3 has no legacy optimizers")
    return kit.families[request.param == "legacy"]

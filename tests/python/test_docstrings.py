"""Every example in lightcc's docstrings is run, on a world of one rank and of two; those of modules for a framework
where that framework is.

An example may use what a reader takes as given: np, the framework that its module is for, what its own module defines,
and hvd, which is lightcc's package for that framework, else lightcc.numpy. It finds a job that is initialised.
"""
import ast
import doctest
import importlib
import importlib.util
import inspect
import os
from pathlib import Path

import numpy as np
import pytest

import lightcc
import ranks
from lightcc.core import request

pytestmark = pytest.mark.tensorflow

PACKAGES = {  # of the first that a module's name begins with: the framework that it needs, that in examples, their hvd
    "lightcc.torch.lightning": ("lightning", "lightning", "lightcc.torch"),
    "lightcc.torch": ("torch", "torch", "lightcc.torch"),
    "lightcc._torch_backend": ("torch", "torch", "lightcc.torch"),
    "lightcc.tensorflow.keras": ("tensorflow", "tf", "lightcc.tensorflow.keras"),
    "lightcc.tensorflow": ("tensorflow", "tf", "lightcc.tensorflow"),
    "lightcc._keras.gradient_reducer_tensorflow": ("tensorflow", "tf", "lightcc.keras"),
    "lightcc._keras.gradient_reducer_torch": ("torch", "torch", "lightcc.keras"),
    "lightcc._keras.embedding": ("tensorflow", "tf", "lightcc.keras"),
    "lightcc.keras.embedding": ("tensorflow", "tf", "lightcc.keras"),
    "lightcc._keras": ("keras", "keras", "lightcc.keras"),
    "lightcc.keras": ("keras", "keras", "lightcc.keras"),
    "lightcc.jax": ("jax", "jax", "lightcc.jax"),
    "lightcc.ray": ("ray", "ray", "lightcc.numpy"),
    "lightcc.spark": ("pyspark", "pyspark", "lightcc.numpy"),
    "lightcc": ("numpy", "np", "lightcc.numpy"),
}
LAUNCHES = ("lightcc.runner",)  # modules whose examples start jobs of their own
if importlib.util.find_spec("keras"):
    importlib.import_module("kerases")  # without TensorFlow, Keras runs on torch


def package_of(module):
    return PACKAGES[next(package for package in PACKAGES if f"{module}.".startswith(f"{package}."))]


def modules():
    """Those whose framework is here, and their files."""
    for path in sorted(Path(lightcc.__path__[0]).rglob("*.py")):
        parts = ["lightcc", *path.relative_to(lightcc.__path__[0]).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        importable = parts[-1] != "__main__" and not {"horovod_path", "jax_path"} & {*parts}
        if importable and importlib.util.find_spec(package_of(name)[0]):
            yield name, path


MODULES = dict(modules())


@pytest.mark.parametrize("np", (1, 2))
def test_on_fresh_ranks(np, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    ranks.run_checks(__file__, np)


made_classes = set()


def examples(module_name):
    """The docstrings of a module, each as a doctest; and those of classes that functions make for it, as for a Keras,
    unless another module has them too."""
    module = importlib.import_module(module_name)
    framework, alias, hvd = package_of(module_name)
    given = {"hvd": importlib.import_module(hvd), "np": np, "os": os, alias: importlib.import_module(framework),
             **vars(module)}
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(module, globs=given)
    for name, value in vars(module).items():
        if inspect.isclass(value) and "<locals>" in value.__qualname__ and value.__module__.startswith("lightcc."):
            if (value.__module__, value.__qualname__) not in made_classes:
                found += finder.find(value, f"{module_name}.{name}", module=False, globs=given)
            made_classes.add((value.__module__, value.__qualname__))
    return found


def run(example):
    report = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not report, "".join(report)


EXAMPLES = [example for name in MODULES for example in examples(name) if example.examples]


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.name.startswith(LAUNCHES)], ids=lambda e: e.name)
def check_example(example, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may write
    job.init()  # the one before may have shut it down
    monkeypatch.setattr(request, "before_join", [])  # tables of examples before it live on, and forbid join()
    run(example)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name.startswith(LAUNCHES)], ids=lambda e: e.name)
def test_example_that_starts_a_job(example):
    run(example)


def test_examples_leave_no_files_behind():
    """They write into the folder that they are run in, which is a test's."""
    assert [one.source for example in EXAMPLES for one in example.examples
            if "/tmp/" in one.source or "mkdtemp" in one.source] == []


def test_no_example_is_left_out():
    """As many as the sources have: what DocTestFinder does not find, a property or a nested function, must be named."""
    written = 0
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                written += (ast.get_docstring(node) or "").count(">>> ")
    assert sum(len(example.examples) for example in EXAMPLES) == written


@pytest.mark.parametrize("module", [module for module in MODULES if module in {hvd for _, _, hvd in PACKAGES.values()}])
def test_every_public_function_has_an_example(module):
    """Of what users take from the packages; what a function made is described where that is."""
    package = importlib.import_module(module)
    values = {name: getattr(package, name) for name in package.__all__}
    without = [name for name, value in values.items() if inspect.isroutine(value) and value.__name__ == name
               and ">>> " not in (inspect.getdoc(value) or "")]
    assert without == []

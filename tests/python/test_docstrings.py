"""Every example in lightcc's docstrings is run, on a world of one rank and of two.

An example may use what a reader takes as given: np, torch, what its own module defines, and hvd, which is lightcc.torch
for examples of torch tensors and lightcc.numpy for the others. It finds a job that is initialised.
"""
import ast
import doctest
import importlib
import inspect
import os
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch

import lightcc.numpy
import lightcc.torch
import ranks

MODULES = sorted(module.name for module in pkgutil.walk_packages(lightcc.__path__, "lightcc.")
                 if not module.name.endswith(("__main__", "._lightcc")))
LAUNCHES = ("lightcc.runner",)  # modules whose examples start jobs of their own


@pytest.mark.parametrize("np", (1, 2))
def test_on_fresh_ranks(np, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    ranks.run_checks(__file__, np)


def examples(module_name):
    """The docstrings of a module that have examples, each as a doctest."""
    module = importlib.import_module(module_name)
    hvd = lightcc.torch if module_name.startswith("lightcc.torch") else lightcc.numpy
    given = {"hvd": hvd, "np": np, "torch": torch, "os": os, **vars(module)}
    return doctest.DocTestFinder(exclude_empty=True).find(module, globs=given)


def run(example):
    report = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not report, "".join(report)


EXAMPLES = [example for name in MODULES for example in examples(name) if example.examples]


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.name.startswith(LAUNCHES)], ids=lambda e: e.name)
def check_example(example, job):
    job.init()  # the one before may have shut it down
    run(example)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name.startswith(LAUNCHES)], ids=lambda e: e.name)
def test_example_that_starts_a_job(example):
    run(example)


def test_no_example_is_left_out():
    """As many as the sources have: what DocTestFinder does not find, a property or a nested function, must be named."""
    written = 0
    for path in Path(lightcc.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                written += (ast.get_docstring(node) or "").count(">>> ")
    assert sum(len(example.examples) for example in EXAMPLES) == written


@pytest.mark.parametrize("module", ["lightcc.torch", "lightcc.numpy"])
def test_every_public_function_has_an_example(module):
    """Of what users take from the two packages."""
    names = importlib.import_module(module).__all__
    values = {name: getattr(importlib.import_module(module), name) for name in names}
    without = [name for name, value in values.items() if callable(value) and not inspect.isclass(value)
               and ">>> " not in (inspect.getdoc(value) or "")]
    assert without == []

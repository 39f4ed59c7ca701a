"""The job, and each framework with each of its dtypes, for checks on ranks (see ranks.py)."""
import pytest
from cases import FLOATS, FRAMEWORKS, INTEGERS, Case

import ranks


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item, "originalname", "") == "test_on_ranks":
            ranks.share(str(item.path), item.callspec.params["np"])


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

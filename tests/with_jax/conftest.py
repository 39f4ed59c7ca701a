"""Tests of JAX over lightcc, in an environment of their own (.ci/environments.mk); elsewhere they are skipped with a
line."""
import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = [str(HERE.parent / "python"), str(HERE.parent / "multihost")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

from needs import MISSING  # noqa: E402


def pytest_collection_modifyitems(items):
    missing = [name for name in ("jax", "optax", "flax") if not importlib.util.find_spec(name)]
    for item in [item for item in items if item.path.parent == HERE and missing]:
        item.add_marker(pytest.mark.skip(reason=f"{MISSING}{', '.join(missing)} (pip install {' '.join(missing)})"))

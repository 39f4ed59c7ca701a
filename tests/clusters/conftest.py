"""Tests of the schedulers that place ranks, each in its own environment (.ci/environments.mk); elsewhere they are
skipped with a line. HOME is a folder of their own, since Ray keeps its token there."""
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_home = tempfile.TemporaryDirectory(prefix="lightcc-home-")
os.environ["HOME"] = _home.name
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
FOLDERS = [str(HERE), str(HERE.parent / "python"), str(HERE.parent / "multihost")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

from needs import MISSING, why_not  # noqa: E402

LIBRARIES = {"ray": "ray[default,train]", "pyspark": "pyspark", "kubernetes_validate": "kubernetes-validate"}


def pytest_collection_modifyitems(items):
    """A file says at its top which library it needs: NEEDS = "ray"."""
    for item in [item for item in items if item.path.parent == HERE]:
        library = getattr(getattr(item, "module", None), "NEEDS", None)
        if library and not importlib.util.find_spec(library):
            item.add_marker(pytest.mark.skip(reason=f"{MISSING}{library} (pip install '{LIBRARIES[library]}')"))
        elif library == "pyspark" and (reason := why_not("java")):
            item.add_marker(pytest.mark.skip(reason=reason))

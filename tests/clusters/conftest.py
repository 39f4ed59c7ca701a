"""Tests of the schedulers that place ranks, each in its own environment (.ci/environments.mk); elsewhere they are
skipped with a line. HOME is a folder of their own, since Ray keeps its token there, and so is Ray's folder, in which it
looks for a cluster to join. It is below /tmp, since a socket's path has at most 107 bytes."""
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_home = tempfile.TemporaryDirectory(prefix="lightcc-", dir="/tmp")
os.environ["HOME"] = os.environ["RAY_TMPDIR"] = _home.name
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
FOLDERS = [str(HERE), str(HERE.parent / "python"), str(HERE.parent / "multihost")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])

from ray_session import cluster  # noqa: E402, F401
from spark_session import nobody_is_left, spark  # noqa: E402, F401

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

"""Benchmarks of TensorFlow: that they run, check what they measure, and print their tables."""
import json
import sys
from pathlib import Path

import pytest
import tensorflow  # noqa: F401  so that the file is left out where there is none
import warm

import lightcc.core.lib

pytestmark = pytest.mark.newest_tensorflow

BENCH = Path(__file__).resolve().parents[2] / "bench"
DEADLINE_S = 400


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    library = {"LIGHTCC_LIBRARY": str(Path(lightcc.core.lib._library._name).resolve())}
    command = [sys.executable, str(BENCH / "tensorflow_ops.py"), "--tensors", "5", "--repeats", "1", "--calls", "2",
               "--output", "result.json"]
    done = warm.run(command, DEADLINE_S, tmp_path, **library)
    assert done.returncode == 0, done.stderr
    assert "| allreduce of 5 tensors of 16 floats, µs a tensor | 1 rank | 2 ranks |" in done.stdout
    worlds = json.loads((tmp_path / "result.json").read_text())["worlds"]
    assert [world["ranks"] for world in worlds] == [1, 2]
    for world in worlds:
        assert 1 <= world["collectives_a_call"] <= 5
        assert all(len(times) == 1 for times in world["samples_us"].values())


def test_a_tiny_run_of_tables_beside_keras_and_tensorflow():
    command = [sys.executable, str(BENCH / "embedding_keras.py"), "--rounds", "1", "--rows", "2000", "--large-rows",
               "2000", "--ids", "260", "--parts", "fit", "features", "lookup"]
    done = warm.run(command, DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("fit: lightcc", "26 features: one feature", "lookup in 2,000 rows: lightcc"):
        assert f"\n{what} " in done.stdout, done.stdout

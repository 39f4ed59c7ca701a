"""The examples for TensorFlow, run as a user runs them: two ranks see the losses that one rank sees."""
import json
import re
import sys
from pathlib import Path

import invented_flights
import pytest
import tensorflow  # noqa: F401  so that the file is left out where there is none
import warm

pytestmark = pytest.mark.newest_tensorflow

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = ["tensorflow1_style.py", "tensorflow2_digits.py", "keras_digits.py"]
STEPS = 12
DEADLINE_S = 240


def run(example, folder, *arguments, np=0):
    launcher = [sys.executable, "-m", "lightcc.runner", "-np", str(np)] if np else []
    return warm.run([*launcher, sys.executable, FOLDER / example, "--output", folder, *arguments], DEADLINE_S)


def expect_success(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=EXAMPLES)
def two_ranks(request, tmp_path_factory):
    """An example and the folder of a short run of it with two ranks."""
    folder = tmp_path_factory.mktemp("digits")
    out = expect_success(run(request.param, folder, "--steps", str(STEPS), np=2))
    assert "test accuracy" in out and "collectives" in out
    return request.param, folder


def test_one_rank_sees_the_same_losses(two_ranks):
    example, folder = two_ranks
    out = expect_success(run(example, folder, "--reference"))
    found = re.search(rf"2 rank\(s\) against 1: .* losses of {STEPS} steps differ by at most (\S+) .* bound (\S+)", out)
    assert found, out
    assert float(found[1]) <= float(found[2]) <= 1e-4
    earlier, reference = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "reference"))
    assert (earlier["ranks"], reference["ranks"]) == (2, 1)
    assert len(earlier["losses"]) == len(reference["losses"]) == STEPS


def test_reference_fails_when_one_loss_differs(two_ranks, tmp_path):
    example, folder = two_ranks
    earlier = json.loads((folder / "run.json").read_text())
    earlier["losses"][STEPS // 2] *= 1.001
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    done = run(example, tmp_path, "--reference")
    assert done.returncode == 1
    assert "DIFFERENT" in done.stdout and f"(step {STEPS // 2 + 1})" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_learns_to_read(example, tmp_path):
    expect_success(run(example, tmp_path, "--epochs", "5", np=2))
    assert json.loads((tmp_path / "run.json").read_text())["accuracies"][-1][1] > 0.95


def test_tables_learn_the_same_on_two_ranks(tmp_path):
    folder = invented_flights.write(tmp_path)

    def result(*launcher):
        done = warm.run([*launcher, sys.executable, FOLDER / "keras_embedding.py", "--data", folder], DEADLINE_S)
        found = re.search(r"1,500 flights, ([\d,]+) rows, AUC (\S+)", expect_success(done))
        return int(found[1].replace(",", "")), float(found[2])

    (rows, alone), (rows_of_two, together) = result(), result(sys.executable, "-m", "lightcc.runner", "-np", "2")
    assert alone > 0.6 and rows == rows_of_two
    assert together == pytest.approx(alone, abs=1e-2)


def test_mixed_precision(tmp_path):
    expect_success(run("keras_amp.py", tmp_path, "--steps", "30", "--policies", "bfloat16", np=2))
    found, = json.loads((tmp_path / "run.json").read_text())["runs"]["bfloat16"]
    assert found["levels"] == ["bfloat16"] * 30 and found["losses"][-1] < found["losses"][0]

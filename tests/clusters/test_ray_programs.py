"""The programs of docs/clusters.md about Ray, as they are there; without Ray's tokens, which the other tests have."""
import programs
import pytest

NEEDS = "ray"


@pytest.mark.parametrize("title, said", (("Ray Train", r"\{'epoch': 2, 'loss': 0\.\d+\}\n"),
                                         ("RayExecutor", r"(\{'step': \d, 'loss': \d.*\}\n){8}\[[\d.]+, [\d.]+\]\n")))
def test_program(title, said, tmp_path):
    programs.run(title, said, tmp_path, RAY_AUTH_MODE="disabled")

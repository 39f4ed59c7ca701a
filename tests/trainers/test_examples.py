"""The examples of trainers learn, and the notebook runs in a kernel of Jupyter."""
import re
import sys
from pathlib import Path

import pytest

from jobs import DEADLINE_S, launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("trainer", ("accelerate", "transformers", "lightning"))
def test_code_is_told_from_prose(trainer, tmp_path):
    png = tmp_path / "curve.png"
    code, out, err = launch("-np", 2, sys.executable, EXAMPLES / f"{trainer}_code_or_prose.py", "--lines", 3000,
                            "--epochs", 1, "--png", png)
    assert code == 0, err
    right, = re.findall(r"(\d+\.\d)% of the test lines are told apart, after 3\d steps on 2 rank", out)
    assert float(right) > 75, out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_notebook(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    right = re.findall(r"rank \d: (\d+\.\d)% of 297", said)
    assert len(right) == 2 and right[0] == right[1] and float(right[0]) > 80, said
    assert any("image/png" in output.get("data", ()) for output in outputs)

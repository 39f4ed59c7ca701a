"""The programs of docs/tensorflow.md and README's with Keras, as they stand there: each where what it needs is
installed."""
import importlib.util
import re
from pathlib import Path

import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.newest_tensorflow]

PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
PROGRAMS = {title: "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for title, text in SECTIONS.items()
            if "```python" in text}
TORCH = "Keras on torch"
README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS["README"] = re.search(r"or with Keras:\n```python\n(.*?)```", README, re.DOTALL)[1]


def test_there_are_programs():
    assert len(PROGRAMS) == 8 and TORCH in PROGRAMS


@pytest.mark.parametrize("what", [what for what in PROGRAMS if importlib.util.find_spec(
    "torch" if what == TORCH else "tensorflow")])
def test_program(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    ranks.run_script(PROGRAMS[what], 2)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target

"""The programs of docs/pytorch.md, as they stand there."""
import re
from pathlib import Path

import pytest

import ranks

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
PROGRAMS = {title: program for title, program in re.findall(r"## (.*?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL)}


def test_there_are_programs():
    assert len(PROGRAMS) == 4


@pytest.mark.parametrize("what", PROGRAMS)
def test_program(what):
    ranks.run_script(PROGRAMS[what], 2)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target

"""The programs of some pages of docs (NAMES), as they are there; what README says to newcomers."""
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import ranks
from jobs import Job

pytestmark = pytest.mark.long

NAMES = ("first_program.md", "pytorch.md", "compression.md", "embedding.md", "embedding_life.md",
         "embedding_late.md", "embedding_elastic.md", "elastic.md", "fewer_exchanges.md")
PAGE = "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in NAMES)
PROGRAMS = {title: program for title, program in re.findall(r"## (.*?)\n.*?```python\n(.*?)```", PAGE, re.DOTALL)}


def test_there_are_programs():
    assert len(PROGRAMS) == 22


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    return ranks.passed_together(PROGRAMS, 2, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("what", PROGRAMS)
def test_program(what, passed):
    if what not in passed:
        ranks.run_script(PROGRAMS[what], 2)


def test_readme_package_and_error_name_the_same_oldest_pytorch():
    root = Path(__file__).parents[2]
    (readme,) = re.findall(r"PyTorch from (\d+\.\d+)\.\n", (root / "README.md").read_text())
    (package,) = re.findall(r'^torch = \["torch>=(.*)"\]$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    (error,) = re.findall(r"needs torch (\S+) or later", (root / "lightcc/torch/optimizer.py").read_text())
    assert readme == package == error


def test_the_first_program_of_gpu_md_works_without_a_gpu():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    ranks.run_script(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], 2, CUDA_VISIBLE_DEVICES="")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target


def test_the_first_program_of_readme_under_its_own_command(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (command,) = re.findall(r"(?m)^lightccrun -np 2 python train.py", text)
    (tmp_path / "train.py").write_text(re.search(r"`train.py`, with PyTorch:\n```python\n(.*?)```", text, re.DOTALL)[1])
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    launcher, *rest = shlex.split(command)
    code, out, err = Job(os.path.join(os.path.dirname(sys.executable), launcher), *rest, cwd=tmp_path,
                         PATH=path).finish(ranks.DEADLINE_S)
    assert (code, err) == (0, "")
    found = re.fullmatch(r"\[0\]<stdout>:2 ranks, loss (\d+\.\d+)\n", out)
    assert found and float(found[1]) < 0.5, out  # 8 before the first step

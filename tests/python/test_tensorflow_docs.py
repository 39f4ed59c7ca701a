"""The programs of docs/tensorflow.md, embedding_tensorflow.md, kv_variable.md and README's with Keras: each where what
it needs is installed."""
import importlib.util
import re
from pathlib import Path

import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.newest_tensorflow, pytest.mark.long]

PAGE, EMBEDDING, KV_VARIABLE = ((Path(__file__).parents[2] / "docs" / f"{name}.md").read_text()
                                for name in ("tensorflow", "embedding_tensorflow", "kv_variable"))
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
PROGRAMS = {title: "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for title, text in SECTIONS.items()
            if "```python" in text}
TORCH, GRAPH = "Keras on torch", "kv variables"
README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS["README"] = re.search(r"or with Keras:\n```python\n(.*?)```", README, re.DOTALL)[1]
PROGRAMS.update(zip(("embeddings in Keras", "embeddings", "embeddings in an elastic job",
                     "embeddings in files"),
                    re.findall(r"```python\n(.*?)```", EMBEDDING, re.DOTALL)))
PROGRAMS[GRAPH], = re.findall(r"```python\n(.*?)```", KV_VARIABLE, re.DOTALL)


def test_there_are_programs():
    assert len(PROGRAMS) == 14 and TORCH in PROGRAMS


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """Keras on torch needs a process of its own: Keras reads its backend once. So does a program that leaves eager
    mode."""
    programs = {what: text for what, text in PROGRAMS.items() if what not in (TORCH, GRAPH)}
    if not importlib.util.find_spec("tensorflow"):
        return set()
    return ranks.passed_together(programs, 2, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("what", [what for what in PROGRAMS if importlib.util.find_spec(
    "torch" if what == TORCH else "tensorflow")])
def test_program(what, passed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    if what not in passed:
        ranks.run_script(PROGRAMS[what], 2)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target

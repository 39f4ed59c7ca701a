"""The site of docs says what it should: the API reference has every public name, and .ci/pages.py finds links that lead
nowhere. `make docs` builds the site itself."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import api_pages  # noqa: E402

FRAMEWORKS = {"lightcc.torch.lightning": "lightning", "lightcc.torch": "torch", "lightcc.tensorflow": "tensorflow",
              "lightcc.keras": "keras", "lightcc.jax": "jax"}


@pytest.mark.parametrize("module", api_pages.MODULES)
def test_a_page_has_every_public_name(module):
    page = api_pages.module_page(module)
    names = api_pages.names_of(module)
    assert names and all(f"\n## {name}\n" in page or f"`{name}`" in page for name in names)


@pytest.mark.parametrize("module", api_pages.MODULES)
def test_what_is_read_is_what_is_imported(module):
    """The module has these names, and where it is a function the text is its docstring."""
    framework = next((name for package, name in FRAMEWORKS.items() if f"{module}.".startswith(f"{package}.")), "numpy")
    if not importlib.util.find_spec(framework) or framework == "keras" and not importlib.util.find_spec("tensorflow"):
        pytest.skip(f"needs {framework}")
    imported = importlib.import_module(module)
    lines = Path(api_pages.path_of(module)).read_text().splitlines()
    for name in api_pages.names_of(module):
        if sum(line.startswith("    from ") and line.endswith(f" import {name}") for line in lines) > 1:
            continue  # it depends on Keras's backend, and the page has the first
        found = api_pages.find(module, name)
        text = api_pages.described(found.module, found.node)[0] if found.node else ""
        value = getattr(imported, name)
        if callable(value) and isinstance(value.__doc__, str) and text and not isinstance(value, type):
            assert text == api_pages.inspect.cleandoc(value.__doc__), name


@pytest.mark.parametrize("header", api_pages.HEADERS)
def test_a_page_has_every_declaration(header):
    page, text = api_pages.header_page(header), (ROOT / header).read_text()
    declared = set(api_pages.re.findall(r"^(?:LIGHTCC_API )?\w[\w\s*]*?\b((?:lightcc|harp)_\w+)\(", text,
                                        api_pages.re.MULTILINE))
    assert len(declared) > 20 and all(f"{name}(" in page for name in declared)
    assert page.count("```") % 2 == 0 and "extern" not in page


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n\nLook up a thing.\n[one](#a-page), [two](#another), "
                                               "[three](no.md)\n```\n[four](no.md)\n```\n")
    (tmp_path / "code.py").write_text("# docs" "/page.md, docs" "/none.md\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    found = subprocess.run([sys.executable, ROOT / ".ci" / "pages.py", tmp_path], stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1
    assert found.stderr == ("pages: code.py: it names docs" "/none.md, which does not exist\n"
                            "pages: docs" "/page.md: a link to #another, and there is no such heading\n"
                            "pages: docs" "/page.md: a link to no.md, which does not exist\n")


def test_a_page_opens_with_what_its_reader_can_do(tmp_path):
    (tmp_path / "docs").mkdir()
    for name, text in (("good", "# A page\n\nAfter this page you can rest.\n"), ("bad", "# A page\n\nIt is a page.\n"),
                       ("long", "# A page\n\nLook up a thing.\n" + "a\n" * 300)):
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    found = subprocess.run([sys.executable, ROOT / ".ci" / "pages.py", tmp_path], stderr=subprocess.PIPE, text=True)
    assert [line.partition(".md: ")[0] for line in found.stderr.splitlines()] == ["pages: docs/bad", "pages: docs/long"]

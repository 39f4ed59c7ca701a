"""A hook of MkDocs (mkdocs.yml): what the site has beside the pages in docs, and where links lead.

README is its first page, and the other pages of the repository's root are there too. tools/api_pages.py makes the API
reference. A page may link to any file of the repository: the site has a page for each file that is linked to. So pages
are written with the links that work in the repository, and a link to a file that is not there fails the strict build.
"""
import logging
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Dict

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api_pages  # noqa: E402

ROOT = api_pages.ROOT
LOG = logging.getLogger("mkdocs.hooks.docs_site")
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
              "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
ITEM = re.compile(r" *(- |[0-9]+\. )")
FENCE = re.compile(r"^ *(```|~~~)")
KEPT_OUT = "---\nsearch:\n  exclude: true\n---\n"  # of the search
LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".cu": "cpp", ".yaml": "yaml", ".yml": "yaml",
             ".sbatch": "bash"}

API_INTRODUCTION = """\
Look up a function, a class or a C declaration here. These pages are made from the docstrings, whose examples the tests
run, and from the comments of the C headers."""

_repository_path: Dict[str, str] = {}  # of each page that is a file of the repository


def on_files(files: Files, config) -> Files:
    """Adds the pages that are no files of docs. Those that are linked to bring those that they link to themselves."""
    _repository_path.clear()
    waiting = [(f"docs/{file.src_uri}", file.src_uri) for file in files if file.src_uri.endswith(".md")]
    waiting += ROOT_PAGES.items()
    while waiting:
        path, uri = waiting.pop()
        _repository_path[uri] = path
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=_content(path)))
        if path.endswith(".md"):
            for target in _targets(path, _content(path)):
                found = site_uri(target)
                if found not in _repository_path and found not in (uri for _, uri in waiting):
                    waiting.append((target, found))
    pages = {f"api/{module}.md": api_pages.module_page(module) for module in api_pages.MODULES}
    pages.update({f"api/{Path(header).name}.md": api_pages.header_page(header) for header in api_pages.HEADERS})
    for uri, content in {**pages, "api/index.md": _api_index()}.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    path = _repository_path.get(page.file.src_uri)
    markdown = _as_github_reads_it(markdown)
    return markdown if path is None else _outside_of_code(markdown, lambda line: LINK.sub(
        lambda match: match[1] + _rewritten(match[2], path, page.file.src_uri) + match[3], line))


def site_uri(path: str) -> str:
    """The page of a file of the repository."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path in api_pages.HEADERS:
        return f"api/{Path(path).name}.md"
    if path.startswith("docs/"):
        return path[len("docs/"):]
    return f"files/{path}" if path.endswith((".md", ".png")) else f"files/{path}.md"


def _content(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text if site_uri(path).count("/") == 0 or path.startswith("docs/") else KEPT_OUT + text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{KEPT_OUT}# {path}\n\n````{language}\n{text}\n````\n"


def _targets(path: str, text: str):
    """The files outside of docs that a page links to."""
    found = []
    _outside_of_code(text, lambda line: found.extend(match[2] for match in LINK.finditer(line)) or line)
    for link in found:
        target = _target(link, path)
        known = target is None or target.startswith("docs/") or target in api_pages.HEADERS
        if not known and (ROOT / target).is_file():
            yield target


def _target(link: str, path: str):
    """A file of the repository; None for a link that leads elsewhere."""
    return None if re.match(r"[a-z]+:", link) else posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _rewritten(link: str, path: str, uri: str) -> str:
    target = _target(link, path)
    if target is None:
        return link
    if not (ROOT / target).is_file():
        if not target.startswith("docs/"):  # MkDocs itself looks for those
            LOG.warning("%s links to %s, and there is no such file", path, target)
            return link
    return os.path.relpath(site_uri(target), posixpath.dirname(uri) or ".")


def _as_github_reads_it(markdown: str) -> str:
    """Python-Markdown wants an empty line before a list or a table, and four spaces before items of an inner list."""
    before = [""]

    def spaced(line: str) -> str:
        last, before[0] = before[0], line
        begins = ITEM.match(line) and not ITEM.match(last) and last[:1] != " "
        begins = begins or line[:1] == "|" and last[:1] != "|"
        line = re.sub(r"^ {2,3}(?=(- |[0-9]+\. ))", "    ", line)
        return f"\n{line}" if begins and last.strip() else line

    return _outside_of_code(markdown, spaced)


def _outside_of_code(text: str, change) -> str:
    out, inside = [], False
    for line in text.split("\n"):
        if FENCE.match(line):
            inside = not inside
        out.append(line if inside else change(line))
    return "\n".join(out)


def _api_index() -> str:
    pages = {**api_pages.MODULES, **{Path(header).name: what for header, what in api_pages.HEADERS.items()}}
    rows = [f"| [{name}]({name}.md) | {what} |" for name, what in pages.items()]
    return "\n".join(["# API reference", "", API_INTRODUCTION, "", "| module | contents |", "| --- | --- |", *rows, ""])

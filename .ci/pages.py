"""Checks that links and anchors of every Markdown file lead somewhere, and so do names of pages in code, as
`docs/errors.md` in a message; and that a page of docs opens with what its reader will be able to do, and is short.
Prints one line per offence and exits 1 if there is any.

`make docs` checks the site in the same way. This needs no packages, and also reads what is not on the site.
"""
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator, Set

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
MENTION = re.compile(r"\bdocs/[\w/]+\.(?:md|png)\b")
OPENING = re.compile(r"# .+\n\n(After this page|Look up|Find |Here you )")
MOST_LINES = 300  # of a page of docs
GENERATED = ("docs/knobs.md",)  # csrc/base/knobs_page.cc says how it opens
CODE = (".py", ".cc", ".h", ".cu", ".txt", ".toml", ".yaml", ".yml", ".service", "Makefile", "CMakeLists.txt", "run")


def prose(text: str) -> Iterator[str]:
    """The lines outside of fenced code."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def anchors(path: Path) -> Set[str]:
    """Those that GitHub gives the headings; the site gives the same ones."""
    found: Set[str] = set()
    for line in prose(path.read_text()):
        if match := re.match(r"#+ (.*)", line):
            text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", match[1]).strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def page_offences(name: str, text: str) -> Iterator[str]:
    if not OPENING.match(text) and name not in GENERATED:
        yield f"{name}: say first what the reader can do or look up: 'After this page you can ...'"
    if text.count("\n") > MOST_LINES:
        yield f"{name}: more than {MOST_LINES} lines; split what is looked up from what is read"


def offences(root: Path, files: Set[str]) -> Iterator[str]:
    for name in sorted(files):
        path = root / name
        if name.endswith(".md"):
            if name.startswith("docs/"):
                yield from page_offences(name, path.read_text())
            for line in prose(path.read_text()):
                for target, anchor in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                    if re.match(r"[a-z]+:", target):
                        continue
                    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name
                    if not (root / found).exists():
                        yield f"{name}: a link to {target}, which does not exist"
                    elif anchor and found.endswith(".md") and anchor not in anchors(root / found):
                        yield f"{name}: a link to {target}#{anchor}, and there is no such heading"
        elif name.endswith(CODE) and path.is_file():
            for mention in sorted(set(MENTION.findall(path.read_text(errors="replace")))):
                if not (root / mention).exists():
                    yield f"{name}: it names {mention}, which does not exist"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = list(offences(root, {name for name in listed.split("\0") if name and (root / name).is_file()}))
    for offence in found:
        print(f"pages: {offence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that one word has one meaning (docs/vocabulary.md): a C++ type's name is used once, and what the page says of
the code is there.

A type in a namespace shares its name with no other type of its library, not even with one inside a class. Types inside
two classes may share one (`Aggregator::Entry`, `Coordinator::Entry`), since their users name the class. So may types of
two libraries (`harp::Engine`, `lightcc::Engine`): each has the field's terms in a namespace of its own, and code that
uses both names it. A library is an outermost namespace. Prints one line per offence and exits 1 if there is any. With
an argument, checks the tree at that path.
"""
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, Set

PAGE = "docs/vocabulary.md"
TOKEN = re.compile(r"""
    (?P<open>\{) | (?P<close>\})
  | \bnamespace\s+(?P<namespace>[\w:]*)\s*(?=\{)
  | \b(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+(?:alignas\([^)]*\)\s*)?
    (?P<type>[A-Za-z_][\w:]*)(?:\s+final)?\s*(?::[^;{()]*)?(?=\{)
""", re.VERBOSE)
NOT_CODE = re.compile(r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])'""", re.VERBOSE | re.DOTALL)


def types(text: str) -> Iterator[tuple]:
    """(name, scope, whether that is a namespace) of each type that is defined."""
    scopes: List[tuple] = []  # name, is it a namespace
    coming = ("", False)
    for token in TOKEN.finditer(NOT_CODE.sub(" ", text)):
        if token["open"]:
            scopes.append(coming)
            coming = ("", False)
        elif token["close"]:
            scopes[-1:] = []
        elif token["namespace"] is not None:
            coming = (token["namespace"] or "(unnamed)", True)
        else:
            *owner, name = token["type"].split("::")
            scope = [each for each, _ in scopes if each] + owner
            yield name, "::".join(scope), not owner and all(is_namespace for _, is_namespace in scopes)
            coming = (name, False)


def repeated(root: Path) -> Dict[str, Set[str]]:
    """Names of several types of a library, of which one at least is in a namespace; and their scopes."""
    found: Dict[tuple, Set[str]] = defaultdict(set)  # by library and name
    outer = set()
    for folder in ("csrc", "harp_plugin"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu"):
                for name, scope, in_namespace in types(path.read_text()):
                    # What is unnamed is each file's own.
                    key = (scope.split("::")[0], name)
                    found[key].add(f"{scope} in {path.name}" if "(unnamed)" in scope else scope)
                    outer.update([key] if in_namespace else [])
    several: Dict[str, Set[str]] = defaultdict(set)
    for key, scopes in found.items():
        if len(scopes) > 1 and key in outer:
            several[key[1]] |= scopes
    return several


def type_offences(root: Path) -> Iterator[str]:
    for name, scopes in sorted(repeated(root).items()):
        yield f"type {name} of {', '.join(sorted(scopes))}: each has a name of its own; find one that says more"


def page_offences(root: Path) -> Iterator[str]:
    """Of the rows of the page: their words are there once, their files exist and have their types."""
    python = defaultdict(list)
    for path in (root / "lightcc").rglob("*.py"):
        python[path.name].append(path)
    seen: Set[str] = set()
    for line in (root / PAGE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3 or cells[0] in ("word", "---"):
            continue
        for word in cells[0].split(", "):
            if word in seen:
                yield f"{PAGE}: {word} is explained twice"
            seen.add(word)
        text, names = "", []
        for token in re.findall(r"`([^`]+)`", cells[2]):
            if not token.endswith((".h", ".py")):
                names.append(token)
                continue
            paths = [path for path in (root / "csrc" / token, root / token, *python[token]) if path.is_file()]
            text += "".join(path.read_text() for path in paths)
            if not paths:
                yield f"{PAGE}: {cells[0]}: there is no {token}"
        yield from (f"{PAGE}: {cells[0]}: {name} is not in the file" for name in names
                    if not re.search(rf"\b{name}\b", text))


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    offences = [*type_offences(root), *page_offences(root)]
    for offence in offences:
        print(f"vocabulary: {offence}", file=sys.stderr)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())

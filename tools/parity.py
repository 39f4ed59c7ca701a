"""How each row of Horovod's API fares in lightcc: docs/parity.md, made from the API's data and tests/parity.yaml.

    python tools/parity.py            writes docs/parity.md
    python tools/parity.py --check    exits 1 and says so if a row has no entry, an entry no row, a test does not
                                      exist, or docs/parity.md is old

Imports neither lightcc nor tests. That lightcc has what is said here tests/python/test_manifest.py shows.
"""
import argparse
import collections
import sys
from typing import Dict, Iterable, List, Tuple

from parity_data import ABSENT, ROOT, SECTIONS, STATUSES, Entry, Row, Table, load, path_of

PAGE = ROOT / "docs" / "parity.md"
INTRODUCTION = """\
Every name, flag, variable and rule of Horovod's API, and how it fares in lightcc, where `horovod.x` is `lightcc.x`.
This page is generated: `tests/parity.yaml` says it of each row of `tests/data/horovod_api.json` and
`horovod_objects.yaml`, and `python tools/parity.py` writes it down. `make lint` finds rows without a word and tests
that do not exist; `tests/python/test_manifest.py` finds what lightcc has not as it is said here. "From" lists names
that a module passes on: they fare as in that other module.""".splitlines()

GROUPS = {  # of the totals; the first that a module's name begins with
    "horovod.torch": "PyTorch",
    "horovod.tensorflow": "TensorFlow, Keras", "horovod.keras": "TensorFlow, Keras",
    "horovod._keras": "TensorFlow, Keras",
    "horovod.spark": "Spark, Ray", "horovod.ray": "Spark, Ray",
    "horovod": "All frameworks: common, data, runner",
}


def page(table: Table) -> str:
    out = [f"# Parity with Horovod {table.version}", "", *INTRODUCTION, "", "| word | meaning |", "| --- | --- |"]
    out += [f"| {status} | {meaning} |" for status, (meaning, _) in STATUSES.items()] + [""]
    out += _totals(table)
    modules: Dict[str, List[Row]] = {}
    for row in table.rows:
        if row.section not in SECTIONS:
            modules.setdefault(row.section, []).append(row)
    whole = [module for module, rows in modules.items()
             if all(row.entry.key == "*" and row.entry.status in ABSENT for row in rows)]
    for module, rows in modules.items():
        if module not in whole:
            out += ["", f"## {module}", ""] + _module(rows + _only_passed_on(module, table), modules)
    if whole:
        out += ["", "## Modules that are not there", "", "| module | names | | why |", "| --- | --- | --- | --- |"]
        out += [_absent_module(modules[module]) for module in whole]
    for section, (heading, _) in SECTIONS.items():
        out += ["", f"## {heading}", ""] + _section([row for row in table.rows if row.section == section], section)
    return "\n".join(out) + "\n"


def _totals(table: Table) -> List[str]:
    counts = {group: collections.Counter() for group in
              [*dict.fromkeys(GROUPS.values()), *(heading for heading, _ in SECTIONS.values())]}
    for row in table.rows:
        group = SECTIONS[row.section][0] if row.section in SECTIONS else next(
            group for module, group in GROUPS.items() if row.section.startswith(module))
        counts[group][row.entry.status] += 1
    counts["**all**"] = sum(counts.values(), collections.Counter())
    out = ["| rows | " + " | ".join(STATUSES) + " | all |", "| --- " * (len(STATUSES) + 2) + "|"]
    return out + [f"| {group} | " + " | ".join(str(count[status] or "") for status in STATUSES)
                  + f" | {sum(count.values())} |" for group, count in counts.items()]


def _only_passed_on(module: str, table: Table) -> List[Row]:
    """What other modules have of this one though it is no name of it: Sum and whatever else HorovodBasics has."""
    own = {row.name for row in table.rows if row.section == module}
    found = {row.origin[1]: row.entry for row in table.rows
             if row.origin and row.origin[0] == row.entry.section == module and row.origin[1] not in own}
    return [Row(module, name, {}, entry=entry) for name, entry in found.items()]


def _absent_module(rows: List[Row]) -> str:
    own = [row for row in rows if row.origin is None]
    parts = [_names(own)] if own else []
    if len(rows) > len(own):
        parts.append(f"{len(rows) - len(own)} from other modules")
    return f"| `{rows[0].section}` | {', '.join(parts)} | {rows[0].entry.status} | {_cell(rows[0].entry.note)} |"


def _module(rows: List[Row], linked: Iterable[str]) -> List[str]:
    module = rows[0].section
    out = _lines([row for row in rows if row.entry.section == module], "name")
    passed_on: Dict[str, List[Row]] = {}
    absent: List[Row] = []
    for row in rows:
        if row.entry.section != module and "." not in row.name:
            (absent if row.entry.status in ABSENT else passed_on.setdefault(row.origin[0], [])).append(row)
    if out and (passed_on or absent):
        out.append("")
    for origin, found in sorted(passed_on.items()):
        shown = f"[{origin}](#{origin.replace('.', '')})" if origin in linked else origin
        out.append(f"- From {shown}: {_names(found)}.")
    if absent:
        out.append(f"- Not there, as where it is defined: {_names(absent)}.")
    return out


def _section(rows: List[Row], section: str) -> List[str]:
    out = _lines([row for row in rows if row.entry.section == section], SECTIONS[section][1])
    passed_on: Dict[Tuple[str, str], List[str]] = {}
    for row in rows:
        if row.entry.section != section:
            of = f" (`{row.origin[1]}`)" if row.origin[0] in SECTIONS else ""
            passed_on.setdefault((row.entry.status, row.origin[0]), []).append(f"`{row.name}`{of}")
    what = {"environment": "the variable that it sets", "flags": "the flag that it stands for"}
    if out and passed_on:
        out.append("")
    return out + [f"- {status}, as {what.get(origin, 'in ' + origin)}: {', '.join(names)}."
                  for (status, origin), names in passed_on.items()]


def _lines(rows: List[Row], what: str) -> List[str]:
    """A table with one line an entry."""
    by_entry: Dict[Entry, List[Row]] = {}
    for row in rows:
        by_entry.setdefault(row.entry, []).append(row)
    if not by_entry:
        return []
    out = [f"| {what} | | note | shown by |", "| --- | --- | --- | --- |"]
    for entry, found in by_entry.items():
        out.append(f"| {_names(found)} | {entry.status} | {_cell(entry.note)} | {_links(entry.tests)} |")
    return out


def _names(rows: List[Row]) -> str:
    """Methods stand in brackets behind their class, if that is of the same line; members behind their object."""
    if all("object" in row.facts for row in rows):
        return _members(rows)
    shown, top = [], {row.name for row in rows}
    methods = collections.defaultdict(list)
    for row in rows:
        owner, _, method = row.name.rpartition(".")
        if owner in top and row.section not in SECTIONS:
            methods[owner].append(f"`{method}`")
    for row in rows:
        if "shown" in row.facts:
            shown.append(_cell(row.facts["shown"]))
        elif row.name.rpartition(".")[0] not in top or row.section in SECTIONS:
            inside = f" ({', '.join(methods[row.name])})" if row.name in methods else ""
            shown.append(f"`{row.name}`{inside}")
    return ("; " if any("shown" in row.facts for row in rows) else ", ").join(shown)


def _members(rows: List[Row]) -> str:
    """Objects that have the same members stand before them together."""
    members: Dict[str, List[str]] = {}
    for row in rows:
        members.setdefault(row.facts["object"], []).append(f"`{row.facts['member']}`")
    of: Dict[str, List[str]] = {}
    for thing, names in members.items():
        of.setdefault(", ".join(names), []).append(f"`{thing}`")
    return "; ".join(f"{', '.join(things)}: {names}" for names, things in of.items())


def _links(tests: Tuple[str, ...]) -> str:
    by_file: Dict[str, List[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        by_file.setdefault(file, []).append(f"::{name}")
    return "; ".join(f"[{file}](../{path_of(file).relative_to(ROOT).as_posix()}){' '.join(names)}"
                     for file, names in by_file.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is wrong")
    check = arguments.parse_args().check
    table = load()
    if not table.problems:
        text = page(table)
        if not check:
            PAGE.write_text(text)
        elif not PAGE.is_file() or PAGE.read_text() != text:
            table.problems.append("docs/parity.md is old: python tools/parity.py")
    for problem in table.problems:
        print(f"parity: {problem}", file=sys.stderr)
    return 1 if table.problems else 0


if __name__ == "__main__":
    sys.exit(main())

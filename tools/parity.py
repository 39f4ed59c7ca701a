"""How each row of Horovod's API fares in lightcc: docs/parity.md and the tables in docs/parity, made from the API's
data and tests/parity.yaml.

    python tools/parity.py            writes the pages
    python tools/parity.py --check    exits 1 and says so if a row has no entry, an entry no row, a test does not
                                      exist, or a page is old

Imports neither lightcc nor tests. That lightcc has what is said here tests/python/test_manifest.py shows.
"""
import argparse
import collections
import os
import posixpath
import sys
from typing import Dict, Iterator, List, Tuple

from parity_data import ABSENT, ROOT, SECTIONS, STATUSES, Entry, Row, Table, load, path_of

DOCS = ROOT / "docs"
SUMMARY = "parity.md"  # all pages as paths in docs
INTRODUCTION = """\
Here you find out whether lightcc has a name, flag or variable of Horovod's API, and whether it behaves the same.
`lightcc.x` takes the place of `horovod.x`. Begin with what is missing; the tables below have every row.""".splitlines()
METHOD = """\
These pages are generated. `tests/parity.yaml` has an entry for each row of `tests/data/horovod_api.json` and
`horovod_objects.yaml`, and `python tools/parity.py` writes the pages. `make lint` reports rows without an entry and
tests that do not exist. `tests/python/test_manifest.py` compares the entries with what lightcc has.""".splitlines()

GROUPS = {  # of the totals; the first that a module's name begins with
    "horovod.torch": "PyTorch",
    "horovod.tensorflow": "TensorFlow, Keras", "horovod.keras": "TensorFlow, Keras",
    "horovod._keras": "TensorFlow, Keras",
    "horovod.spark": "Spark, Ray", "horovod.ray": "Spark, Ray",
    "horovod": "All frameworks: common, data, runner",
}
PAGES = {  # a group, or a section beside the modules: its page. Where there is none, all of it is missing.
    "PyTorch": "parity/pytorch.md", "TensorFlow, Keras": "parity/tensorflow.md",
    "All frameworks: common, data, runner": "parity/common.md", "Spark, Ray": "parity/common.md",
    "objects": "parity/objects.md", "semi_public": "parity/objects.md", "dtypes": "parity/objects.md",
    "naming": "parity/objects.md",
    "flags": "parity/settings.md", "environment": "parity/settings.md", "config": "parity/settings.md",
}
TITLES = {
    "parity/pytorch.md": ("Parity: PyTorch", "Look up a name of `horovod.torch` here."),
    "parity/tensorflow.md": ("Parity: TensorFlow and Keras", "Look up a name of `horovod.tensorflow` or "
                                                             "`horovod.keras` here."),
    "parity/common.md": ("Parity: modules of all frameworks", "Look up a name of `horovod.common`, `horovod.data`, "
                                                              "`horovod.runner`, `horovod.ray` or `horovod.spark` "
                                                              "here."),
    "parity/objects.md": ("Parity: objects, types and naming",
                          "Look up an attribute of an object, an element type or a naming rule here."),
    "parity/settings.md": ("Parity: flags and variables",
                           "Look up an environment variable, a flag of `horovodrun` or a key of its settings here."),
}
READING = """\
The summary explains [the words in the second column](../parity.md#what-the-words-mean). "From" lists the names that a
module re-exports: see the other module for them.""".splitlines()


def pages(table: Table) -> Dict[str, str]:
    """Each page by its path in docs."""
    modules: Dict[str, List[Row]] = {}
    for row in table.rows:
        if row.section not in SECTIONS:
            modules.setdefault(row.section, []).append(row)
    missing = [module for module, rows in modules.items()
               if all(row.entry.key == "*" and row.entry.status in ABSENT for row in rows)]
    parts: Dict[str, List[str]] = {page: [f"# {title}", "", what, *READING] for page, (title, what) in TITLES.items()}
    for module, rows in modules.items():
        if module not in missing:
            where = page_of(module)
            parts[where] += ["", f"## {module}", "",
                             *_module(rows + _only_passed_on(module, table), [*modules.keys() - set(missing)], where)]
    for section, (heading, _) in SECTIONS.items():
        rows = [row for row in table.rows if row.section == section]
        parts[PAGES[section]] += ["", f"## {heading}", "", *_section(rows, section, PAGES[section])]
    parts[SUMMARY] = _summary(table, [modules[module] for module in missing], missing)
    return {page: "\n".join(lines) + "\n" for page, lines in parts.items()}


def group_of(module: str) -> str:
    return next(group for beginning, group in GROUPS.items() if module.startswith(beginning))


def page_of(module: str) -> str:
    return PAGES[group_of(module)]


def _summary(table: Table, whole: List[List[Row]], missing: List[str]) -> List[str]:
    out = [f"# Parity with Horovod {table.version}", "", *INTRODUCTION, "", "## What is missing", "",
           "| what | where | | why |", "| --- | --- | --- | --- |"]
    out += [_absent_module(rows) for rows in whole]
    absent: Dict[Tuple[str, str, str], List[Row]] = {}
    for row in table.rows:
        if row.section not in missing and row.entry.status in ABSENT and row.entry.section == row.section:
            absent.setdefault((row.section, row.entry.status, row.entry.note), []).append(row)
    for (section, status, note), rows in absent.items():
        page = PAGES[section] if section in SECTIONS else page_of(section)
        what = SECTIONS[section][0] if section in SECTIONS else f"`{section}`"
        out.append(f"| {_names(rows)} | [{what}]({page}) | {status} | {_cell(note)} |")
    out += ["", "## What the words mean", "", "| word | meaning |", "| --- | --- |"]
    out += [f"| {status} | {meaning} |" for status, (meaning, _) in STATUSES.items()]
    return out + ["", "## How many rows there are", "", *_totals(table), "", *METHOD]


def _totals(table: Table) -> List[str]:
    counts = {group: collections.Counter() for group in
              [*dict.fromkeys(GROUPS.values()), *(heading for heading, _ in SECTIONS.values())]}
    for row in table.rows:
        group = SECTIONS[row.section][0] if row.section in SECTIONS else group_of(row.section)
        counts[group][row.entry.status] += 1
    counts["**all**"] = sum(counts.values(), collections.Counter())
    out = ["| rows | " + " | ".join(STATUSES) + " | all |", "| --- " * (len(STATUSES) + 2) + "|"]
    pages_by_group = {**PAGES, **{heading: PAGES[section] for section, (heading, _) in SECTIONS.items()}}
    linked = {group: f"[{group}]({pages_by_group[group]})" if group in pages_by_group else group for group in counts}
    return out + [f"| {linked[group]} | " + " | ".join(str(count[status] or "") for status in STATUSES)
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
    names = f": {', '.join(parts)}" if parts else ""
    return f"| the module{names} | `{rows[0].section}` | {rows[0].entry.status} | {_cell(rows[0].entry.note)} |"


def _module(rows: List[Row], linked: List[str], page: str) -> List[str]:
    module = rows[0].section
    out = _lines([row for row in rows if row.entry.section == module], "name", page)
    passed_on: Dict[str, List[Row]] = {}
    absent: List[Row] = []
    for row in rows:
        if row.entry.section != module and "." not in row.name:
            (absent if row.entry.status in ABSENT else passed_on.setdefault(row.origin[0], [])).append(row)
    if out and (passed_on or absent):
        out.append("")
    for origin, found in sorted(passed_on.items()):
        there = "" if origin not in linked or page_of(origin) == page else posixpath.basename(page_of(origin))
        shown = f"[{origin}]({there}#{origin.replace('.', '')})" if origin in linked else origin
        out.append(f"- From {shown}: {_names(found)}.")
    if absent:
        out.append(f"- Not there, as where it is defined: {_names(absent)}.")
    return out


def _section(rows: List[Row], section: str, page: str) -> List[str]:
    out = _lines([row for row in rows if row.entry.section == section], SECTIONS[section][1], page)
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


def _lines(rows: List[Row], what: str, page: str) -> List[str]:
    """A table with one line an entry."""
    by_entry: Dict[Entry, List[Row]] = {}
    for row in rows:
        by_entry.setdefault(row.entry, []).append(row)
    if not by_entry:
        return []
    out = [f"| {what} | | note | shown by |", "| --- | --- | --- | --- |"]
    for entry, found in by_entry.items():
        out.append(f"| {_names(found)} | {entry.status} | {_cell(entry.note)} | {_links(entry.tests, page)} |")
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


def _links(tests: Tuple[str, ...], page: str) -> str:
    by_file: Dict[str, List[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        by_file.setdefault(file, []).append(f"::{name}")
    folder = (DOCS / page).parent
    return "; ".join(f"[{file}]({os.path.relpath(path_of(file), folder)}){' '.join(names)}"
                     for file, names in by_file.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def old_pages(table: Table) -> Iterator[str]:
    for page, text in pages(table).items():
        if not (DOCS / page).is_file() or (DOCS / page).read_text() != text:
            yield f"docs/{page} is old: python tools/parity.py"


def write_pages(table: Table) -> List[str]:
    for page, text in pages(table).items():
        (DOCS / page).parent.mkdir(exist_ok=True)
        (DOCS / page).write_text(text)
    return []


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is wrong")
    check = arguments.parse_args().check
    table = load()
    if not table.problems:
        table.problems.extend(old_pages(table) if check else write_pages(table))
    for problem in table.problems:
        print(f"parity: {problem}", file=sys.stderr)
    return 1 if table.problems else 0


if __name__ == "__main__":
    sys.exit(main())

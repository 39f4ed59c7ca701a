"""What the manifest of Horovod's API and tests/parity.yaml say together: each row of the API, the entry that holds for
it, and what is wrong with either. Imports neither lightcc nor tests.
"""
import ast
import collections
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "tests" / "data" / "horovod_api.json"
OBJECTS = ROOT / "tests" / "data" / "horovod_objects.yaml"
DATA = ROOT / "tests" / "parity.yaml"
TEST_FOLDERS = [ROOT / "tests" / name for name in ("python", "multihost", "clusters", "regressions", "unit")]

STATUSES = {  # what it means, and what an entry of it must have
    "same": ("behaves as in Horovod; the test shows it", {"tests"}),
    "better": ("as in Horovod, and more: the note says what, the test shows it", {"tests", "note"}),
    "different": ("there, and on purpose not quite as in Horovod: the note says why", {"note"}),
    "present": ("there with Horovod's signature, which is all that is checked", set()),
    "later": ("in a later version", {"note"}),
    "never": ("not supported: the note says why", {"note"}),
}
ABSENT = ("later", "never")  # lightcc must not have these

SECTIONS = {  # beside the modules: heading, what a row is called
    "objects": ("What objects have", "objects: attributes and methods"),
    "flags": ("horovodrun's flags", "flag"),
    "environment": ("Environment variables", "variable"),
    "config": ("Keys of --config-file", "key"),
    "dtypes": ("Element types", "types"),
    "naming": ("Naming rules", "rule"),
    "semi_public": ("Names without promise that scripts import", "name"),
}


class Entry(NamedTuple):
    """What tests/parity.yaml says, of all names that stand before one colon."""
    status: str
    tests: Tuple[str, ...]
    note: str
    section: str
    key: str


@dataclasses.dataclass(eq=False)
class Row:
    """One thing that Horovod has. `name` is unique in its section, which is a module's name or one of SECTIONS."""
    section: str
    name: str
    facts: dict
    origin: Optional[Tuple[str, str]] = None  # whose entry holds where this row has none: (section, name)
    entry: Optional[Entry] = None


class Table(NamedTuple):
    """The manifest's rows with their entries, and what is wrong with them."""
    version: str
    rows: List[Row]
    problems: List[str]


def load(document: Optional[dict] = None) -> Table:
    """document: what tests/parity.yaml says, if it is not that file's."""
    manifest = json.loads(MANIFEST.read_text())
    data, problems = _entries(document or yaml.safe_load(DATA.read_text()))
    rows = [*_module_rows(manifest["modules"]), *_object_rows(), *_other_rows(manifest)]
    by_name = {(row.section, row.name): row for row in rows}
    used = set()
    for row in rows:
        place = _place(row, by_name, data)
        if place is None:
            problems.append(f"{row.section}: {row.name} has no entry")
        else:
            used.add(place)
            row.entry = data[place]
    problems += [f"{section}: {name} is not in the manifest" for section, name in data if (section, name) not in used]
    return Table(manifest["meta"]["horovod_version"], rows, problems)


# The manifest

def _module_rows(modules: dict) -> Iterator[Row]:
    for module, facts in modules.items():
        for name, entry in facts["names"].items():
            origin = _origin(modules, module, name, entry)
            yield Row(module, name, entry, origin)
            for method, method_facts in entry.get("methods", {}).items():
                yield Row(module, f"{name}.{method}", method_facts, origin and (origin[0], f"{origin[1]}.{method}"))


def _origin(modules: dict, module: str, name: str, entry: dict) -> Optional[Tuple[str, str]]:
    """The row that a name is re-exported from; None for one of the module's own, or of a module without rows."""
    defined_in = entry.get("defined_in", module)
    if defined_in == module or defined_in not in modules:
        return None
    if entry["kind"] == "module":
        return defined_in, "*"
    if name in modules[defined_in]["names"]:
        return defined_in, name
    return defined_in, f"HorovodBasics.{name}"  # rank, Sum, ...: the attributes of an instance that each module has


def _object_rows() -> Iterator[Row]:
    for thing, members in yaml.safe_load(OBJECTS.read_text()).items():
        for member in members.split("; "):
            name, bracket, parameters = member.partition("(")
            yield Row("objects", f"{thing}.{name}", {
                "object": thing, "member": name,
                "parameters": [word for word in parameters[:-1].split(", ") if word] if bracket else None})


def _other_rows(manifest: dict) -> Iterator[Row]:
    by_dest = collections.defaultdict(list)
    for flag in manifest["horovodrun_cli"]:
        name = flag["flags"][-1]
        by_dest[flag["dest"]].append(name)
        yield Row("flags", name, flag, flag["sets_env"] and ("environment", flag["sets_env"]))
    for variable in manifest["environment"]:
        yield Row("environment", variable["name"], variable, ("environment", f"kind {variable['kind']}"))
    for group, keys in manifest["config_file_schema"].items():
        for key in [group] if isinstance(keys, str) else [f"{group}.{key}" for key in keys]:
            flags = next((by_dest[dest] for dest in _dests(key) if dest in by_dest), None)
            yield Row("config", key, {}, flags and ("flags", flags[0]))
    for name, types in manifest["wire_dtypes"].items():
        yield Row("dtypes", name, {"shown": f"{name}: {', '.join(types)}"})
    for text in manifest["naming_rules"]:
        yield Row("naming", re.split(r"[:;]| are | may ", text)[0], {"shown": text})
    for text in manifest["semi_public"]["names"]:
        module, _, names = text.rpartition(": ")
        for name in names.split(", "):
            yield Row("semi_public", f"{module}.{name}" if module else name, {}, (module, name) if module else None)


def _dests(key: str) -> List[str]:
    """Where horovodrun may put a key of its file: timeline.filename is --timeline-filename, autotune.enabled is
    --autotune, params.cache_capacity is --cache-capacity."""
    group, _, name = key.partition(".")
    return {"stall_check.enabled": ["no_stall_check"], "logging.with_timestamp": ["log_with_timestamp"],
            "controller": ["use_gloo"]}.get(key) or ([group] if name == "enabled" else [f"{group}_{name}", name,
                                                                                       f"log_{name}"])


# tests/parity.yaml

def _entries(document: dict) -> Tuple[Dict[Tuple[str, str], Entry], List[str]]:
    data, problems = {}, []
    sections = [(section, lines) for section, lines in document.items() if section != "later"]
    for section, lines in [*sections, *document["later"].items()]:
        for key, text in (lines if isinstance(lines, dict) else {"*": lines}).items():
            entry = _entry(section, key, str(text))
            known = STATUSES.get(entry.status)
            if known is None:
                problems.append(f"{section}: {key}: '{entry.status}' is none of {', '.join(STATUSES)}")
                continue
            problems += [f"{section}: {key}: '{entry.status}' wants a {need.rstrip('s')}"
                         for need in sorted(known[1]) if not getattr(entry, need)]
            problems += [f"{section}: {key}: there is no test {test}" for test in entry.tests if not _exists(test)]
            for name in key.split(", "):
                if (section, name) in data:
                    problems.append(f"{section}: {name} has two entries")
                data[section, name] = entry
    return data, problems


def _entry(section: str, key: str, text: str) -> Entry:
    """'same test_a.py::test_b ::test_c A note.': the status, tests, of which '::' goes on with the file of the one
    before, and a note."""
    status, *words = text.split() or [""]
    tests: List[str] = []
    while words and "::" in words[0]:
        file, _, name = words.pop(0).partition("::")
        tests.append(f"{file or tests[-1].partition('::')[0]}::{name}")
    return Entry(status, tuple(tests), " ".join(words), section, key)


def _place(row: Row, rows: Dict[Tuple[str, str], Row], data: dict) -> Optional[Tuple[str, str]]:
    """Where the entry for a row stands: at its own name, its class or object, its whole module, else where it comes
    from."""
    if "object" in row.facts:
        owner = row.facts["object"]
    else:
        owner = row.name if row.section in SECTIONS else row.name.split(".")[0]
    for name in (row.name, owner, "*"):
        if (row.section, name) in data:
            return row.section, name
    if row.origin is None or row.origin == (row.section, row.name):
        return None
    if row.origin in data:
        return row.origin
    section, name = row.origin
    origin = rows.get(row.origin) or Row(section, name, {})
    return _place(origin, rows, data)


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in _tests_of(file)


@functools.lru_cache(maxsize=None)
def _tests_of(file: str) -> frozenset:
    """The tests in a file: functions test_... and check_... in Python, Suite.Name in C++."""
    path = path_of(file)
    if path is None:
        return frozenset()
    if path.suffix == ".cc":
        return frozenset(map(".".join, re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", path.read_text(), re.M)))
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.FunctionDef) and node.name.startswith(("test_", "check_")))


@functools.lru_cache(maxsize=None)
def path_of(file: str) -> Optional[Path]:
    return next((path for folder in TEST_FOLDERS for path in folder.rglob(file)), None)

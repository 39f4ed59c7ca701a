"""python -m lightcc.as_horovod --install, --uninstall: makes `import horovod` mean lightcc in a whole environment.

Beside lightcc, in the same site-packages, it puts what pip would put there for a package named horovod: a .pth file, by
which every Python of the environment does as_horovod.install() as it starts, whatever its PYTHONPATH; the metadata, so
that what asks for horovod>=0.21 finds it; and the command horovodrun. The metadata's RECORD lists all of it, so
`pip uninstall horovod` takes it away as --uninstall does, also when lightcc is gone. The metadata name the version of
Horovod whose API lightcc has, or the one that packages here require: --install --version 0.27.0.
"""
import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import sysconfig
from importlib.machinery import PathFinder
from typing import Dict, List, Optional

from lightcc._version import __version__
from lightcc.as_horovod import FOLDER, HOROVOD_VERSION, INSTALLER, infos, is_ours, metadata

PTH = "lightcc_as_horovod.pth"
# Python runs a line of a .pth file that begins with "import". Without lightcc it must do nothing and say nothing.
PTH_LINE = ("import sys; exec('try:\\n from lightcc.as_horovod import install\\nexcept ImportError:\\n pass\\n"
            "else:\\n install()')\n")
SCRIPT = """{first_line}
# horovodrun of lightcc {version}: lightccrun --as-horovod.
import sys
from lightcc.runner.horovodrun import main
sys.exit(main())
"""
SHEBANG_LENGTH = 127  # what Linux before 5.1 reads of a first line
# The versions that Horovod has had: the last of 0.9.x, of 0.10.x and so on.
LAST_PATCH = {9: 12, 10: 2, 11: 3, 12: 1, 13: 11, 14: 1, 15: 2, 16: 4, 17: 1, 18: 2, 19: 5, 20: 3, 21: 3, 22: 1, 23: 0,
              24: 3, 25: 0, 26: 1, 27: 0, 28: 1}


class Refused(Exception):
    """Why nothing was done."""


class Environment:
    """An environment of Python: its site-packages folder and the folder of its commands."""

    def __init__(self, site: str, scripts: str):
        self.site, self.scripts = site, scripts
        self.horovodrun = os.path.join(scripts, "horovodrun")

    def ours(self) -> List[str]:
        """The metadata that an earlier --install has written."""
        return [info for info in infos([self.site]) if is_ours(info)]


def this_environment() -> Environment:
    """That of the lightcc which runs this; Refused if it was not installed there by pip or its like."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [home]
    try:  # of an editable install
        folders.append(str(importlib.metadata.distribution("lightcc").locate_file("")))
    except importlib.metadata.PackageNotFoundError:
        pass
    names = sysconfig.get_scheme_names()
    preferred = [name for name in names if sysconfig.get_paths(name) == sysconfig.get_paths()]
    for folder in folders:
        for scheme in [*preferred, *names]:
            paths = sysconfig.get_paths(scheme)
            if os.path.realpath(folder) in (os.path.realpath(paths["platlib"]), os.path.realpath(paths["purelib"])):
                return Environment(folder, paths["scripts"])
    raise Refused(f"lightcc is in {home}, which is no folder where {sys.executable} looks for installed packages and "
                  "their .pth files. Install lightcc with pip first; without that, `lightccrun --as-horovod` and "
                  "`python -m lightcc.as_horovod script.py` work from anywhere.")


def install(version: str = HOROVOD_VERSION) -> List[str]:
    """Puts the files there, over those of an earlier --install; returns what was done, line by line."""
    _check(version)
    where = this_environment()
    _refuse_beside_another(where)
    before = where.ours()
    info = os.path.join(where.site, f"horovod-{version}.dist-info")
    files = _files(where, info, version)
    written: List[str] = []
    try:
        os.makedirs(where.scripts, exist_ok=True)
        os.makedirs(info, exist_ok=True)
        for path, text in files.items():
            _write(path, text, executable=path == where.horovodrun)
            written.append(path)
        for other in before:
            if other != info:
                shutil.rmtree(other)
    except OSError as error:
        if not before:
            _remove(written)
        if info not in before:
            shutil.rmtree(info, ignore_errors=True)
        raise Refused(f"cannot write there: {error}. Run this as who installed lightcc.") from None
    lines = [f"In {where.site} `import horovod` is lightcc {__version__} from now on"
             + (", as it was before:" if info in before else ":"),
             *(f"  {path}" for path in (os.path.join(where.site, PTH), info, where.horovodrun)),
             "To undo it: python -m lightcc.as_horovod --uninstall, or pip uninstall horovod."]
    if where.scripts not in os.environ.get("PATH", "").split(os.pathsep):
        lines.append(f"Note: {where.scripts} is not in PATH.")
    return lines


def uninstall() -> List[str]:
    """Takes them away; returns what was done."""
    where = this_environment()
    found, ours = infos([where.site]), where.ours()
    if not found:
        return [f"In {where.site} lightcc does not stand in for Horovod; there is nothing to undo."]
    if not ours:
        raise Refused(f"{found[0]} is not lightcc's. To remove it: pip uninstall horovod.")
    try:
        _remove([os.path.join(where.site, PTH), where.horovodrun])
        for info in ours:
            shutil.rmtree(info)
    except OSError as error:
        raise Refused(f"cannot remove: {error}. Run this as who installed lightcc.") from None
    return [f"In {where.site} lightcc does not stand in for Horovod any more. Removed:",
            *(f"  {path}" for path in (os.path.join(where.site, PTH), *ours, where.horovodrun))]


def _refuse_beside_another(where: Environment) -> None:
    """Refused if there is a Horovod, or a command horovodrun, that is not what install() has put there."""
    for found in importlib.metadata.distributions(name="horovod"):
        folder = os.path.dirname(str(found.locate_file("horovod")))
        if folder != FOLDER and not (os.path.realpath(folder) == os.path.realpath(where.site) and where.ours()):
            raise Refused(f"horovod {found.version} is installed in {folder}. Two cannot be: pip uninstall horovod "
                          "first. To use lightcc beside it: lightccrun --as-horovod.")
    # The working directory does not count, where `python -m` looks first.
    folders = [folder for folder in sys.path if folder not in ("", FOLDER, os.getcwd())]
    spec = PathFinder.find_spec("horovod", folders)
    if spec is not None and spec.origin:
        raise Refused(f"there is a package horovod in {os.path.dirname(spec.origin)}. Remove it first; or, to use "
                      "lightcc beside it: lightccrun --as-horovod.")
    if os.path.lexists(where.horovodrun) and "lightcc.runner.horovodrun" not in _read(where.horovodrun):
        raise Refused(f"there is another {where.horovodrun}. Remove it first; or use lightccrun --as-horovod.")


def _check(version: str) -> None:
    """Refused if Horovod never had that version: what requires one would be told of something that is not there."""
    parts = version.split(".")
    known = len(parts) == 3 and all(part.isdecimal() and part == str(int(part)) for part in parts) and parts[0] == "0" \
        and int(parts[2]) <= LAST_PATCH.get(int(parts[1]), -1)
    if not known:
        raise Refused(f"Horovod never had a version {version[:40]!r}. Name one that it had, such as 0.27.0, or leave "
                      f"out --version for {HOROVOD_VERSION}, whose API lightcc has.")


def _files(where: Environment, info: str, version: str) -> Dict[str, str]:
    """What each file says, by its path."""
    texts = {
        **metadata(version),
        "INSTALLER": INSTALLER + "\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: lightcc {__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\nhorovodrun = lightcc.runner.horovodrun:main\n",
        "REQUESTED": "",  # by the user, and not because another package wants it
    }
    files = {os.path.join(where.site, PTH): PTH_LINE,
             where.horovodrun: SCRIPT.format(first_line=_first_line(), version=__version__),
             **{os.path.join(info, name): text for name, text in texts.items()}}
    files[os.path.join(info, "RECORD")] = _record(files, where.site, info)  # the last: without it nothing is installed
    return files


def _first_line() -> str:
    line = f"#!{sys.executable}"
    if len(line) <= SHEBANG_LENGTH and " " not in line:
        return line
    # A shell reads line 2 as a command, Python as a string.
    return f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''"


def _record(files: Dict[str, str], site: str, info: str) -> str:
    """PEP 376's list of files: path from site-packages, hash, bytes."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.writerow([os.path.relpath(path, site), f"sha256={digest}", len(text.encode())])
    rows.writerow([f"{os.path.basename(info)}/RECORD", "", ""])
    return out.getvalue()


def _write(path: str, text: str, executable: bool) -> None:
    """Whoever reads the file meanwhile finds the old one or the new one."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    if executable:
        os.chmod(f"{path}.new", 0o777 & ~_umask())
    os.replace(f"{path}.new", path)


def _umask() -> int:
    before = os.umask(0o022)
    os.umask(before)
    return before


def _remove(paths: List[str]) -> None:
    for path in paths:
        if os.path.lexists(path):
            os.unlink(path)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main(words: List[str]) -> Optional[str]:
    """Does what the words say; returns what to end the program with."""
    rest, version = words[1:], HOROVOD_VERSION
    if words[0] == "--install" and rest and rest[0].startswith("--version="):
        version, rest = rest[0].partition("=")[2], rest[1:]
    elif words[0] == "--install" and rest and rest[0] == "--version":
        if len(rest) == 1:
            return "--version: say which, such as --install --version 0.27.0"
        version, rest = rest[1], rest[2:]
    if rest:
        after = "--version and a version" if words[0] == "--install" else "nothing"
        return f"{words[0]} takes {after} after it, not {' '.join(rest)!r}"
    try:
        print("\n".join(install(version) if words[0] == "--install" else uninstall()))
    except Refused as refused:
        return f"lightcc {words[0]}: nothing was changed: {refused}"
    return None

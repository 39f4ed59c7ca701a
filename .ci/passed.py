"""Which stages of .ci/run have passed on this machine with the very content that the checkout has now.

    passed.py show STAGE          prints when, and what was kept; exit status 1 if the stage has not passed with it
    passed.py keep STAGE [TEXT]   it has passed just now

The key is a hash of all that a stage reads: the tracked files, as they are in the working tree, the versions of the
tools, and the kernel. Records are one file each in ~/.cache/lightcc-ci (XDG_CACHE_HOME); `rm -r` forgets them all.
"""
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("LIGHTCC_CI_ROOT") or Path(__file__).resolve().parent.parent)
CORE = ("csrc harp_plugin tests/main.cc tests/labels.h tests/corpus.h tests/contracts tests/unit tests/harp "
        "tests/regressions tests/fuzz CMakeLists.txt Makefile .ci")
# What a stage reads; one that is not here reads every tracked file. What COUNTS_NOT names counts for stage docs alone.
READS = {"sanitize": CORE, "fuzz": CORE, "planted": CORE + " lightcc pyproject.toml",
         "wheel": "csrc harp_plugin lightcc CMakeLists.txt Makefile MANIFEST.in README.md pyproject.toml setup.py .ci"}
COUNTS_NOT = re.compile(r"(CHANGELOG\.md|docs/.*\.png)")
TOOLS = (["c++", "--version"], ["clang++", "--version"], ["cmake", "--version"])
CHOICES = ("CXX", "CXXFLAGS", "PYTHON", "UNITY")


def version(command: list) -> str:
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    except OSError:
        return "none"


def key(stage: str) -> str:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *READS.get(stage, ".").split()], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.split("\0"))):
        if COUNTS_NOT.fullmatch(name) and stage != "docs":
            continue
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b"gone"
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    machine = [platform.release(), platform.python_version(), *map(version, TOOLS),
               *(f"{name}={os.environ.get(name)}" for name in CHOICES)]
    digest.update("\0".join(machine).encode())
    return digest.hexdigest()


def record(stage: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "lightcc-ci" / f"{stage}-{key(stage)}"


def main() -> int:
    what, stage, *text = sys.argv[1:]
    path = record(stage)
    if what == "keep":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(time.strftime("%Y-%m-%d %H:%M") + "".join(f", {one}" for one in text) + "\n")
        return 0
    if not path.exists():
        return 1
    print(path.read_text().strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())

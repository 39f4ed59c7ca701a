"""Libraries of wheels that tests need and nothing is installed for: pip puts them into build, where they stay."""
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[1] / "build"
PIP_S = 900


def library_of(wheel: str, kind: str, pattern: str) -> Path:
    """The library that fits the pattern in a wheel such as "name==1.2", kept in build/<kind>. Skips the test where the
    wheel cannot be had."""
    folder = BUILD / kind / wheel.replace("==", "-")

    def find():
        return [path for path in folder.glob(pattern) if ".alt." not in path.name]

    if not find():
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                 "--no-compile", "--only-binary", ":all:", "--target", str(folder), wheel],
                capture_output=True, text=True, timeout=PIP_S, check=False)
            why = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"pip was not done after {PIP_S} s"
        if why or not find():
            pytest.skip(f"missing: {wheel} ({(why or 'it has no library').splitlines()[-1]})")
    return find()[0]

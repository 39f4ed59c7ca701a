"""Runs a program of docs/clusters.md, by its heading."""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DEADLINE_S = 600
PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
PROGRAMS = {section.partition("\n")[0]: section.partition("```python\n")[2].partition("```")[0]
            for section in PAGE.split("\n## ")[1:]}


def run(title, said, folder, **variables):
    """said: a pattern of its standard output."""
    path = folder / "program.py"
    path.write_text(PROGRAMS[title])
    with tempfile.TemporaryDirectory(prefix="lightcc-", dir="/tmp") as own:  # no cluster of other tests is found there
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}  # of a session
        done = subprocess.run([sys.executable, str(path)], env={**inherited, "RAY_TMPDIR": own, **variables},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout), done.stdout + done.stderr

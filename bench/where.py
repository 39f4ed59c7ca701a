"""Where, with what and how a benchmark ran: what somebody needs who wants to see the same numbers; and how they are
printed."""
import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

RESULTS = Path(__file__).resolve().parents[1] / "build" / "bench"  # where results go, wherever it was started


def surroundings(np: int, versions: List[str]) -> Dict[str, Any]:
    """Ask before the ranks are started: the load is that of others."""
    def git(*words: str) -> str:
        home = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, check=False).stdout.strip()

    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
              if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.machine(), "cores": len(os.sched_getaffinity(0)), "ranks": np,
            "kernel": platform.release(), "load_before": os.getloadavg()[0], "python": platform.python_version(),
            "versions": versions,
            "commit": (git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "-s") else "")) or "unknown",
            "command": shlex.join(["python", *sys.argv])}


def leave_checkout() -> None:
    """Before lightcc.run: ranks look for modules first where they are started, and the checkout's folder lightcc has no
    library."""
    os.chdir(Path(__file__).parent)


def heading(where: Dict[str, Any]) -> str:
    return (f"{where['ranks']} ranks on {where['cores']} cores, {where['cpu']}, Linux {where['kernel']}, load "
            f"{where['load_before']:.1f}; {', '.join(where['versions'])}; commit {where['commit']}")


def version(*packages: str) -> Optional[str]:
    """Of the first that is installed. Nothing is imported: a framework would fill this process with threads."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def table_row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"

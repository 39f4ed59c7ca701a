"""The processes of bench/embedding.py: each side in an environment of its own, all on one core, asked by turns."""
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from peers.peer import VENVS, Unavailable

HERE = Path(__file__).parent


class Environment(NamedTuple):
    """pip's arguments, one call each. Left empty: this Python's own environment."""
    installs: List[List[str]]


ENVIRONMENTS: Dict[str, Environment] = {
    "lightcc": Environment([]),
    "torch": Environment([]),
    "fbgemm": Environment([["torch==2.13.0", "numpy"], ["--no-deps", "fbgemm-gpu-cpu==1.8.0"]]),
    "tfra": Environment([["tensorflow==2.16.2", "tf-keras==2.16.0", "tensorflow-recommenders-addons==0.8.1"]]),
}


def python_of(side: str) -> str:
    """The Python of a side; BENCH_FBGEMM or BENCH_TFRA names another one."""
    if not ENVIRONMENTS[side].installs:
        return sys.executable
    return os.environ.get(f"BENCH_{side.upper()}", str(VENVS / f"embedding_{side}" / "bin" / "python"))


def install() -> None:
    """Makes the environments that are not there."""
    for side, environment in ENVIRONMENTS.items():
        python = python_of(side)
        if os.path.exists(python):
            continue
        subprocess.run([sys.executable, "-m", "venv", str(Path(python).parents[1])], check=True)
        for arguments in environment.installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


class Process:
    """A side (embedding_side.py), which sleeps while it is not asked."""

    def __init__(self, side: str, folder: Path, rows: int, dim: int, core: int, clock: str = "wall"):
        if not os.path.exists(python_of(side)):
            raise Unavailable(f"{python_of(side)} is not there; --install makes it")
        log = open(folder / f"{side}.log", "w")
        self._process = subprocess.Popen(
            [python_of(side), str(HERE / "embedding_side.py"), side, str(folder), str(rows), str(dim), str(core),
             clock],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        log.close()
        self._log = folder / f"{side}.log"
        self.version = self._answer()

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the process ended: {self._log.read_text()[-2000:]}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise Unavailable(answer["error"])
        return answer

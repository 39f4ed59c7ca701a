"""What `make gpu-test` and `make gpu-bench` have in common: lightcc is built, then parts run one after the other, each
with a time limit of its own, and whatever becomes of one, the next runs.

All output goes to NAME.log, what it amounts to into NAME.json, both in $OUT or else build/gpu. No network is needed,
and nothing is installed: the package is put together in build/gpu/site.
"""
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
CORE = str(SITE / "lightcc" / "_lightcc.so")
BUILDS = ("build", "compile")  # how the names of parts begin without which others cannot run
LEFT_OUT = 77         # exit code of what cannot run here, as of the scripts beside this file
LEAST_S = 10          # a part with less time left is not begun
TAIL_LINES = 12       # of the output of a part that fails
TOLD_LINES = 20       # of what is told of a part, and at the end TOLD_AGAIN of those
TOLD_AGAIN = 6
# What is worth telling of a part's output, rank by rank.
TOLD = re.compile(r"NCCL WARN|Duplicate GPU|by NCCL|through host memory, since|\d+ (?:passed|failed|error)|^E  |"
                  r"^FAILED|^ERROR|\w+Error: |LEFT OUT|Timeout|lightccrun: |: ok$|ERROR SUMMARY|MISSED")
TAG = re.compile(r"^\[\d+\]<std(?:out|err)>:")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


def gpu() -> Optional[Dict[str, str]]:
    """The first GPU of this machine, or None."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        if lines:
            return dict(zip(("gpu", "compute_capability", "driver"), map(str.strip, lines[0].split(","))))
    return None


def without_nvcc(path: str) -> str:
    """The path without folders of CUDA, not of the system: lightcc is built without it."""
    return os.pathsep.join(folder for folder in path.split(os.pathsep)
                           if not Path(folder, "nvcc").exists() or Path(folder, "sh").exists())


def said_by(*command: str) -> str:
    """The last line that a command prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT,
                              env={**os.environ, "PATH": PATH})
        return (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


class Parts:
    """name: of the files. limit_s: for all parts together. only: words, for parts whose names have one of them, but for
    those that build; none: all. Ends the program where there is no GPU."""

    def __init__(self, name: str, limit_s: float, only: Sequence[str] = ()):
        found = gpu()
        if found is None:
            print("LEFT OUT: no GPU")
            sys.exit(LEFT_OUT)
        self._deadline, self._only = time.monotonic() + limit_s, only
        folder = Path(os.environ.get("OUT") or BUILD)
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._json = folder / f"{name}.log", folder / f"{name}.json"
        self._log.write_bytes(b"")
        torch = "import torch; print(torch.__version__, 'NCCL', '.'.join(map(str, torch.cuda.nccl.version())))"
        self.report: Dict = {**found, "nvcc": said_by("nvcc", "--version"),
                             "torch": said_by(sys.executable, "-c", torch),
                             "commit": said_by("git", "describe", "--always", "--dirty"), "parts": []}
        print(", ".join(f"{key} {value}" for key, value in self.report.items() if key != "parts"), flush=True)

    def build(self) -> bool:
        """The libraries, and the package around them in SITE. Without it no other part can run."""
        ninja = ["-G", "Ninja"] if shutil.which("ninja", path=PATH) else []
        configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), *ninja, "-DLIGHTCC_TESTS=OFF"]
        compile_all = ["cmake", "--build", str(BUILD), "--target", "lightcc_libraries", "--parallel",
                       str(len(os.sched_getaffinity(0)))]
        package = SITE / "lightcc"
        steps = [configure, compile_all, ["rm", "-rf", str(SITE)], ["mkdir", "-p", str(SITE)],
                 ["cp", "-r", str(ROOT / "lightcc"), str(SITE)],
                 ["cmake", "--install", str(BUILD), "--prefix", str(package)]]
        return self.run("build", ["sh", "-exc", "\n".join(map(shlex.join, steps))], 240, PATH=without_nvcc(PATH))

    def compile_table(self, to: str) -> bool:
        """bench/gpu_table, as a library for Python."""
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-I", str(ROOT / "csrc"),
                   str(ROOT / "bench" / "gpu_table" / "table.cc"), "-o", to, "-ldl"]
        return self.run("compile gpu_table", command, 60, PATH=without_nvcc(PATH))

    def run(self, part: str, command: Sequence[str], limit_s: float, expected: str = "", table: str = "",
            **variables: str) -> bool:
        """Whether it has done well. expected: what must be in its output. table: a regular expression for the lines of
        it that are printed at the end. variables: of its environment."""
        if self._only and not part.startswith(BUILDS) and not any(word in part for word in self._only):
            return True
        begin = time.monotonic()
        limit_s = min(limit_s, self._deadline - begin)
        if limit_s < LEAST_S:
            self._add(part, "FAILED", 0, ["not run: no time is left"], [])
            return False
        code, text = self._output(part, command, limit_s, variables)
        lines = [TAG.sub("", line).rstrip() for line in text.splitlines()]
        told = list(dict.fromkeys(line[:300] for line in lines if TOLD.search(line)))
        if code is None:
            told.insert(0, f"not done after {limit_s:.0f} s")
        elif code == 0 and expected not in text:
            told.insert(0, f"it did not say {expected!r}")
            code = 1
        elif code not in (0, LEFT_OUT):
            told.insert(0, f"exit code {code}")
        result = {0: "ok", LEFT_OUT: "left out"}.get(code, "FAILED")
        if result == "FAILED":
            print("\n".join(line[:300] for line in lines[-TAIL_LINES:]), flush=True)
        self._add(part, result, time.monotonic() - begin, told,
                  [line for line in lines if table and re.search(table, line)])
        return code == 0

    def _output(self, part: str, command: Sequence[str], limit_s: float, variables: Dict[str, str]):
        """The exit code, None if the command was ended by us, and what it printed."""
        environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(SITE), "PYTHONUNBUFFERED": "1",
                       "OMP_NUM_THREADS": "1", **variables}
        with self._log.open("ab") as log:
            log.write(f"\n==== {part}: {shlex.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            # From tests, so that `import lightcc` does not find the source folder, which has no libraries.
            process = subprocess.Popen(command, cwd=ROOT / "tests", env=environment, stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            code = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, self._log.read_bytes()[start:].decode(errors="replace")

    def _add(self, part: str, result: str, seconds: float, told: List[str], table: List[str]) -> None:
        self.report["parts"].append({"part": part, "result": result, "seconds": round(seconds, 1),
                                     "told": told[:TOLD_LINES], "table": table})
        self._write()
        print(line_of(self.report["parts"][-1]), flush=True)

    def _write(self) -> None:
        self._json.write_text(json.dumps(self.report, indent=1, ensure_ascii=False))

    def finish(self) -> int:
        """Prints all parts; returns the exit code."""
        self._write()
        rows = self.report["parts"]
        for row in rows:
            if row["table"]:
                print("\n".join(["", f"{row['part']}:", *row["table"]]))
        print("\n" + "\n".join(map(line_of, rows)))
        for row in rows:
            if row["result"] == "FAILED":
                print("\n".join([f"{row['part']}:", *(f"  {line}" for line in row["told"][:TOLD_AGAIN])]))
        print(f"All of it: {self._json}, {self._log}")
        return int(any(row["result"] == "FAILED" for row in rows))


def line_of(row: Dict) -> str:
    told = row["told"][0 if row["result"] == "FAILED" else -1][:90] if row["told"] else ""
    return f"{row['part']:<34}{row['result']:<9}{row['seconds']:>6.1f} s  {told}".rstrip()

"""Runs Python on ranks, from a test. A launch whose ranks say nothing for a while, or wait for each other, is ended; it
leaves no process behind.

    @pytest.mark.parametrize("np", ranks.SIZES)
    def test_on_ranks(np):
        ranks.run_checks(__file__, np)

starts the file's own functions check_... under pytest on np ranks, every rank the same ones in the same order. The
first check that fails on a rank ends it, and so the job. Most of a rank's time goes into imports, so a session that has
several such files runs them on the same ranks; only when a check fails there, each of the others runs alone. A file
whose checks want ranks of their own calls the test test_on_fresh_ranks.

LIGHTCC_TEST_HOSTS="2,2" puts the ranks on emulated hosts (tests/multihost) with so many ranks each; fewer ranks are
still on several hosts, where there are at least two.
"""
import atexit
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Set, Tuple

import warm

SIZES = (1, 2, 3, 4)
DEADLINE_S = 300
_STALLED_S = 240      # ranks that have waited for each other so long end, and say for what
_STACKS_AFTER_S = 60  # a check that takes so long has its stacks printed
_TERM_S = 10
_SHOWN = 30_000       # characters of a rank's output

_Ranks = Tuple[Any, ...]                  # their number, and what they have in their environment
_together: Dict[_Ranks, List[str]] = {}   # the files that share such ranks and have not run yet
_passed: Set[Tuple[str, _Ranks]] = set()  # a file and on which ranks

_PYTEST = ["-m", "pytest", "-x", "-v", "-s", "--no-header", "--tb=short", "-p", "no:cacheprovider",
           "-o", "python_functions=check_*", "-o", f"faulthandler_timeout={_STACKS_AFTER_S}"]


def share(file: str, np: int, **variables: str) -> None:
    """Says that run_checks(file, np, **variables) will be called."""
    _together.setdefault(_ranks(np, variables), []).append(file)


def run_checks(file: str, np: int, only: str = "", deadline_s: float = DEADLINE_S, **variables: str) -> None:
    """Runs the checks of a file on np ranks; AssertionError with the ranks' output if one fails or they hang, which is
    when they say nothing for deadline_s.

    only: an expression for pytest's -k; these checks get ranks of their own. variables: of the ranks' environment.
    """
    kind = _ranks(np, variables)
    if not only and (file, kind) in _passed:
        return
    shared = _together.get(_ranks(np, {}), [])
    assert not variables or file not in shared or file in _together.get(kind, []), (
        f"{file}: ranks that share other files' checks lack {variables}; call this test test_on_fresh_ranks")
    files = _together.pop(kind) if not only and file in _together.get(kind, []) else [file]
    code, output = launch(np, [*_PYTEST, "-k", only, *files], deadline_s, **variables)
    names = ", ".join(map(os.path.basename, files))
    assert code == 0, f"{names} failed on np={np} ranks with exit code {code}:\n{_by_rank(output)}"
    _passed.update((file, kind) for file in files)


def _ranks(np: int, variables: Dict[str, str]) -> _Ranks:
    return (np, *sorted(variables.items()))


def run_script(text: str, np: int, deadline_s: float = DEADLINE_S, **variables: str) -> str:
    """Runs a program on np ranks and returns what they printed; AssertionError if it ends with another code than 0."""
    code, output = launch(np, ["-c", text], deadline_s, **variables)
    assert code == 0, f"the program failed on np={np} ranks with exit code {code}:\n{_by_rank(output)}"
    return output


# Each rank runs the programs of a file one after the other, and says which have passed.
_TOGETHER = """
import json, os, sys
from lightcc.core import job
with open(sys.argv[1]) as programs:
    programs = json.load(programs)
for title, text in programs.items():
    exec(compile(text, title, "exec"), {"__name__": "__main__"})
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    job.shutdown()
    sys.stdout.write(f"\\npassed {title}\\n")
    sys.stdout.flush()
"""


def passed_together(programs: Dict[str, str], np: int, folder: Path) -> Set[str]:
    """The titles of those that pass when the same np ranks run all, in a folder of their own, since most of a rank's
    time goes into imports. They end with the first that fails: each of the others is to run alone."""
    (folder / "programs.json").write_text(json.dumps(programs))
    there = os.getcwd()
    os.chdir(folder)
    try:
        _, output = launch(np, ["-c", _TOGETHER, "programs.json"], DEADLINE_S)
    finally:
        os.chdir(there)
    said = [line.partition(">:passed ")[2] for line in output.splitlines()]
    return {title for title in programs if said.count(title) == np}


def launch(np: int, arguments: List[str], deadline_s: float, **variables: str) -> Tuple[int, str]:
    """Runs `python arguments...` on np ranks; returns the exit code of the job and its output, tagged by rank.
    AssertionError if it says nothing for deadline_s."""
    command = [sys.executable, "-m", "lightcc.runner", "-np", str(np), *_hosts(np), sys.executable, *arguments]
    environment = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(_STALLED_S), **os.environ, "OMP_NUM_THREADS": "1",
                   **variables}
    environment.pop("LIGHTCC_TEST_SIZES", None)  # it says which tests start ranks, not what these do
    launcher = warm.Popen(command, env=environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                start_new_session=True)
    said = 0
    try:
        while True:
            try:
                output, _ = launcher.communicate(timeout=deadline_s)
                return launcher.returncode, output
            except subprocess.TimeoutExpired as expired:
                before, said = said, len(expired.output or b"")
                if said == before:
                    raise AssertionError(
                        f"np={np}: nothing said for {deadline_s} s:\n{_by_rank(_end(launcher))}") from None
    finally:
        if launcher.poll() is None:
            _end(launcher)


def _hosts(np: int) -> List[str]:
    """What tells the launcher where the ranks are to be; nothing if that is this host."""
    slots = os.environ.get("LIGHTCC_TEST_HOSTS", "")
    if not slots:
        return []
    hosts, counts = _emulated(slots)
    taken = counts(np)
    if not taken:
        return []
    listed = ",".join(f"{host}:{count}" for host, count in taken.items())
    return ["-H", listed, "--launch-command", hosts.launch_command]


@functools.lru_cache(maxsize=None)
def _emulated(slots: str) -> Tuple[Any, Any]:
    """Hosts for all tests of this process, and how many ranks each of them takes."""
    sys.path.append(str(Path(__file__).parents[1] / "multihost"))
    import emulated
    if emulated.why_not():
        raise AssertionError(f"LIGHTCC_TEST_HOSTS={slots}: {emulated.why_not()}")
    sizes = [int(size) for size in slots.split(",")]
    hosts = emulated.Hosts(len(sizes), docker0=True).__enter__()
    atexit.register(hosts.__exit__)
    return hosts, functools.partial(emulated.spread, sizes)


def _end(launcher: "subprocess.Popen[str]") -> str:
    """Ends the launcher, which ends its ranks; they also end by themselves when it dies."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(launcher.pid, signum)
        try:
            return launcher.communicate(timeout=_TERM_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return "(no output: the launcher did not end after SIGKILL)"


def _by_rank(output: str) -> str:
    """The lines of one rank together; first the launcher's own, which name the rank that failed first."""
    parts: Dict[str, List[str]] = {}
    for line in output.splitlines():
        tag = re.match(r"\[(\d+)\]<std(?:out|err)>:", line)
        parts.setdefault(f"rank {tag.group(1)}" if tag else "", []).append(line[tag.end():] if tag else line)
    first = re.search(r"rank \d+", "\n".join(parts.get("", [])))
    order = sorted(parts, key=lambda who: (who != "", first is None or who != first.group(), who))
    return "\n".join(f"---- {who or 'launcher'}\n" + "\n".join(parts[who])[-_SHOWN:] for who in order)

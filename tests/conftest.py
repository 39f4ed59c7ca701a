"""For all tests: signals arrive as in a terminal, nothing is kept for later runs, and the end says what is missing."""
import collections
import os
import signal
import sys
import tempfile
from pathlib import Path

_kept = tempfile.TemporaryDirectory(prefix="lightcc-tests-")


def pytest_configure():
    """A shell's background jobs ignore SIGINT, and those of nohup SIGHUP, and so would all that tests start. With a
    handler here, which does nothing, programs that are started get the default action."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    os.environ.setdefault("LIGHTCC_CACHE_DIR", _kept.name)
    _spare_imports()


def pytest_collection_modifyitems(items):
    """Files that take long begin first, or one of them would run alone in the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _spare_imports():
    """quick_imports comes first here and in programs that tests start."""
    quick = str(Path(__file__).with_name("quick_imports"))
    sys.path[:] = [quick, *(folder for folder in sys.path if folder != quick)]
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", quick)]
    os.environ["PYTHONPATH"] = os.pathsep.join([quick, *others])


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ")
                                  for report in terminalreporter.stats.get("skipped", []))
    for reason, tests in sorted(reasons.items()):
        if reason.startswith("missing: "):  # multihost/needs.py
            terminalreporter.write_line(f"{reason}: {tests} tests skipped")

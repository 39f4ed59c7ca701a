"""For all tests: signals arrive as in a terminal, nothing is kept for later runs, and the end says what is missing."""
import collections
import os
import signal
import tempfile

_kept = tempfile.TemporaryDirectory(prefix="lightcc-tests-")


def pytest_configure():
    """A shell's background jobs ignore SIGINT, and those of nohup SIGHUP, and so would all that tests start. With a
    handler here, which does nothing, programs that are started get the default action."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    os.environ.setdefault("LIGHTCC_CACHE_DIR", _kept.name)


def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ")
                                  for report in terminalreporter.stats.get("skipped", []))
    for reason, tests in sorted(reasons.items()):
        if reason.startswith("missing: "):  # multihost/needs.py
            terminalreporter.write_line(f"{reason}: {tests} tests skipped")

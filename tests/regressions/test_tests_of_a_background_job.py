"""`nohup make test &` ignores SIGINT and SIGHUP, for which tests of signals waited in vain; and tests were skipped
without a word of what to install."""
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ACTIONS = "import signal as s; print(s.getsignal(s.SIGHUP) == s.SIG_DFL, s.getsignal(s.SIGINT).__name__)"


def run_pytest(file, *before):
    """What pytest says of a file with the hooks of all tests, started by a shell that has done something before."""
    command = ["sh", "-c", "; ".join([*before, 'exec "$@"']), "sh", sys.executable, "-m", "pytest", "-p", "conftest",
               "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, cwd=file.parent, env={**os.environ, "PYTHONPATH": str(TESTS)}, text=True,
                          timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_programs_that_tests_start_get_the_default_action(tmp_path):
    file = tmp_path / "test_children.py"
    file.write_text(f"""
import subprocess, sys
def test_children():
    out = subprocess.run([sys.executable, "-S", "-c", {ACTIONS!r}], stdout=subprocess.PIPE, text=True).stdout
    assert out == "True default_int_handler\\n"
""")
    code, output = run_pytest(file, "trap '' INT HUP QUIT")
    assert code == 0, output


def test_the_end_says_what_is_missing_and_for_how_many_tests(tmp_path):
    file = tmp_path / "test_skipped.py"
    file.write_text("""
import pytest
@pytest.mark.parametrize("number", range(3))
def test_skipped(number):
    pytest.skip("missing: nft (Debian, Ubuntu: apt-get install nftables)")
def test_of_another_keras():
    pytest.skip("Keras 3 has none")
""")
    code, output = run_pytest(file)
    assert code == 0, output
    lines = [line for line in output.splitlines() if "tests skipped" in line]
    assert lines == ["missing: nft (Debian, Ubuntu: apt-get install nftables): 3 tests skipped"], output

"""A program that is started warm sees and does what it does when it is started as ever."""
import os
import signal
import subprocess
import sys

import pytest
import warm

from jobs import DEADLINE_S

SHOWS = """
import os, signal, sys
print(__name__, sys.argv, sys.orig_argv, os.getcwd(), sys.path[0], sys.path[-1], sys.stdin.read())
print(sorted(os.environ.items()), sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1])
print([signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print([name for name in sys.modules if "lightcc" in name], os.getpid() == os.getsid(0))
print(open("/proc/self/environ").read().count("LIGHTCC_TEST_OF_WARM"), "of errors", file=sys.stderr)
"""
CHILDREN = """
import os, subprocess, sys
read, write = os.pipe()
for fds in ((), (write,)):
    child = subprocess.Popen([sys.executable, "-c", "import os, sys; print(os.getppid(), os.listdir('/proc/self/fd')); "
                              "sys.exit(3)"], stdout=subprocess.PIPE, text=True, process_group=0, pass_fds=fds,
                             preexec_fn=lambda: os.nice(1))
    said, _ = child.communicate()
    print(said.replace(str(os.getpid()), "parent"), child.returncode)
"""
LATE = """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.1), print("late"))).start()
"""
ENDS = {
    "no error": "print('the end', end='')",
    "an error": "def f(): 1 / 0\nf()",
    "an error, seen at exit": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value)))\n1 / 0",
    "a syntax error": "1 +",
    "what cannot be encoded": "print('\\udcff')",
    "a code": "raise SystemExit(7)",
    "a text": "import sys; sys.exit('why')",
    "a thread": LATE,
    "atexit": "import atexit; atexit.register(print, 'at the end')",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "an interrupt": "import os; os.kill(os.getpid(), 2)",
    "_exit, with something in the buffer": "import os, sys; sys.stdout.write('x'); os._exit(5)",
}


def ends(popen, *program, env=None, **options):
    """Code, output and errors of a program."""
    started = popen([sys.executable, *map(str, program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, **options,
                    env={**os.environ, "LIGHTCC_TEST_OF_WARM": "yes", "OMP_NUM_THREADS": "1", **(env or {})})
    out, err = started.communicate(b"input", DEADLINE_S)
    return started.returncode, out.decode(errors="replace"), err.decode()


def expect_alike(*program, **options):
    assert ends(warm.Popen, *program, **options) == ends(subprocess.Popen, *program, **options)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_ends(text, unbuffered):
    expect_alike("-c", text, env={"PYTHONUNBUFFERED": unbuffered})


def test_what_a_program_sees(tmp_path):
    (tmp_path / "module.py").write_text(SHOWS)
    path = os.pathsep.join([os.environ["PYTHONPATH"], "/nonesuch"])
    for program in (["-c", SHOWS, "a", "-b"], [tmp_path / "module.py", "c"], ["-m", "module", "d e"]):
        expect_alike(*program, cwd=tmp_path, start_new_session=True, env={"PYTHONPATH": path})


def test_what_a_program_starts(tmp_path):
    expect_alike("-c", CHILDREN)


def test_what_a_program_starts_does_not_end_what_it_has(tmp_path):
    """A folder that goes with it, what it does at exit, and its modules."""
    (tmp_path / "mine.py").write_text("print('mine')")
    child = "import os, sys; print('mine' in sys.modules, os.listdir(sys.argv[1]))"
    expect_alike("-c", f"""
import atexit, mine, os, subprocess, sys, tempfile
atexit.register(print, "at the end")
with tempfile.TemporaryDirectory() as folder:
    subprocess.call([sys.executable, "-c", {child!r}, folder])
    print(os.path.exists(folder), flush=True)
""", cwd=tmp_path, env={"PYTHONUNBUFFERED": "1"})


def test_it_is_warm_and_so_is_what_it_starts():
    modules = "import sys; print(*sys.modules)"
    for program in (modules, f"import subprocess, sys; subprocess.call([sys.executable, '-c', {modules!r}])"):
        assert "torch" in ends(warm.Popen, "-c", program)[1].split()
        assert "torch" not in ends(subprocess.Popen, "-c", program)[1].split()


def test_what_a_forked_process_cannot_be_is_started_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('early')")
    expect_alike("-c", "print('late')", env={"PYTHONPATH": str(tmp_path)})
    expect_alike("-O", "-c", "import sys; print(sys.flags)")
    other = "import os, sys; print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    expect_alike("-c", f"import subprocess, sys; subprocess.call([sys.executable, '-c', {other!r}], "
                       "env={'OMP_NUM_THREADS': '2'})")


def test_it_is_waited_for_and_ended():
    with warm.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        assert started.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.001)
        started.send_signal(signal.SIGTERM)
        assert started.wait(DEADLINE_S) == started.poll() == -signal.SIGTERM


def test_random_numbers_are_others_in_each_program():
    text = "import numpy, random; print(numpy.random.rand(), random.random())"
    first, second = (ends(warm.Popen, "-c", text)[1].split() for _ in range(2))
    assert not set(first) & set(second)

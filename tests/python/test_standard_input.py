"""Standard input goes to rank 0, wherever it is, and a terminal can be answered: a debugger works."""
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from jobs import DEADLINE_S, launch, program
from lightcc.launch.output import Sink, Tagger

HERE = ("-np", 2)
AWAY = ("-np", 2, "-H", "h1:1,h2:1", "--launch-command", "sh -c {command}")
SHOW = program("import hashlib; text = sys.stdin.buffer.read(); print(len(text), hashlib.md5(text).hexdigest())")
EMPTY = "0 d41d8cd98f00b204e9800998ecf8427e"


@pytest.mark.parametrize("where", [HERE, AWAY], ids=["here", "away"])
def test_a_file_and_a_pipe_reach_rank_0_and_no_other(where, tmp_path):
    """More than any window or pipe holds."""
    import hashlib
    text = os.urandom(1 << 20)
    (tmp_path / "text").write_bytes(text)
    expected = [f"[0]<stdout>:{len(text)} {hashlib.md5(text).hexdigest()}", f"[1]<stdout>:{EMPTY}"]
    with open(tmp_path / "text") as file:
        code, out, _ = launch(*where, *SHOW, stdin=file)
        assert code == 0 and sorted(out.splitlines()) == expected
    with subprocess.Popen(["cat", tmp_path / "text"], stdout=subprocess.PIPE) as cat:
        code, out, _ = launch(*where, *SHOW, stdin=cat.stdout)
        assert code == 0 and sorted(out.splitlines()) == expected


@pytest.mark.parametrize("where", [HERE, AWAY], ids=["here", "away"])
def test_input_that_nobody_takes_holds_nothing_up(where):
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        try:
            code, out, _ = launch(*where, *program("time.sleep(0.3 * (1 + rank)); print('done')"), stdin=yes.stdout)
        finally:
            yes.kill()
    assert code == 0 and sorted(out.splitlines()) == ["[0]<stdout>:done", "[1]<stdout>:done"]


def test_a_prompt_is_shown_before_its_line_has_ended():
    tagger = Tagger(b"T:")
    assert tagger.feed(b"one\n(Pdb) ") == b"T:one\n" and tagger.has_partial
    assert tagger.show_partial() == b"T:(Pdb) " and not tagger.has_partial
    assert tagger.feed(b"more") == b"more" and tagger.feed(b" text\nnew") == b" text\n"
    assert tagger.show_partial() == b"T:new"
    tagger.line_over()
    assert tagger.feed(b"next\n") == b"T:next\n"
    tagger.feed(b"end")
    assert tagger.show_partial() + tagger.finish() == b"T:end\n" and tagger.finish() == b""


def test_other_ranks_start_below_a_prompt_that_was_not_answered():
    reader, writer = os.pipe()
    sink = Sink(writer, "pipe")
    for owner, block in (("a", b"a? "), ("b", b"b\n"), ("a", b"a? ")):
        sink.put(owner, block)
    sink.line_over("a")  # the terminal shows what was typed, and the new line
    sink.put("b", b"b\n")
    assert os.read(reader, 4096) == b"a? \nb\na? b\n"
    os.close(reader)
    os.close(writer)


class Terminal:
    """A launcher in the foreground of a terminal of its own, as under a shell."""

    def __init__(self, *arguments):
        self.side, inside = os.openpty()

        def begin():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.launcher = subprocess.Popen([sys.executable, "-m", "lightcc.runner", *map(str, arguments)], stdin=inside,
                                         stdout=inside, stderr=inside, preexec_fn=begin,
                                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        os.close(inside)
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.launcher.kill()
        self.launcher.wait()
        os.close(self.side)

    def expect(self, pattern):
        """Returns what came until then, and forgets it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.text)):
            assert select.select([self.side], [], [], max(0, deadline - time.monotonic()))[0], self.text
            self.text += os.read(self.side, 4096).decode()
        before, self.text = self.text[:found.end()], self.text[found.end():]
        return before

    def type(self, text):
        os.write(self.side, text.encode())


@pytest.mark.parametrize("where", [("-np", 1), AWAY], ids=["here", "away"])
def test_a_debugger_works_in_a_terminal(where, tmp_path):
    (tmp_path / "train.py").write_text("""import os
secret = 6 * 7
if os.environ["HOROVOD_RANK"] == "0":
    breakpoint()
    print("went on")
""")
    with Terminal(*where, sys.executable, tmp_path / "train.py") as terminal:
        terminal.expect(r"\[0\]<stdout>:\(Pdb\) $")
        terminal.type("p secret\n")
        assert terminal.expect(r"\[0\]<stdout>:\(Pdb\) $").splitlines()[:2] == ["p secret", "[0]<stdout>:42"]
        terminal.type("c\n")
        terminal.expect(r"\[0\]<stdout>:went on")
        assert terminal.launcher.wait(DEADLINE_S) == 0


def test_ctrl_c_in_a_terminal_ends_the_job():
    with Terminal("-np", 1, *program("print('up'); time.sleep(600)")) as terminal:
        terminal.expect(r"\[0\]<stdout>:up")
        terminal.type("\x03")
        terminal.expect("lightccrun: interrupted by signal 2")
        assert terminal.launcher.wait(DEADLINE_S) == 130


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell():
    """It is neither stopped nor does it take what is typed."""
    shell = ('set -m; %s -m lightcc.runner -np 1 %s -c "import time; time.sleep(2)" & read line; echo "shell: $line"; '
             'wait $!; echo "code $?"' % (sys.executable, sys.executable))
    side, inside = os.openpty()

    def begin():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(["bash", "-c", shell], stdin=inside, stdout=subprocess.PIPE, preexec_fn=begin,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(inside)
    try:
        time.sleep(1.5)
        os.write(side, b"typed\n")
        out = process.communicate(timeout=DEADLINE_S)[0].decode()
    finally:
        process.kill()
        os.close(side)
    assert "shell: typed" in out and "code 0" in out, out

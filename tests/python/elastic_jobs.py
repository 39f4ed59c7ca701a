"""Jobs of elastic_training.py: how they are started, watched and read."""
import re
import sys
from pathlib import Path

from jobs import start

TRAINING = Path(__file__).with_name("elastic_training.py")


def job(tmp_path, *flags, passes=3, pause_s=0.0, **variables):
    return start(*flags, sys.executable, TRAINING, tmp_path, passes, TEST_PAUSE_S=str(pause_s), **variables)


def result(out):
    """extra samples, loss, and the world's size at each batch; of a job that has lost nothing."""
    (line,) = [line for line in out.splitlines() if ">:end " in line]
    match = re.search(r":end complete extra (\d+) same loss (\S+) sizes ([\d,]+)$", line)
    assert match, line
    return int(match[1]), float(match[2]), list(map(int, match[3].split(",")))


def workers(running):
    return [p for p in running.living() if str(TRAINING) in p.cmdline() and p.cmdline()[0] == sys.executable
            and "-m" not in p.cmdline()]


def printed(running, text):
    """Reads the job's output up to a line with this text."""
    assert found(running, text), f"the output ended before {text}"


def found(running, text):
    """Reads the job's output up to a line with this text; False: there is none."""
    while (line := running.process.stdout.readline().decode()) and text not in line:
        pass
    return bool(line)


def trained(running, batches=1):
    """Reads until so many more batches are done."""
    for _ in range(batches):
        printed(running, ":batch ")

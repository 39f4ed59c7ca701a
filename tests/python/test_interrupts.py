"""An interrupt that comes while the memory of an output is given back is raised, as anywhere else."""
import subprocess
import sys

DEADLINE_S = 120

# Python drops what is raised in __del__, and says so by sys.unraisablehook.
PROGRAM = """
import signal, sys
import lightcc.numpy as hvd
from lightcc.core import lib

dropped = []
sys.unraisablehook = dropped.append
hvd.init()

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for _ in range(200):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while not dropped:
            lib.alloc(64)
    except KeyboardInterrupt:
        pass
print(dropped)
"""


def test_an_interrupt_is_raised_whatever_is_freed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)

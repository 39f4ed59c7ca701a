"""Accelerate, the Trainer of Transformers, and Lightning over lightcc: what they learn is what they learn over gloo, to
the last bit, under every launcher."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emulated import Hosts
from jobs import DEADLINE_S, launch, start
from launchers import MPIRUN

JOB = str(Path(__file__).parent / "job.py")
PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
PROGRAMS = dict(re.findall(r"(?ms)^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE))
TRAINERS = ("accelerate", "accelerate_optimizer", "transformers", "lightning", "lightning_strategy")
RANK = re.compile(r'\["\w+", \d, .*?\]')
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def found(out, backend):
    """By trainer and rank, the loss and the weights in the end."""
    rows = [json.loads(line) for line in RANK.findall(out)]
    assert {row[4] for row in rows} == {backend}, out
    return {(name, rank): numbers for name, rank, *numbers, _ in rows}


@pytest.fixture(scope="module")
def over_gloo():
    code, out, err = launch("-np", 2, sys.executable, JOB, "gloo", *TRAINERS)
    assert code == 0, err
    numbers = found(out, "gloo")
    assert {*numbers} == {(name, rank) for name in TRAINERS for rank in range(2)}
    weights = {name: {numbers[name, rank][1] for rank in range(2)} for name in TRAINERS}
    assert all(len(sums) == 1 for sums in weights.values()), weights
    return numbers


def test_under_lightccrun(over_gloo):
    code, out, err = launch("-np", 2, sys.executable, JOB, "lightcc", *TRAINERS)
    assert code == 0 and found(out, "lightcc") == over_gloo, err


def test_on_two_hosts(over_gloo):
    with Hosts(2) as hosts:
        code, out, err = launch("-np", 2, "-H", "h0:1,h1:1", "--launch-command", hosts.launch_command, sys.executable,
                                JOB, "lightcc", "accelerate", "transformers")
    numbers = found(out, "lightcc")
    assert code == 0 and len(numbers) == 4 and numbers.items() <= over_gloo.items(), err


def test_under_torchrun(over_gloo):
    done = subprocess.run([sys.executable, *TORCHRUN, JOB, "lightcc", *TRAINERS], capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert done.returncode == 0 and found(done.stdout, "lightcc") == over_gloo, done.stderr


def test_under_mpirun(over_gloo):
    mpirun = MPIRUN["Open MPI 5"]
    if mpirun.why_not():
        pytest.skip(mpirun.why_not())
    done = subprocess.run([mpirun.program, "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, JOB,
                           "lightcc", "accelerate", "transformers"], capture_output=True, text=True, timeout=DEADLINE_S)
    numbers = found(done.stdout, "lightcc")
    assert done.returncode == 0 and len(numbers) == 4 and numbers.items() <= over_gloo.items(), done.stderr


@pytest.mark.parametrize("trainer", ("lightning", "lightning_strategy"))
def test_under_lightnings_launcher(over_gloo, trainer):
    done = subprocess.run([sys.executable, JOB, "lightcc", trainer], capture_output=True, text=True, timeout=DEADLINE_S)
    numbers = found(done.stdout, "lightcc")
    assert done.returncode == 0 and len(numbers) == 2 and numbers.items() <= over_gloo.items(), done.stderr


@pytest.mark.parametrize("trainer", ("accelerate", "lightning_strategy"))
def test_a_killed_rank_is_named(trainer):
    job = start("-np", 2, "--grace-period", DEADLINE_S, sys.executable, JOB, "lightcc", trainer, KILLED="1")
    code, _, err = job.finish()
    assert code == 137 and re.search(r"\[0\]<stderr>:.*HorovodInternalError.*rank 1 \(pid \d+\) on host", err), err


def test_there_are_programs():
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("title", PROGRAMS)
def test_the_programs_of_the_page(title):
    code, _, err = launch("-np", 2, sys.executable, "-c", PROGRAMS[title])
    assert code == 0, err


def test_a_group_that_accelerate_has_made():
    code, _, err = launch("-np", 2, sys.executable, "-c", """
from accelerate import Accelerator
import lightcc.torch.accelerate
Accelerator(cpu=True)
lightcc.torch.accelerate.init()
""")
    assert code == 1 and "there is a process group of backend 'gloo' already. Call init() before Accelerator()" in err


def test_an_accelerate_that_is_too_old():
    from lightcc.torch import accelerate
    with pytest.raises(ImportError, match=r"Accelerate 0.34.2 makes a process group of its own; 1.0 to 1.15 were test"):
        accelerate._check_version("0.34.2")

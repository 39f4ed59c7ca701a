"""Ranks on two emulated hosts that other projects' launchers have started: mpirun of three kinds, without mpi4py and
with it, torchrun, Slurm, and by hand. lightccrun: test_launch.py."""
import glob
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import needs
from emulated import Hosts
from jobs import Job
from launchers import MPI4PY, MPIRUN

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
EACH_RANK = [sys.executable, str(HERE / "each_rank.py")]
DIGITS = [sys.executable, str(HERE.parents[1] / "examples" / "pytorch_digits.py")]
STEPS = 12
LARGEST_DIFFERENCE = 2e-5  # of two losses of the example, as it has it itself
DEADLINE_S = 300
HEARD_S = 20    # of a death, on every rank
ENDED_S = 120   # after a death, with launcher and all


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(params=MPIRUN)
def mpirun(request):
    """The launcher; the test is skipped where it is not installed."""
    if MPIRUN[request.param].why_not():
        pytest.skip(MPIRUN[request.param].why_not())
    return MPIRUN[request.param]


def run(hosts, launcher, folder, each, argv, patient=False, **variables):
    """On each host so many ranks; the exit code and the errors. Nothing of this environment but what is needed to find
    lightcc goes to the other host."""
    variables = {"OMP_NUM_THREADS": "1", **variables}
    passed = [name for name in ("PYTHONPATH", "LIGHTCC_LIBRARY") if name in os.environ and name not in variables]
    job = Job(*launcher.command(hosts, folder, [*variables, *passed], each, argv, patient), **variables)
    code, out, err = job.finish(DEADLINE_S)
    return code, out + err


def saved(folder, ranks):
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def expect_tour(seen, each, mpi, said, hasty=False):
    """seen: what the ranks saved; said: what to show if it is not as it should be. hasty: the launcher may have killed
    the ranks beside the dead one before they could tell."""
    size = 2 * each
    everyone = float("1" * size)
    for me, mine in enumerate(seen):
        host, local = divmod(me, each)
        whole = [[me, size, local, each, host, 2], everyone]
        assert (mine.get("host"), mine.get("mpi4py"), mine.get("mpi")) == (f"h{host}", False, mpi), said
        assert mine["first"] == mine["again"] == whole, (mine, said)
        if each == 1:
            assert mine["part"] == [[0, 1, 0, 1, 0, 1], 10.0 ** me]
        else:
            assert mine["part"] == [[host, 2, 0, 1, host, 2], 101 * 10.0 ** local]
        if mpi:
            assert mine["turned"] == [[size - 1 - me, size, each - 1 - local, each, 1 - host, 2], everyone], said
    death = seen[-1]["death"]
    for me, mine in enumerate(seen[:-1]):
        if hasty and me >= each and "heard" not in mine:
            continue
        # Of the one that died, or of one that has heard of it first and ended.
        assert re.search(r"rank \d \(pid \d+\) on host h\d (died|left)", mine.get("error", "")), (me, mine, said)
        assert mine["heard"] - death < HEARD_S, (me, mine)
    assert time.monotonic() - death < ENDED_S, said


@pytest.mark.parametrize("each", [1, 2])
def test_worlds_under_mpirun(hosts, mpirun, each, tmp_path):
    code, said = run(hosts, mpirun, tmp_path, each, [*EACH_RANK, "tour", str(tmp_path)], patient=True)
    assert code != 0
    expect_tour(saved(tmp_path, 2 * each), each, True, said, hasty=mpirun is MPIRUN["MPICH"])


@pytest.mark.slow
def test_digits_under_mpirun_are_learnt_as_on_one_rank(hosts, mpirun, tmp_path):
    each = 1
    code, said = run(hosts, mpirun, tmp_path, each, [*DIGITS, "--steps", str(STEPS), "--output", str(tmp_path)])
    assert code == 0, said
    text = (tmp_path / "run.json").read_text()
    found = json.loads(text)
    assert found["ranks"] == 2 * each
    expected = one_rank(json.dumps(found["settings"], sort_keys=True), text)
    assert len(found["losses"]) == STEPS
    assert all(math.isclose(*pair, rel_tol=LARGEST_DIFFERENCE) for pair in zip(found["losses"], expected)), (
        found["losses"], expected)


_references = {}  # by settings


def one_rank(settings, run):
    """The losses of one rank that does what those of a run did; the same for all launchers."""
    if settings not in _references:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "run.json").write_text(run)
            done = subprocess.run([*DIGITS, "--output", folder, "--reference"], timeout=DEADLINE_S, text=True,
                                  capture_output=True)
            assert done.returncode == 0, done.stdout + done.stderr
            _references[settings] = json.loads((Path(folder) / "reference.json").read_text())["losses"]
    return _references[settings]


def test_some_ranks_meet_where_they_are_told_while_the_others_do_without(hosts, mpirun, tmp_path):
    code, said = run(hosts, mpirun, tmp_path, 2, [*EACH_RANK, "two", str(tmp_path)], LIGHTCC_STORE_ADDR="h0:4711")
    assert code == 0, said
    seen = saved(tmp_path, 4)
    assert seen == [{"world": [[0, 2, 0, 1, 0, 2], 1001.0]}, {}, {}, {"world": [[1, 2, 0, 1, 1, 2], 1001.0]}], said


def test_a_world_of_some_ranks_under_mpich_needs_all_ranks_to_call_init(hosts, tmp_path):
    if MPIRUN["MPICH"].why_not():
        pytest.skip(MPIRUN["MPICH"].why_not())
    code, said = run(hosts, MPIRUN["MPICH"], tmp_path, 2, [*EACH_RANK, "two", str(tmp_path)],
                     HOROVOD_START_TIMEOUT="2")
    assert code != 0 and "across hosts all must, also for a world of some of them" in said, said


def test_worlds_of_communicators(hosts, mpirun, tmp_path):
    packages = glob.glob(f"{MPI4PY}/lib/python*/site-packages")
    if not packages:
        pytest.skip(f"{needs.MISSING}mpi4py in {MPI4PY}; `make build/mpi` installs it")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), packages[0]])
    code, said = run(hosts, mpirun, tmp_path, 2, [*EACH_RANK, "by_mpi4py", str(tmp_path)], PYTHONPATH=path,
                     MPI4PY_LIBMPI=mpirun.libmpi)
    assert code == 0, said
    for me, mine in enumerate(saved(tmp_path, 4)):
        host, local = divmod(me, 2)
        whole = [[me, 4, local, 2, host, 2], 1111.0]
        assert mine["whole"] == mine["again"] == mine["without"] == whole, (mine, said)
        assert mine["part"] == [[1 - host, 2, 0, 1, 1 - host, 2], 101 * 10.0 ** local]
        assert mine["alone"] == [[0, 1, 0, 1, 0, 1], 10.0 ** me]
        assert mine["mpi"] == 1111.0
        assert mine["half"] == [1 + local, [local, 2 + local], 101 * 10.0 ** local]


def start_torchrun(hosts, node, argv):
    yield Job(*hosts.command(f"h{node}", [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node",
        "2", "--master-addr", "h0", "--master-port", "29500", "--no-python", *argv]))


def by_variables(of_rank):
    """Starts ranks by themselves, each with what this says of (rank, node, local rank)."""
    def start(hosts, node, argv):
        for local in (0, 1):
            yield Job(*hosts.command(f"h{node}", argv), **of_rank(2 * node + local, node, local))
    return start


def slurm(rank, node, local):
    """What srun sets, as far as it is read."""
    return {"SLURM_JOB_ID": "815", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "h[0-1]", "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}


def hand(rank, node, local):
    return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "4", "LIGHTCC_STORE_ADDR": "h0:4711", "LIGHTCC_SECRET": "guess"}


def torch_variables(rank, node, local):
    return {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}


OTHERS = {"torchrun": start_torchrun, "Slurm": by_variables(slurm), "LIGHTCC_STORE_ADDR": by_variables(hand),
          "MASTER_ADDR": by_variables(torch_variables)}


@pytest.mark.parametrize("launcher", OTHERS)
def test_worlds_without_mpirun(hosts, launcher, tmp_path):
    jobs = [job for node in (0, 1) for job in OTHERS[launcher](hosts, node, [*EACH_RANK, "tour", str(tmp_path)])]
    said = [job.finish(DEADLINE_S) for job in jobs]
    expect_tour(saved(tmp_path, 4), 2, False, said)

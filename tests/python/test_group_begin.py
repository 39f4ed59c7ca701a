"""How a process group over lightcc begins: under which launchers, beside gloo, and how torch finds the backend."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ranks
from jobs import DEADLINE_S, launch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch, torch.distributed as dist
import lightcc.torch.process_group
dist.init_process_group("lightcc")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size() == 2
print("done", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("init", ("env", pytest.param("file", marks=pytest.mark.slow)))
def test_torchrun(init, tmp_path):
    text = PROGRAM
    if init == "file":
        text = text.replace('"lightcc")\nx', f'"lightcc", init_method="file://{tmp_path}/meet", world_size=2, '
                            'rank=int(__import__("os").environ["RANK"]))\nx')
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(tmp_path / "program.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_inside_lightccrun(tmp_path):
    """Two worlds, of which the first says so."""
    (tmp_path / "program.py").write_text(PROGRAM)
    code, out, err = launch("-np", 2, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                            2, tmp_path / "program.py")
    assert code == 0 and out.count("done") == 4, err
    (line,) = [line for line in err.splitlines() if "torchrun was started inside" in line]
    assert line.startswith("[0]<stderr>:[lightcc WARNING rank 0 ") and "inside rank 0 of the 2 that lightccrun" in line


GLOO = """
import os, sys, torch, torch.distributed as dist
import lightcc.torch as hvd
def check(size):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size() == size, x
    dist.barrier()
    dist.destroy_process_group()
rank, size, local_rank, local_size = (int(os.environ[name]) for name in
                                      ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
dist.init_process_group("gloo")  # as Accelerate does
assert (dist.get_rank(), size, local_rank, local_size) == (rank, 2, rank, 2) and not hvd.is_initialized()
check(2)
dist.init_process_group("gloo")  # again: now it is lightcc that knows where to meet
check(2)
import lightcc.torch.process_group
dist.init_process_group("lightcc")
check(2)
hvd.shutdown()
hvd.init(comm=[rank])
dist.init_process_group("lightcc")  # of lightcc's world, which is a part of the job
check(1)
hvd.shutdown()
hvd.init()
assert (hvd.rank(), hvd.size()) == (rank, 2)
print("done", flush=True)
"""


def test_variables_of_lightccrun_are_those_of_torchrun():
    code, out, err = launch("-np", 2, sys.executable, "-c", GLOO)
    assert code == 0 and out.count("done") == 2, err


def without_launcher(program, *arguments):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI"))}
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True,
                          timeout=DEADLINE_S, env=plain)


# As torch.multiprocessing.spawn starts them, and Lightning.
SPAWNED = """
import os, sys, torch, torch.distributed as dist
for rank in range(2):
    if os.fork() == 0:
        break
else:
    sys.exit(any([os.wait()[1] for _ in range(2)]))
import lightcc.torch as hvd, lightcc.torch.process_group
for turn in range(2):
    dist.init_process_group("lightcc", init_method=f"file://{sys.argv[1]}/{turn}", rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size() == hvd.size() == 2 and hvd.rank() == hvd.local_rank() == rank
    dist.destroy_process_group()
"""


def test_ranks_of_which_torch_alone_knows(tmp_path):
    done = without_launcher(SPAWNED, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_does_not_come_to_the_store_is_named():
    done = without_launcher("""
import datetime, torch.distributed as dist, lightcc.torch.process_group
store = dist.HashStore()
dist.init_process_group("lightcc", store=store, rank=1, world_size=2, timeout=datetime.timedelta(seconds=1))
""")
    assert done.returncode == 1, done.stdout
    assert "HorovodInternalError: init_process_group: rank 0 has not come to torch's store within 1 s" in done.stderr


def test_a_group_of_some_ranks_needs_a_default_group_of_lightcc():
    ranks.run_script("""
import torch, torch.distributed as dist, lightcc.torch.process_group
dist.init_process_group("gloo")
group = dist.new_group(backend="lightcc")
x = torch.ones(1)
dist.all_reduce(x, group=group)
assert x.item() == 2
try:
    dist.new_group([dist.get_rank()], backend="lightcc", use_local_synchronization=True)
except ValueError as error:
    assert "default group" in str(error), error
else:
    raise AssertionError
""", 2)


def test_torch_finds_the_backend_of_an_installed_lightcc(tmp_path):
    """By its entry point, which loads nothing but two small modules and leaves gloo the default."""
    project = (ROOT / "pyproject.toml").read_text()
    entry = re.search(r'\[project.entry-points."torch.backends"\].*\nlightcc = "(.*)"', project)
    installed = tmp_path / "installed-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\nlightcc = {entry[1]}\n")
    program = """
import sys, torch, torch.distributed as dist
print(sorted(m for m in sys.modules if m.startswith("lightcc")))
assert dist.Backend("lightcc") == "lightcc" == dist.Backend.LIGHTCC
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
import os
os.environ.update(HOROVOD_RANK="0", HOROVOD_SIZE="1")
dist.init_process_group("lightcc")
x = torch.ones(1)
dist.all_reduce(x)
import lightcc.torch.process_group
dist.destroy_process_group()
"""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM"))}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
                          env={**plain, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['lightcc', 'lightcc._torch_backend', 'lightcc._version']"


def test_variables_of_mpirun():
    """Without RANK and MASTER_ADDR torch asks lightcc, which knows what Open MPI sets."""
    job = f"mpi-{os.getpid()}"
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM"))}
    started = [subprocess.Popen(
        [sys.executable, "-c", PROGRAM], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**plain, "LIGHTCC_JOB_ID": job, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
             "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) for rank in range(2)]
    try:
        for process in started:
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0 and "done" in output, output
    finally:
        for process in started:
            process.kill()

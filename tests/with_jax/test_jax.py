"""JAX's own collectives over lightcc: all of them, however the processes meet, and what is said when something fails.
"""
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import FLAX, SPAWNS, SUM, SUMS

import emulated
import lightcc
from jobs import DEADLINE_S, Job, kill, launch, start
from launchers import MPIRUN

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LIBRARY = str(Path(lightcc.__file__).with_name("liblightcc_jax.so"))


def alone(text, *arguments, **variables):
    """A program without a launcher, ended."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return subprocess.run([sys.executable, "-c", text, *arguments], env=environment, capture_output=True, text=True,
                          timeout=DEADLINE_S)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("np", (2, 3, 4))
def test_every_operation(np):
    code, out, err = launch("-np", np, sys.executable, HERE / "checks.py")
    assert code == 0, out + err
    assert out.count("check_objects_and_parameters done") == np


def expect_sums(out, ranks):
    for rank in range(ranks):
        assert f"{rank} of {ranks}: {sum(range(ranks))}" in out, out
    assert out.count("collectives True") == ranks, out


@pytest.mark.parametrize("np, begin", ((2, ""), (2, "jax.distributed.initialize()"),
                                       (1, "jax.distributed.initialize()")))
def test_a_program_that_does_not_know_lightcc(np, begin):
    program = SUM.format(before="", begin=begin)
    code, out, err = launch("-np", np, "--jax", "--as-horovod", sys.executable, "-c", program)
    assert code == 0, err
    if np > 1:
        expect_sums(out, np)
    else:
        assert "0 of 1: 0" in out, out


def test_children_of_a_rank_are_none(tmp_path):
    """A worker that reads data imports JAX too."""
    text = SUM.format(before="", begin="") + """
import subprocess
child = "import jax, sys; print('child of', jax.process_count(), 'lightcc' in sys.modules)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""
    code, out, err = launch("-np", 2, "--jax", sys.executable, "-c", text)
    assert code == 0 and out.count("child of 1 False") == 2, out + err
    script = tmp_path / "spawns.py"  # its children import it again
    script.write_text(SPAWNS)
    code, out, err = launch("-np", 2, sys.executable, script)
    assert code == 0 and out.count("child of 1, ones 2") == 2, out + err
    assert out.count("asked: lightcc.jax: a rank has started this process") == 2, out


def test_a_second_init():
    done = alone("import sys, lightcc.jax\nlightcc.jax.init(f'127.0.0.1:{sys.argv[1]}', 1, 0)\n"
                 "lightcc.jax.init(f'127.0.0.1:{sys.argv[1]}', 1, 0)\nlightcc.jax.init()\n"
                 "for given in (dict(num_processes=2), dict(local_device_ids=0)):\n"
                 "    try: lightcc.jax.init(**given)\n"
                 "    except (RuntimeError, ValueError) as error: print(type(error).__name__, error)", str(free_port()))
    assert done.returncode == 0, done.stderr
    said = (r"RuntimeError lightcc.jax.init\(num_processes=2\): the launcher or an earlier call has said 1, .*\n"
            r"ValueError lightcc.jax.init\(local_device_ids=0\): give .*\n")
    assert re.fullmatch(said, done.stdout), done.stdout


@pytest.mark.parametrize("how", ("Kubeflow", "jax.distributed", "lightcc.jax"))
def test_processes_that_no_launcher_has_placed(how):
    port = free_port()
    call = {"Kubeflow": "", "jax.distributed": "jax.distributed.initialize", "lightcc.jax": "lightcc.jax.init"}[how]
    begin = "import sys; " + (call and f"{call}('127.0.0.1:{port}', 2, int(sys.argv[1]))")
    program = SUM.format(before="import lightcc.jax", begin=begin)
    jobs = []
    for rank in range(2):
        more = dict(COORDINATOR_ADDRESS="127.0.0.1", COORDINATOR_PORT=str(port), NUM_PROCESSES="2",
                    PROCESS_ID=str(rank)) if how == "Kubeflow" else {}
        jobs.append(Job(sys.executable, "-c", program, str(rank), **more))
    for rank, job in enumerate(jobs):
        code, out, err = job.finish()
        assert code == 0 and f"{rank} of 2: 1" in out and "collectives True" in out, out + err


@pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not())
def test_on_two_hosts():
    with emulated.Hosts(2) as hosts:
        code, out, err = launch("-np", 3, "-H", "h0:1,h1:2", "--launch-command", hosts.launch_command, "--jax",
                                sys.executable, "-c", SUM.format(before="", begin=""), LIGHTCC_PORT_RANGE="20100-20140")
    assert code == 0, err
    expect_sums(out, 3)


def test_under_mpirun():
    mpirun = MPIRUN["Open MPI 5"]
    if mpirun.why_not():
        pytest.skip(mpirun.why_not())
    done = subprocess.run([mpirun.program, "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c",
                           SUM.format(before="import lightcc.jax", begin="")], capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    expect_sums(done.stdout, 2)


def test_one_process_is_a_world_of_one():
    done = alone(SUM.format(before="import lightcc.jax; assert lightcc.jax.size() == 1", begin=""))
    assert done.returncode == 0 and "0 of 1: 0" in done.stdout, done.stderr


def ended(fate, other="pass", *options, **variables):
    job = start("-np", 2, "--grace-period", DEADLINE_S, *options, sys.executable, "-c",
                SUMS.format(fate=fate, other=other), **variables)
    code, out, err = job.finish()
    ended_at = time.time()
    times = {word: float(at) for word, at in re.findall(r"(now|seen) ([\d.]+)", out)}
    return code, err, times.get("seen", 0) - times.get("now", 0), ended_at - times.get("now", 0)


def test_a_killed_process_is_named_at_once():
    code, err, seen_after, ended_after = ended("os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 137, err
    assert re.search(r"\[0\]<stderr>:[\w.]+Error: .*allreduce of tensor 'jax\.\d+\.\d+ of ranks 0, 1': rank 1 "
                     r"\(pid \d+\) on host \S+ died", err), err
    assert seen_after < 60 and ended_after < 90, "JAX itself would find out after 100 s, and abort"


def test_what_a_process_has_raised_is_told():
    code, err, *_ = ended("raise GeneratorExit('bad batch')  # which the program does not catch")
    assert code != 0 and "rank 1" in err and "has left (it ended with GeneratorExit: bad batch)" in err, err


def test_unequal_programs_are_told_apart():
    """However long one of them compiles, it is no deadlock before both wait."""
    job = start("-np", 2, sys.executable, "-c", SUMS.format(fate="gather(x)[0].block_until_ready()", other="pass"),
                stderr=subprocess.STDOUT, LIGHTCC_DEADLOCK_CHECK_SECONDS="1")
    said = b"deadlock: ranks wait for each other"
    line = next((one for one in job.process.stdout if said in one), b"").decode()
    kill(job.living())  # JAX would take SIGTERM for a notice of preemption and go on waiting
    _, out, _ = job.finish()
    for rank, kind in enumerate(("allreduce", "allgather")):
        assert re.search(rf"rank {rank} [^;]*waits in {kind} of tensor 'jax\.", line), line + out


@pytest.mark.parametrize("first, named, text", (("", None, "jax is there already"),
                                                ("jax.numpy.ones(1)", LIBRARY, "JAX has its devices already")))
def test_too_late(first, named, text):
    done = alone(f"import jax; {first}\nimport lightcc.jax", MPITRAMPOLINE_LIB=named)
    assert done.returncode == 1
    assert f"RuntimeError: import lightcc.jax comes too late: {text}" in done.stderr, done.stderr


def test_the_users_choice_stays():
    done = alone("import lightcc.jax, jax; print(jax.config.jax_cpu_collectives_implementation)",
                 JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")
    assert done.returncode == 0 and done.stdout.split() == ["gloo"]
    assert done.stderr.count("JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo: JAX's collectives do not run over lightcc") == 1


def test_several_devices_in_a_process():
    code, _, err = launch("-np", 2, sys.executable, "-c", "import lightcc.jax",
                          XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert code == 1 and "over lightcc a process has one CPU device" in err, err


def test_an_elastic_job():
    code, _, err = launch("-np", 2, "--min-np", 1, sys.executable, "-c", "import lightcc.jax")
    assert code == 1 and "lightcc.jax is not for elastic jobs" in err, err


def test_other_numbers_than_the_launchers():
    code, _, err = launch("-np", 2, sys.executable, "-c", "import lightcc.jax, jax\n"
                          "jax.distributed.initialize('h:1', 3, 0)")
    assert code == 1 and "initialize(num_processes=3): the launcher or an earlier call has said 2" in err, err


def test_a_jaxlib_without_mpi():
    done = alone("import jaxlib._jax as j; del j.make_mpi_collectives; import lightcc.jax", MPITRAMPOLINE_LIB=LIBRARY)
    assert done.returncode == 1 and "ImportError: lightcc.jax needs a jaxlib with the collectives 'mpi'" in done.stderr


def test_all_that_jaxlib_looks_up_is_there():
    asked = set()
    for path in Path(importlib.util.find_spec("jaxlib").origin).parent.glob("*.so"):
        asked |= set(re.findall(rb"\0((?:MPIX?ABI_\w+|mpiabi_version_\w+|mpiwrapper_\w+))(?=\0)", path.read_bytes()))
    symbols = subprocess.check_output(["readelf", "--wide", "--dyn-syms", LIBRARY], text=True)
    exported = {line.split()[7].encode() for line in symbols.splitlines() if len(line.split()) == 8}
    assert asked and asked <= exported, sorted(asked - exported)


def test_harp_serves_xlas_nccl_too():
    code, out, err = launch("-np", 1, "--jax", "--harp", "env")
    assert code == 0 and "NCCL_NET=HARP" in out and re.search(r"NCCL_NET_PLUGIN=/.*libnccl-net-harp.so", out), err


def test_the_example_learns_what_one_process_learns(tmp_path):
    example = [sys.executable, EXAMPLES / "jax_digits.py", "--output", tmp_path]
    code, out, err = launch("-np", 2, *example, "--epochs", 2)
    assert code == 0 and "test accuracy" in out, err
    done = subprocess.run([*map(str, example), "--reference"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0 and "same to float32 rounding" in done.stdout, done.stdout + done.stderr


def test_flax_learns_what_one_process_learns():
    """Its batch normalisation takes the statistics of the batch of all processes."""
    code, out, err = launch("-np", 2, sys.executable, "-c", FLAX)
    assert code == 0, err
    done = alone(FLAX)
    assert done.returncode == 0, done.stderr
    numbers = re.compile(r"(?:loss|mean) ([-\d.e]+)")
    expected = [float(one) for one in numbers.findall(done.stdout)]
    assert len(expected) == 31 and expected[29] < 0.7 * expected[0], expected
    for rank in range(2):
        of_rank = [float(number) for line in out.splitlines() if line.startswith(f"[{rank}]")
                   for number in numbers.findall(line)]
        assert of_rank == pytest.approx(expected, rel=1e-4, abs=1e-6), rank


def test_the_example_with_keras():
    code, out, err = launch("-np", 2, sys.executable, EXAMPLES / "jax_keras_digits.py", "--epochs", 2)
    found = re.search(r"2 process\(es\): test accuracy ([\d.]+)% of 288 images", out)
    assert code == 0 and found and float(found[1]) > 75, out + err


def test_the_program_of_the_page():
    page = (HERE.parents[1] / "docs" / "jax.md").read_text()
    code, out, err = launch("-np", 2, sys.executable, "-c", re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert code == 0 and "2 processes, [1. 1. 1. 1. 1. 1. 1. 1.]" in out, out + err

"""Scripts that say `import horovod`, run on lightcc as they are: what the import gives, and how Pythons hear of it."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from jobs import DEADLINE_S, launch
from lightcc.as_horovod import FOLDER, HOROVOD_VERSION, environment

pytestmark = pytest.mark.long

AS_HOROVOD = ("-m", "lightcc.as_horovod")


def python(*words, flags=(), stdin=None, **options):
    """Runs python -m lightcc.as_horovod with these words; its CompletedProcess."""
    variables = {**os.environ, **options.pop("variables", {})}
    return subprocess.run([sys.executable, *flags, *AS_HOROVOD, *map(str, words)], env=variables, text=True,
                          input=stdin, capture_output=True, timeout=DEADLINE_S, **options)


def printed(code, **options):
    """What this code prints as a script; it must end well and say nothing else."""
    done = python("-c", code, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


# What the names mean

def test_modules_and_objects_are_lightccs():
    assert printed("""
import horovod.torch as hvd
import lightcc.torch, lightcc.runner
assert hvd is lightcc.torch
import horovod
assert horovod.torch is hvd and horovod is not lightcc
from horovod.torch.mpi_ops import allreduce
assert allreduce is hvd.allreduce
from horovod.common.exceptions import HorovodInternalError
assert HorovodInternalError is lightcc.common.exceptions.HorovodInternalError
from horovod.common.util import gloo_built, is_version_greater_equal_than
from horovod.runner import run
assert run is horovod.run is lightcc.run is horovod.runner.run
import horovod.runner
assert horovod.runner is lightcc.runner
from horovod import torch as again
assert again is hvd
import importlib
assert importlib.reload(horovod.common.exceptions) is lightcc.common.exceptions
print(hvd.__name__, hvd.__spec__.name, hvd.__package__)
""") == "lightcc.torch lightcc.torch lightcc.torch\n"


def test_the_top_module_imports_no_framework():
    assert printed("import horovod, sys; print('torch' in sys.modules, horovod.__name__)") == "False horovod\n"


def test_an_optimizer_is_of_horovod():
    """By this word frameworks know one that is wrapped already."""
    pytest.importorskip("torch")
    code = """
import torch, {package}.torch as hvd
hvd.init()
made = hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0))
print(type(made), type(made).__bases__[0] is torch.optim.SGD)
"""
    assert printed(code.format(package="horovod")) == "<class 'horovod.torch.optimizer.SGD'> True\n"
    assert printed(code.format(package="lightcc")) == "<class 'lightcc.torch.optimizer.SGD'> True\n"


def test_version_is_horovods():
    assert printed("""
import horovod, importlib.metadata, sys
from packaging import version
assert version.parse("0.21") < version.parse(horovod.__version__) < version.parse("1")
print(horovod.__version__, importlib.metadata.version("horovod"), importlib.metadata.version("Horovod"))
names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
print(names.count("horovod"), len(names) > 1, importlib.metadata.packages_distributions()["horovod"]
      if sys.version_info >= (3, 10) else ["horovod"])
""") == (f"{HOROVOD_VERSION} {HOROVOD_VERSION} {HOROVOD_VERSION}\n1 True ['horovod']\n")


def test_the_version_is_the_manifests():
    manifest = json.loads((Path(__file__).parents[1] / "data" / "horovod_api.json").read_text())
    assert manifest["meta"]["horovod_version"] == HOROVOD_VERSION


def test_what_is_there_can_be_found_without_importing_it():
    assert printed("""
import importlib.util, sys
assert importlib.util.find_spec("horovod").origin.endswith("__init__.py")
spec = importlib.util.find_spec("horovod.torch")
print(spec.name, spec.parent, spec.submodule_search_locations is not None, "torch" in sys.modules)
print(importlib.util.find_spec("horovod.torch.mpi_ops").parent)
print(importlib.util.find_spec("horovod.no_such"), importlib.util.find_spec("horovod.torch.no_such"))
""") == "horovod.torch horovod.torch True False\nhorovod.torch\nNone None\n"


def test_what_lightcc_has_not_is_an_import_error_that_says_so():
    assert printed("""
for name in ("horovod.no_such", "horovod.no_such.part", "horovod.common.no_such"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name, error)
try:
    from horovod import no_such
except ImportError:
    print("not in horovod")
try:
    import horovod
    horovod.no_such
except AttributeError as error:
    print(error)
""") == """horovod.no_such lightcc, which stands in for Horovod here, has no horovod.no_such
horovod.no_such lightcc, which stands in for Horovod here, has no horovod.no_such
horovod.common.no_such lightcc, which stands in for Horovod here, has no horovod.common.no_such
not in horovod
module 'horovod' (provided by lightcc) has no attribute 'no_such'
"""


def test_an_import_that_fails_inside_lightcc_is_not_hidden():
    done = python("-c", "import sys; sys.modules['torch'] = None; import horovod.torch")
    assert done.returncode == 1 and "ModuleNotFoundError: import of torch halted" in done.stderr


def test_pickles_go_both_ways():
    """Of lightcc's classes, and such as name Horovod's modules because Horovod wrote them."""
    assert printed("""
import pickle
from horovod.common.exceptions import HorovodInternalError
from lightcc.common import exceptions
assert pickle.loads(pickle.dumps(HorovodInternalError("x"))).args == ("x",)
assert pickle.loads(b"chorovod.common.exceptions\\nHorovodInternalError\\n.") is exceptions.HorovodInternalError
print("ok")
""") == "ok\n"


REAL = "raise RuntimeError('the real Horovod was imported')"


@pytest.fixture
def real_horovod(tmp_path):
    """A folder with another horovod."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text(REAL)
    return tmp_path


@pytest.mark.parametrize("where", ["PYTHONPATH", "cwd"])
def test_lightccs_wins_over_an_installed_horovod_and_says_so_once(real_horovod, where):
    path = os.pathsep.join(filter(None, [str(real_horovod), os.environ.get("PYTHONPATH")]))
    options = {"variables": {"PYTHONPATH": path}} if where == "PYTHONPATH" else {"cwd": real_horovod}
    code = "from importlib.util import find_spec; find_spec('horovod'); import horovod; print(horovod.__version__)"
    done = python("-c", code, flags=("-W", "error"), **options)
    assert (done.returncode, done.stdout) == (0, HOROVOD_VERSION + "\n"), done.stderr
    assert done.stderr.count("\n") == 1 and "lightcc stands in for Horovod; the one in" in done.stderr
    options["variables"] = {**options.get("variables", {}), "HOROVOD_RANK": "1"}
    assert python("-c", code, **options).stderr == ""


# A script runs as if python had started it

SHOW = """
import sys
print(__name__, sys.argv, sys.path[0] == FIRST, "horovod" in sys.modules, sys.flags.optimize)
import horovod.common
class Mine: pass
import pickle
assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine and Mine.__module__ == "__main__"
sys.exit(7)
"""


def test_script_module_code_and_stdin(tmp_path):
    (tmp_path / "show.py").write_text(f"FIRST = {str(tmp_path)!r}{SHOW}")
    path = str(tmp_path / "show.py")
    script = python(path, "-x", "a b", flags=("-O",))
    assert (script.returncode, script.stdout) == (7, f"__main__ {[path, '-x', 'a b']} True False 1\n")
    module = python("-m", "show", "-x", cwd=tmp_path)
    assert (module.returncode, module.stdout) == (7, f"__main__ {[path, '-x']} True False 0\n")
    code = python("-OO", "-c", "FIRST = ''" + SHOW, "-x")
    assert (code.returncode, code.stdout) == (7, "__main__ ['-c', '-x'] True False 2\n")
    assert python("-", "-x", stdin="FIRST = ''" + SHOW).stdout == "__main__ ['-', '-x'] True False 0\n"


def test_traceback_and_signals_are_the_scripts_own(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("def fail():\n    raise KeyError('x')\n\nimport horovod\nfail()\n")
    done = python(script)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=DEADLINE_S,
                           env={**os.environ, **environment()})
    assert done.returncode == 1 and "KeyError" in done.stderr and done.stderr == plain.stderr
    assert python("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9


@pytest.mark.parametrize("flags", [["-X", "dev", "-m", "lightcc.as_horovod"], ["-um", "lightcc.as_horovod"],
                                   ["-umlightcc.as_horovod"], ["-mlightcc.as_horovod"]])
def test_flags_of_the_first_python_stay(flags):
    code = "import sys, horovod; print(sys.flags.dev_mode, sys.stdout.write_through)"
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert done.stdout == f"{'dev' in flags} {'u' in flags[0]}\n", done.stderr


def test_wrong_use_is_said():
    assert python().returncode == 1 and "say what to run" in python().stderr
    done = subprocess.run([sys.executable, "-E", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n"
                           "from lightcc import as_horovod; as_horovod.main(['x.py'])"],
                          capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and "-I and -E ignore PYTHONPATH" in done.stderr


# Other Pythons that hear of it

def test_children_hear_of_it(tmp_path):
    """Of multiprocessing in each way, and subprocesses through a shell."""
    script = tmp_path / "children.py"
    script.write_text("""
import multiprocessing, subprocess, sys

def version(queue):
    import horovod.common
    queue.put(horovod.__version__)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=version, args=(queue,))
        child.start()
        print(method, queue.get(timeout=120))
        child.join()
    code = "import horovod; print(horovod.__version__)"
    print(subprocess.check_output(["sh", "-c", f"exec {sys.executable} -c '{code}'"], text=True), end="")
""")
    v = HOROVOD_VERSION
    assert python(script).stdout == f"fork {v}\nspawn {v}\nforkserver {v}\n{v}\n"


def test_workers_of_a_data_loader_hear_of_it(tmp_path):
    script = tmp_path / "loader.py"
    script.write_text("""
import torch
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        import horovod.torch as hvd
        assert torch.utils.data.get_worker_info() is not None and hvd.__name__ == "lightcc.torch"
        return torch.tensor(i)

if __name__ == "__main__":
    import horovod.torch as hvd
    for method in ("fork", "spawn"):
        loader = DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print(torch.cat(list(loader)).tolist())
""")
    done = python(script)
    assert done.stdout == "[0, 1, 2, 3]\n" * 2, done.stderr


def test_the_users_own_sitecustomize_runs_and_is_the_one_that_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine'); value = 5")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code = "import horovod, sitecustomize; print(horovod.__version__, sitecustomize.value)"
    done = python("-c", code, variables={"PYTHONPATH": path})
    # The first line is of the Python that becomes the second one.
    assert (done.stdout, done.stderr) == (f"mine\nmine\n{HOROVOD_VERSION} 5\n", "")


@pytest.mark.parametrize("before, after", [
    ("", []), ("/a:/b", ["/a", "/b"]), (":/a", ["", "/a"]), (f"/a:{FOLDER}", ["/a"])])
def test_pythonpath_keeps_what_was_there(before, after, monkeypatch):
    """Also the working directory, which an empty name stands for; in an installed lightcc nothing else is added."""
    monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setattr("lightcc.launch.local.pythonpath_setting", dict)
    assert environment()["PYTHONPATH"].split(os.pathsep) == [FOLDER, *after]


def test_without_another_sitecustomize_there_is_none():
    code = "import sys; print('sitecustomize' in sys.modules); import sitecustomize"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    done = python("-c", code)
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode)
    assert done.stderr == plain.stderr


def test_it_works_where_the_start_was_not_ours(tmp_path):
    """The user's sitecustomize comes first, since a shell script put its folder before ours; and python -S."""
    (tmp_path / "sitecustomize.py").write_text("")
    code = "import sys, horovod.common.exceptions as e; print(sys.modules['horovod'].__version__, e.__name__)"
    for flags, first in ((["-S"], []), ([], [str(tmp_path)])):
        path = os.pathsep.join([*first, FOLDER, *sys.path[1:]])  # all of it, since -S leaves site-packages out
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True,
                              timeout=DEADLINE_S, env={**os.environ, "PYTHONPATH": path})
        assert (done.stdout, done.stderr) == (f"{HOROVOD_VERSION} lightcc.common.exceptions\n", "")


def test_a_python_without_lightcc_names_it_only_to_those_who_import_horovod(tmp_path):
    """-S keeps site-packages away; site is run by hand."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    code = (f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p or p == {FOLDER!r}]\n"
            "import site\n"
            "site.execsitecustomize(); print('started'); import horovod")
    for more, lines in ((), "started\n"), ((str(tmp_path),), "mine\nstarted\n"):
        done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=DEADLINE_S,
                              cwd="/", env={"PYTHONPATH": os.pathsep.join([FOLDER, *more])})
        assert done.stdout == lines and done.stderr.endswith("ModuleNotFoundError: No module named 'lightcc'\n")
        assert "Error in sitecustomize" not in done.stderr


def test_a_start_loads_little():
    """Every Python of the job pays for it."""
    done = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True,
                          timeout=DEADLINE_S, env={**os.environ, **environment()})
    loaded = set(done.stdout.split())
    assert "lightcc.as_horovod" in loaded
    assert loaded.isdisjoint({"typing", "re", "logging", "subprocess", "ctypes", "lightcc.core.lib", "lightcc.runner"})


# lightccrun --as-horovod

TELL = "import os, horovod.common.exceptions as e; print(os.environ['HOROVOD_RANK'], e.__name__)"


@pytest.mark.parametrize("how", ["python", "shell", "path"])
def test_ranks_hear_of_it(how, tmp_path):
    script = tmp_path / "tell.py"
    script.write_text(f"#!{sys.executable}\n{TELL}\n")
    script.chmod(0o755)
    command = {"python": [sys.executable, "-u", script], "path": [script],
               "shell": ["sh", "-c", f"cd /; {sys.executable} {script}; exit $?"]}[how]
    code, out, err = launch("-np", 2, "--as-horovod", *command)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:{rank} lightcc.common.exceptions" for rank in range(2)]


def test_ranks_hear_of_it_only_when_asked():
    code, _, err = launch("-np", 1, sys.executable, "-c", TELL)
    assert code == 1 and "No module named 'horovod'" in err


def test_an_exit_code_is_passed_on_through_as_horovod():
    code, _, err = launch("-np", 2, sys.executable, *AS_HOROVOD, "-c", "import horovod, sys; sys.exit(3)")
    assert code == 3, err


def test_run_from_a_script_that_says_horovod(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text("""
import horovod

def add(base):
    import horovod.torch as hvd
    hvd.init()
    return base + hvd.rank()

if __name__ == "__main__":
    print(horovod.run(add, args=(10,), np=2))
""")
    done = python(script)
    assert done.returncode == 0 and done.stdout == "[10, 11]\n", done.stdout + done.stderr


# Two scripts that were written for Horovod

SCRIPTS = Path(__file__).parents[1] / "horovod_scripts"
TRAINING_S = 240
TAG = re.compile(r"^\[\d+\]<stdout>:", re.MULTILINE)


def train(np, how, script, *arguments):
    """What the ranks of a job with this script printed, without their tags."""
    flags, start = (["--as-horovod"], []) if how == "flag" else ([], AS_HOROVOD)
    job = jobs.start("-np", np, *flags, sys.executable, *start, SCRIPTS / script, *arguments, OMP_NUM_THREADS="1")
    code, out, err = job.finish(TRAINING_S)
    assert (code, err) == (0, ""), out + err
    return TAG.sub("", out)


def of_all_ranks(pattern, out, np):
    """What the pattern finds must be the same on every rank, and is returned."""
    found = dict(re.findall(pattern, out))
    assert set(found) == {str(rank) for rank in range(np)} and len(set(found.values())) == 1, out
    return found["0"]


@pytest.mark.parametrize("np, how, arguments", [
    (1, "flag", ["--optimizer", "adam"]),
    (2, "module", ["--fp16-allreduce", "--gradient-predivide-factor", "2", "--num-workers", "1"]),
    pytest.param(2, "flag", ["--use-adasum", "--lr", "0.04"], marks=pytest.mark.slow),
])
def test_digits_learns(np, how, arguments):
    out = train(np, how, "pytorch_digits.py", *arguments)
    of_all_ranks(rf"Rank (\d) of {np} parameters: (\w+)", out, np)
    accuracy = [float(share) for share in re.findall(r"accuracy: ([\d.]+)%", out)]
    losses = [float(loss) for loss in re.findall(r"average loss: ([\d.]+)", out)]
    assert len(accuracy) == len(losses) == 8 and accuracy[-1] > 85 and losses[-1] < losses[0] / 2, out


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_like_one_that_was_not_interrupted(tmp_path):
    np = 2

    def run(folder, epochs):
        (tmp_path / folder).mkdir(exist_ok=True)
        out = train(np, "module", "pytorch_digits_resume.py", "--batches-per-allreduce", 2, "--epochs", epochs,
                    "--checkpoint-format", tmp_path / folder / "checkpoint-{epoch}.pt")
        start = re.search(r"Starts from epoch (\d+)", out)[1]
        epochs = re.findall(r"Epoch (\d) of \d: (loss (\S+) accuracy (\S+) lr \S+)", out)
        return int(start), epochs, of_all_ranks(r"Rank (\d) (lr .* momentum .* parameters .*)", out, np)

    start, whole, end = run("whole", 6)
    assert start == 0 and len(whole) == 6
    assert float(whole[-1][2]) < float(whole[0][2]) / 2 and float(whole[-1][3]) > 0.9, whole
    start, first, _ = run("parts", 3)
    assert start == 0 and first == whole[:3]
    assert run("parts", 6) == (3, whole[3:], end)


def expect_elastic_digits(script):
    """One of two workers dies in the second epoch, and whoever is left, or has come, ends the training."""
    job = jobs.start("-np", 2, "--min-np", 1, "--failures-per-host", 2, "--as-horovod", sys.executable,
                     SCRIPTS / script)
    while (line := job.process.stdout.readline().decode()) and "Epoch 0 " not in line:
        pass
    assert "Epoch 0 workers 2 " in line, line + job.process.stderr.read().decode()
    next(p for p in job.living() if jobs.command_of(p)[:2] == [sys.executable, str(SCRIPTS / script)]).kill()
    code, out, err = job.finish(TRAINING_S)
    assert code == 0 and "was killed by signal 9 (SIGKILL)" in err, out + err
    size = re.search(r"Rank 0 of (\d)", out)[1]
    of_all_ranks(rf"Rank (\d) of {size} parameters: (\w+)", TAG.sub("", out), int(size))
    assert re.findall(r"Epoch (\d)", out) == list("12345"), out
    assert float(re.search(r"Test accuracy: ([\d.]+)%", out)[1]) > 85, out


def test_elastic_digits():
    expect_elastic_digits("pytorch_elastic_digits.py")

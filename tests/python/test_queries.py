"""What a process can ask about itself and its job, under every launcher that is here, on one host; the life of a job
as far as no other rank matters; and the helpers of lightcc.common."""
import importlib.machinery
import json
import os
import pickle
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import ranks
from lightcc.core import exceptions, nccl_library, util
from lightcc.core.basics import HorovodBasics
from lightcc.core.cuda_arrays import OTHERS, Cupy

sys.path.append(str(Path(__file__).parents[1] / "multihost"))
from launchers import MPIRUN  # noqa: E402

DEADLINE_S = 200
NOT_INITIALISED = (r"^Horovod has not been initialized; use hvd\.init\(\)\. "  # which programs look for
                   r"lightcc is not initialised: call lightcc\.[a-z.]+\.init\(\) first$")  # who came last

# What each process prints to a file of its own, since launchers mix outputs. Whoever asks before init is told so.
PROGRAM = """
import importlib, json, os, sys
hvd = importlib.import_module(sys.argv[2])
if hvd.__name__ == "lightcc.torch":
    from lightcc.torch import mpi_ops
    hvd.is_homogeneous = mpi_ops.is_homogeneous
    from torch import ones
else:
    from numpy import ones
TOPOLOGY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous",
            "mpi_threads_supported")
BUILT = ("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled", "nccl_built", "cuda_built", "rocm_built",
         "ddl_built", "ccl_built")
def refused():
    texts = []
    for name in TOPOLOGY:
        try:
            getattr(hvd, name)()
        except ValueError as error:
            texts.append(str(error))
    return texts
built = {name: getattr(hvd, name)() for name in BUILT}
before = refused()
hvd.init()
topology = {name: getattr(hvd, name)() for name in TOPOLOGY}
inside = {name: getattr(hvd, name)() for name in BUILT}
assert hvd.allreduce(ones(3), op=hvd.Adasum).tolist() == [1, 1, 1]
hvd.shutdown()
with open(os.path.join(sys.argv[1], f"{topology['rank']}.json"), "w") as out:
    json.dump([before, topology, built, inside, refused()], out)
"""
PYTHON = [sys.executable, "-c", PROGRAM]
LIGHTCCRUN = [sys.executable, "-m", "lightcc.runner", "-np", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
ON_THIS_HOST = {  # mpirun's arguments for two ranks
    "Open MPI 4": ["--allow-run-as-root", "--oversubscribe", "-np", "2"],
    "Open MPI 5": ["--allow-run-as-root", "--map-by", ":oversubscribe", "-np", "2"],
    "MPICH": ["-n", "2"],
}
NOT_MPI = dict(mpi_built=False, mpi_enabled=False, gloo_built=True, gloo_enabled=True)
BY_MPI = dict(mpi_built=True, mpi_enabled=True, gloo_built=True, gloo_enabled=False)
NEVER = dict(rocm_built=False, ddl_built=False, ccl_built=False)
GPU = dict(cuda_built=True, nccl_built=0)  # no NCCL is installed for tests
OF_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI", "MPI_", "PRTE_", "TORCHELASTIC_", "SLURM_", "LIGHTCC_JOB_ID")


def started(folder, command, module="lightcc.numpy", **variables):
    """What each of the ranks saw through this module, in order."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    process = subprocess.Popen(
        [*command, *PYTHON, str(folder), module], env={**environment, "OMP_NUM_THREADS": "1", **variables}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def expect(seen, size, built, module="lightcc.numpy"):
    assert len(seen) == size
    for rank, (before, topology, outside, inside, after) in enumerate(seen):
        said = ("Horovod has not been initialized; use hvd.init(). lightcc is not initialised: call "
                f"{module}.init() first")
        assert before == after == [said] * len(topology)
        assert outside == inside == {**built, **NEVER, **GPU}
        assert topology == dict(rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1,
                                is_homogeneous=True, mpi_threads_supported=built["mpi_enabled"])


@pytest.mark.parametrize("command", [LIGHTCCRUN, TORCHRUN], ids=["lightccrun", "torchrun"])
def test_queries_where_no_mpi_is(command, tmp_path):
    expect(started(tmp_path, command), 2, NOT_MPI)


def test_queries_of_a_process_alone(tmp_path):
    expect(started(tmp_path, [], "lightcc.torch"), 1, NOT_MPI, "lightcc.torch")


def test_queries_of_a_rank_that_was_started_by_hand(tmp_path):
    expect(started(tmp_path, [], HOROVOD_RANK="0", HOROVOD_SIZE="1"), 1, NOT_MPI)


@pytest.mark.parametrize("mpirun", MPIRUN)
def test_queries_under_mpirun(mpirun, tmp_path):
    if MPIRUN[mpirun].why_not():
        pytest.skip(MPIRUN[mpirun].why_not())
    expect(started(tmp_path, [MPIRUN[mpirun].program, *ON_THIS_HOST[mpirun]]), 2, BY_MPI)


@pytest.mark.parametrize("mpirun", MPIRUN)
def test_mpirun_whose_ranks_also_have_horovods_variables(mpirun, tmp_path):
    """Scripts take HOROVOD_RANK for a sign of Gloo; the ranks meet by what mpirun says, without any address."""
    if MPIRUN[mpirun].why_not():
        pytest.skip(MPIRUN[mpirun].why_not())
    command = ["sh", "-c", 'HOROVOD_RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} HOROVOD_SIZE=2 exec "$@"', "sh"]
    expect(started(tmp_path, [MPIRUN[mpirun].program, *ON_THIS_HOST[mpirun], *command]), 2, NOT_MPI)


# On ranks

@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture
def hvd():
    """Not initialised before the check, nor after it."""
    import lightcc.numpy
    assert not lightcc.numpy.is_initialized()
    yield lightcc.numpy
    lightcc.numpy.shutdown()


def expect_works(hvd):
    assert hvd.is_initialized()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def check_init_and_shutdown_twice(hvd):
    for _ in range(2):
        for _ in range(2):
            assert hvd.init() is None
            expect_works(hvd)
        for _ in range(2):
            assert hvd.shutdown() is None
            assert not hvd.is_initialized()


@pytest.mark.parametrize("comm", [3, object(), "0", [0.5], [[0]], [0, None]], ids=repr)
def check_init_with_a_comm_that_is_no_list_of_ranks(hvd, comm):
    with pytest.raises(ValueError, match="comm=.*list of ranks"):
        hvd.init(comm)
    assert not hvd.is_initialized()
    hvd.init()
    with pytest.raises(ValueError, match="comm=.*list of ranks"):
        hvd.init(comm=comm)
    expect_works(hvd)


@pytest.mark.parametrize("comm", [None, [], (), range, np.arange], ids=str)
def check_all_ranks_in_any_form(hvd, comm):
    hvd.init()
    comm = comm(hvd.size()) if callable(comm) else comm
    hvd.init(comm)
    hvd.shutdown()
    hvd.init(comm)
    hvd.init(comm=comm)
    expect_works(hvd)


@pytest.mark.parametrize("sets", [3, "static", [0]], ids=repr)
def check_init_with_process_sets_of_another_kind(hvd, sets):
    with pytest.raises(ValueError, match="list of"):
        hvd.init(process_sets=sets)
    hvd.init()
    with pytest.raises(ValueError, match="list of"):
        hvd.init(process_sets=hvd.global_process_set)
    expect_works(hvd)


def check_process_sets_that_cannot_be_leave_the_job_initialised(hvd):
    for sets, text in (([[0], [0]], "twice"), ([hvd.ProcessSet([0]), [0]], "twice"), ([[99]], "rank"),
                       ([[0, 0]], "distinct"), ([["0"]], "distinct"), ([hvd.global_process_set], "global")):
        with pytest.raises(ValueError, match=text):
            hvd.init(process_sets=sets)
        expect_works(hvd)
        hvd.shutdown()


@pytest.mark.parametrize("form", ["lists", "tuples", "objects", "mixed", "generator"])
def check_process_sets_in_any_form(hvd, form):
    """What two ranks can have: a set of each of them."""
    hvd.init()
    size = hvd.size()
    hvd.shutdown()
    if size == 1:
        return
    first, second = hvd.ProcessSet([0]), hvd.ProcessSet((1,))
    sets = {"lists": [[0], [1]], "tuples": ((0,), range(1, 2)), "objects": [first, second], "mixed": [first, [1]],
            "generator": (s for s in (first, second))}[form]
    hvd.init(process_sets=sets)
    assert HorovodBasics(__file__)._get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    if form in ("objects", "generator"):
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        mine = (first, second)[hvd.rank()]
        assert (mine.rank(), mine.size(), mine.included()) == (0, 1, True)
        assert hvd.allreduce(np.full(1, hvd.rank()), process_set=mine) == [hvd.rank()]


def check_dynamic_process_sets(hvd):
    hvd.init(process_sets="dynamic")
    assert HorovodBasics(__file__)._get_process_set_ids_and_ranks() == {0: list(range(hvd.size()))}
    if hvd.size() > 1:
        added = hvd.add_process_set([1])
        assert added.process_set_id == 1
        assert hvd.remove_process_set(added) is True
    expect_works(hvd)


def check_basics_by_itself(hvd):
    """Every instance speaks of the one job."""
    one, other = HorovodBasics(__file__), HorovodBasics(__file__, "mpi_lib_v2")
    for basics in (one, other):
        for query in (basics.rank, basics.size, basics.mpi_threads_supported, basics.stop_timeline):
            with pytest.raises(ValueError, match=NOT_INITIALISED):
                query()
        with pytest.raises(ValueError, match=NOT_INITIALISED):
            basics.start_timeline("/tmp/timeline.json")
    one.init()
    assert other.is_initialized() and hvd.is_initialized()
    assert (other.rank(), other.size()) == (hvd.rank(), hvd.size())
    expect_works(hvd)
    other.shutdown()
    assert not one.is_initialized()


def check_import_names_of_the_world(hvd):
    """lightcc.common.basics and lightcc.common.process_sets have one and the same world."""
    from lightcc.core import basics, process_sets
    hvd.init()
    assert basics.global_process_set is process_sets.global_process_set is hvd.global_process_set
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.process_set_id == 0


# Helpers, without any job

def test_exceptions():
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    with pytest.raises(RuntimeError, match="why"):
        raise exceptions.HorovodInternalError("why")
    interrupt = exceptions.HostsUpdatedInterrupt(True)
    assert isinstance(interrupt, RuntimeError) and interrupt.skip_sync is True
    assert exceptions.HostsUpdatedInterrupt(skip_sync=False).skip_sync is False
    mismatch = exceptions.HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert isinstance(mismatch, ImportError)
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.1", "2.0")
    assert str(mismatch) == exceptions.get_version_mismatch_message("torch", "2.1", "2.0")
    for word in ("torch", "2.1", "2.0"):
        assert word in str(mismatch)


def test_exceptions_are_the_same_under_every_name():
    import lightcc.numpy
    import lightcc.torch
    from lightcc.core import elastic_state
    from lightcc.torch import mpi_ops
    for module in (lightcc.numpy, lightcc.torch, mpi_ops, elastic_state):
        assert module.HorovodInternalError is exceptions.HorovodInternalError
    assert elastic_state.HostsUpdatedInterrupt is exceptions.HostsUpdatedInterrupt
    assert util.HorovodVersionMismatchError is exceptions.HorovodVersionMismatchError


@pytest.mark.parametrize("error", (exceptions.HorovodInternalError("why"), exceptions.HostsUpdatedInterrupt(True),
                                   exceptions.HorovodVersionMismatchError("torch", "2.1", "2.0")),
                         ids=lambda error: type(error).__name__)
def test_errors_are_pickled(error):
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
    assert getattr(copied, "name", None) == getattr(error, "name", None)  # of ImportError, and not among its vars


def test_a_pickled_error_is_of_the_same_class():
    """Ray pickles what workers raise by cloudpickle, which copies a class whose module the worker has not imported."""
    program = """
import sys, cloudpickle, lightcc.numpy as hvd
sys.stdout.buffer.write(cloudpickle.dumps(hvd.HorovodInternalError("why")))
"""
    pickled = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout
    assert isinstance(pickle.loads(pickled), exceptions.HorovodInternalError)


def test_check_extension(monkeypatch):
    monkeypatch.setenv("LIGHTCC_LIBRARY", "/no/such/library.so")
    with pytest.raises(ImportError, match="lightcc.torch needs /no/such/library.so.*[Rr]einstall"):
        util.check_extension("lightcc.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    monkeypatch.setenv("LIGHTCC_LIBRARY", __file__)
    assert util.check_extension("lightcc.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None


def test_check_installed_version():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert util.check_installed_version("numpy", np.__version__) is None
        assert util.check_installed_version("numpy", np.__version__, ImportError("unused")) is None
    with pytest.warns(UserWarning, match=f"numpy 0.1, but {np.__version__}"):
        util.check_installed_version("numpy", "0.1")
    cause = ImportError("undefined symbol")
    with pytest.raises(exceptions.HorovodVersionMismatchError, match="numpy 0.1") as raised:
        util.check_installed_version("numpy", "0.1", cause)
    assert raised.value.__cause__ is cause


def test_built_queries_of_util_are_those_of_basics(monkeypatch):
    basics = HorovodBasics(__file__)
    for variables in ({}, {"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_RANK": "0"}, {"PMI_RANK": "0", "HOROVOD_RANK": "0"}):
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"):
            assert getattr(util, name)() == getattr(util, name)(verbose=True) == getattr(basics, name)()
        assert basics.mpi_enabled() == ("HOROVOD_RANK" not in variables and bool(variables))


def test_nccl_built_is_the_version_that_is_used(monkeypatch):
    basics = HorovodBasics(__file__)

    def with_nccl(version, library="libnccl.so.2"):
        monkeypatch.setattr(nccl_library, "path", lambda: library)
        monkeypatch.setattr(nccl_library, "version", version)
        return basics.nccl_built()

    def unloadable(library):
        raise OSError("it is not for this machine")

    assert with_nccl(lambda library: 22703) == 22703
    assert with_nccl(lambda library: 21701) == 0 == with_nccl(unloadable)
    assert with_nccl(lambda library: 22703, library=None) == 0


def test_nccl_is_found_where_pytorch_brings_it(monkeypatch, tmp_path):
    monkeypatch.delenv("LIGHTCC_NCCL_LIBRARY", raising=False)
    spec = importlib.machinery.ModuleSpec("nvidia.nccl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(nccl_library.importlib.util, "find_spec", {"nvidia.nccl": spec}.get)
    monkeypatch.setattr("ctypes.util.find_library", {"nccl": "libnccl.so.2"}.get)
    assert nccl_library.path() == "libnccl.so.2"
    library = tmp_path / "lib" / "libnccl.so.2"
    library.parent.mkdir()
    library.write_text("")
    assert nccl_library.path() == str(library)
    with pytest.raises(OSError):
        nccl_library.version(str(library))
    with pytest.raises(OSError, match="ncclGetVersion"):
        nccl_library.version("libc.so.6")
    monkeypatch.setenv("LIGHTCC_NCCL_LIBRARY", "/opt/nccl.so")
    assert nccl_library.path() == "/opt/nccl.so"


@pytest.mark.parametrize("setting, loaded", [(None, 1), ("1", 1), ("0", 0)])
def test_nccl_of_wheels_is_loaded_for_arrays_that_are_not_pytorchs(monkeypatch, setting, loaded):
    calls = []
    monkeypatch.setattr(nccl_library, "path", lambda: "/wheels/libnccl.so.2")
    monkeypatch.setattr(nccl_library.ctypes, "CDLL", calls.append)
    if setting is None:
        monkeypatch.delenv("LIGHTCC_NCCL", raising=False)
    else:
        monkeypatch.setenv("LIGHTCC_NCCL", setting)
    nccl_library.load.cache_clear()
    try:
        for _ in range(2):
            Cupy(types.SimpleNamespace(ndarray=None))
        assert calls == ["/wheels/libnccl.so.2"] * loaded
        nccl_library.load.cache_clear()
        array = types.SimpleNamespace(__dlpack_device__=lambda: (2, 0), __cuda_array_interface__={})
        assert OTHERS._place(array).device == 0
        assert calls == ["/wheels/libnccl.so.2"] * (2 * loaded)
    finally:
        nccl_library.load.cache_clear()


def test_a_launcher_under_mpirun_is_believed(monkeypatch):
    for name in ("HOROVOD_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv(name, "0")
        assert not HorovodBasics(__file__).mpi_enabled()
        monkeypatch.delenv(name)


def test_extension_available(capsys):
    assert util.EXTENSIONS == ["tensorflow", "torch"]
    assert util.extension_available("torch") is True
    assert util.extension_available("mxnet") is False and util.extension_available("no_such") is False
    assert capsys.readouterr().out == ""
    util.extension_available("torch", verbose=True)
    assert "torch" in capsys.readouterr().out
    assert util.gpu_available("torch") is util.gpu_available("torch", verbose=True) is False


def test_paths():
    assert util.get_extension_full_path("/any/package", "mpi_lib").endswith(os.path.join("lightcc", "_lightcc.so"))
    assert __import__("sysconfig").get_config_var("EXT_SUFFIX") == util.get_ext_suffix()


def test_env(monkeypatch):
    monkeypatch.setenv("LIGHTCC_TEST_OLD", "old")
    monkeypatch.delenv("LIGHTCC_TEST_NEW", raising=False)
    with pytest.raises(KeyError):
        with util.env(LIGHTCC_TEST_OLD="inside", LIGHTCC_TEST_NEW="1", LIGHTCC_TEST_NONE=None):
            assert (os.environ["LIGHTCC_TEST_OLD"], os.environ["LIGHTCC_TEST_NEW"]) == ("inside", "1")
            assert "LIGHTCC_TEST_NONE" not in os.environ
            raise KeyError
    assert os.environ["LIGHTCC_TEST_OLD"] == "old" and "LIGHTCC_TEST_NEW" not in os.environ


def test_average_backwards_compatibility():
    merge = util.get_average_backwards_compatibility_fun(HorovodBasics)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [merge(op, None) for op in (None, *range(6))] == [0, *range(6)]
        for average in (True, False):
            with pytest.raises(ValueError, match="op parameter supersedes average"):
                merge(HorovodBasics.Sum, average)
    for average, op in ((True, HorovodBasics.Average), (False, HorovodBasics.Sum)):
        with pytest.warns(DeprecationWarning, match="average"):
            assert merge(None, average) == op


def test_lists_and_versions():
    assert [util.is_iterable(x) for x in ([], "", {}, range(0), 1, None)] == [True] * 4 + [False] * 2
    assert [n for n in range(-2, 17) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert util.split_list([1], 2) == [[1], []]
    newer = util.is_version_greater_equal_than
    assert [newer(v, "2.4.0") for v in ("2.4.0", "2.10.0", "2.4.0+cpu", "2.5", "3.0.0a1", "2.3.9", "1.9")] == \
        [True] * 5 + [False] * 2
    for version, target in ((2.4, "2.4.0"), ("2.4.0", 2), ("2.4.0", "2.4"), ("2.4.0", "two"), ("two", "2.4.0")):
        with pytest.raises(ValueError, match="is_version_greater_equal_than"):
            newer(version, target)

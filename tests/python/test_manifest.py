"""Every name of Horovod's API is there with Horovod's signature, or tests/parity.yaml says that it is not; and so for
flags and variables. Of modules for a framework, this shows it where that framework is.

tests/data/horovod_api.json holds that API as data: module, name, parameters in order, defaults as source text.
"""
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

import lightcc
import lightcc.numpy as hvd
from lightcc.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from lightcc.runner import launch
from lightcc.runner.util.threads import in_thread

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from parity_data import ABSENT, SECTIONS, load  # noqa: E402

pytestmark = pytest.mark.tensorflow

NEEDS = {"horovod.torch": "torch", "horovod.tensorflow": "tensorflow", "horovod.keras": "keras",
         "horovod._keras": "tensorflow",  # passes on names of horovod.tensorflow
         "horovod.ray": "ray", "horovod.spark": "pyspark"}


def need(row):
    """The framework without which a row's module cannot be imported."""
    path = row.name if row.section in SECTIONS else row.section
    return next((framework for module, framework in NEEDS.items() if f"{path}.".startswith(f"{module}.")), None)


FRAMEWORKS = [name for name in dict.fromkeys(NEEDS.values()) if importlib.util.find_spec(name)]
if "keras" in FRAMEWORKS:
    importlib.import_module("kerases")  # without TensorFlow, Keras runs on torch
TABLE = load()
HERE = [row for row in TABLE.rows if need(row) in (None, *FRAMEWORKS)]
ROWS = [row for row in HERE if row.section not in SECTIONS]  # of modules
IMPORTABLE = [row for row in HERE if row.section == "semi_public" and row.name.startswith("horovod.")]


def ours(module):
    return module.replace("horovod", "lightcc", 1)


def test_each_framework_here_has_its_rows():
    assert FRAMEWORKS, "no framework is installed here"
    least = {"torch": 200, "tensorflow": 230, "keras": 40, "ray": 3, "pyspark": 2}
    for framework in FRAMEWORKS:
        assert sum(need(row) == framework and row.entry.status not in ABSENT for row in ROWS) >= least[framework]


def shown(row):
    return f"{row.section}.{row.name}"


def find(row):
    """lightcc's name for it; AttributeError or ModuleNotFoundError if there is none."""
    path = f"{row.section}.{row.name}" if row in ROWS else row.name
    module = row.section if row in ROWS else path.rpartition(".")[0]
    value = importlib.import_module(ours(module))
    for part in path[len(module) + 1:].split("."):
        value = getattr(value, part)
    return value


def is_there(row):
    try:
        find(row)
    except AttributeError:
        return False
    except ModuleNotFoundError as error:
        if not error.name.startswith("lightcc"):
            raise
        return False
    return True


def test_the_package_says_that_it_has_types():
    assert (Path(lightcc.__file__).parent / "py.typed").is_file()


def test_no_name_is_missing():
    assert [shown(row) for row in ROWS + IMPORTABLE if row.entry.status not in ABSENT and not is_there(row)] == []


def test_what_is_there_is_not_said_to_be_missing():
    assert [shown(row) for row in ROWS + IMPORTABLE if row.entry.status in ABSENT and is_there(row)] == []


THERE = [row for row in ROWS if row.entry.status not in ABSENT]


@pytest.mark.parametrize("row", [row for row in THERE if row.facts.get("params") is not None], ids=shown)
def test_parameters_are_horovods(row):
    """Names, order, kinds and defaults."""
    module, value, expected = importlib.import_module(ours(row.section)), find(row), []
    for parameter in row.facts["params"]:
        name = parameter["name"]
        if name.startswith("*"):
            expected.append((name, inspect.Parameter.empty))
        else:
            defined_in = importlib.import_module(value.__module__)
            default = inspect.Parameter.empty if parameter["required"] else \
                eval(parameter["default"], dict(vars(module)), vars(defined_in))
            expected.append((name, default))
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    actual = [(stars.get(parameter.kind, "") + parameter.name, parameter.default)
              for parameter in inspect.signature(value).parameters.values()]
    if row.name == "HorovodBasics":
        assert [name for name, _ in actual] == ["pkg_path", "*args"]
    assert actual == expected


@pytest.mark.parametrize("row", [row for row in THERE if "." in row.name], ids=shown)
def test_method_parameters_are_horovods(row):
    """Methods have their signature as text only: compare the names in it."""
    text = row.facts["signature"][row.facts["signature"].index("(") + 1:].rsplit(")", 1)[0]
    expected, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            expected.append("")
        else:
            expected[-1] += character
    names = [part.split(":")[0].split("=")[0].strip().lstrip("*") for part in expected if part.strip()]
    actual = [name for name in inspect.signature(find(row)).parameters if name != "self"]
    if names == ["args", "kwargs"]:  # which Horovod passes on: what the base class takes
        owner, _, method = row.name.rpartition(".")
        bases = getattr(importlib.import_module(ours(row.section)), owner).__mro__[1:]
        taken = inspect.signature(next(vars(base)[method] for base in bases if method in vars(base))).parameters
        assert len(taken) > 1 and set(taken) <= {"self", *actual}
    else:
        assert actual == names


# What objects have

class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    """What users make of the two."""


def objects_of_torch():
    import torch

    import lightcc.torch as hvd
    parameters = [torch.zeros(2, requires_grad=True)]
    yield "DistributedOptimizer()", hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    yield "sparse_allreduce_async()", hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "manifest", hvd.Sum)
    yield "SyncBatchNorm()", hvd.SyncBatchNorm(3)


def objects_of_tensorflow():
    import tensorflow as tf

    import lightcc.tensorflow as hvd
    yield "DistributedGradientTape()", hvd.DistributedGradientTape(tf.GradientTape())
    yield "PartialDistributedGradientTape()", hvd.PartialDistributedGradientTape(tf.GradientTape())
    yield "DistributedOptimizer(tf.compat.v1.train.Optimizer)", hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1))
    hook = hvd.BroadcastGlobalVariablesHook(1, "/cpu:0")
    assert (hook.root_rank, hook.device, hook.bcast_op) == (1, "/cpu:0", None)
    yield "BroadcastGlobalVariablesHook()", hook
    helper = hvd.LocalGradientAggregationHelper(2, None, True, False, 0, "")
    assert (helper.backward_passes_per_step, helper.sparse_as_dense, helper.average_aggregated_gradients) == (2, 1, 0)
    yield "LocalGradientAggregationHelper()", helper
    yield "broadcast_object_fn()", hvd.broadcast_object_fn()
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 2))
    yield "SyncBatchNormalization()", layer
    yield from objects_of_keras(importlib.import_module("tensorflow").keras, "tensorflow.keras")


def objects_of_keras(keras=None, package="keras"):
    keras = keras or importlib.import_module("keras")
    hvd, prefix = importlib.import_module(f"lightcc.{package}"), package.replace("tensorflow.", "", 1)
    prefix = "" if package == "keras" else f"{prefix}."
    yield f"{prefix}DistributedOptimizer()", hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for name, arguments in (("BroadcastGlobalVariablesCallback", [0]), ("MetricAverageCallback", []),
                            ("LearningRateScheduleCallback", [0.1, 2]), ("LearningRateWarmupCallback", [0.1]),
                            ("BestModelCheckpoint", [])):
        yield f"{prefix}callbacks.{name}()", getattr(hvd.callbacks, name)(*arguments)


def objects_without_framework():
    """By their whole names."""
    exceptions = importlib.import_module("lightcc.common.exceptions")
    yield "horovod.common.process_sets.ProcessSet()", hvd.ProcessSet([0])
    yield "horovod.common.exceptions.HostsUpdatedInterrupt()", exceptions.HostsUpdatedInterrupt(True)
    yield ("horovod.common.exceptions.HorovodVersionMismatchError()",
           exceptions.HorovodVersionMismatchError("torch", "2", "1"))
    yield "horovod.data.data_loader_base.AsyncDataLoaderMixin()", Loader()
    thread = in_thread(lambda: None)
    thread.join()
    yield "horovod.runner.util.threads.in_thread()", thread


def has_member(thing, row):
    """Whether it has the attribute or method, if it should. A method may take more than Horovod's."""
    member, parameters = row.facts["member"], row.facts["parameters"]
    if row.entry.status in ABSENT or not hasattr(thing, member):
        return (row.entry.status in ABSENT) != hasattr(thing, member)
    if parameters is None:
        return True
    method = thing if member == "__call__" else getattr(thing, member)
    taken = [str(parameter).partition(":")[0].partition("=")[0].strip()
             for parameter in inspect.signature(method).parameters.values()]
    return taken[:len(parameters)] == parameters


OBJECTS = {"torch": objects_of_torch, "tensorflow": objects_of_tensorflow, "keras": objects_of_keras}


@pytest.mark.parametrize("framework", [None, *(name for name in FRAMEWORKS if name in OBJECTS)])
def test_objects_have_what_they_should(framework):
    """Attributes, and methods with at least Horovod's parameters, by the same names and in the same order."""
    hvd.init()
    try:
        if framework is None:
            made = dict(objects_without_framework())
        else:
            made = {f"horovod.{framework}.{name}": thing for name, thing in OBJECTS[framework]()}
        rows = [row for row in TABLE.rows if row.section == "objects" and need(row) == framework]
        assert {row.facts["object"] for row in rows} == set(made)
        wrong = [row.name for row in rows if not has_member(made[row.facts["object"]], row)]
        assert wrong == []
    finally:
        hvd.shutdown()


def is_accepted(flag, values):
    """By lightccrun, with so many values."""
    given = ["INFO" if flag == "--log-level" else "1"] * values
    try:
        return launch.parser().parse_args(["-np", "1", flag, *given, "true"]).command == ["true"]
    except SystemExit as end:
        return end.code == 0  # of --version and --check-build


def test_flags_are_accepted_as_it_is_said(capfd):
    wrong = []
    for row in TABLE.rows:
        if row.section == "flags" and row.name != "command":
            alone = re.search("store_true|version|_bool_|_true_|_false_", row.facts["action"])
            values = 0 if alone else int(row.facts["nargs"] or 1)
            wrong += [flag for flag in row.facts["flags"]
                      if is_accepted(flag, values) == (row.entry.status in ABSENT)]
    assert wrong == []


def test_variables_that_count_are_read():
    """lightcc's sources speak of them."""
    root = Path(__file__).parents[2]
    text = "".join(path.read_text() for folder in ("csrc", "lightcc") for path in (root / folder).rglob("*")
                   if path.suffix in (".cc", ".h", ".py"))
    counts = [row for row in TABLE.rows if row.section == "environment" and row.entry.status not in ABSENT
              and (row.entry.status != "different" or row.facts["kind"] == "runtime")]
    assert len(counts) > 30
    assert [row.name for row in counts if f'"{row.name}"' not in text] == []


def test_constants_are_horovods():
    basics = importlib.import_module("lightcc.common.basics").HorovodBasics
    assert [basics.Average, basics.Sum, basics.Adasum, basics.Min, basics.Max, basics.Product] == list(range(6))
    for name in FRAMEWORKS:
        hvd = importlib.import_module(f"lightcc.{name}")
        assert [hvd.Average, hvd.Sum] == [0, 1]
        if name != "keras":
            assert [hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [2, 3, 4, 5]

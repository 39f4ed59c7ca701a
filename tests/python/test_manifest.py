"""Every name of Horovod's API is there with Horovod's signature, or is listed here as still to come.

tests/data/horovod_api.json holds that API as data: module, name, parameters in order, defaults as source text.
"""
import importlib
import inspect
import json
from pathlib import Path

import pytest

MODULES = json.loads((Path(__file__).parents[1] / "data" / "horovod_api.json").read_text())["modules"]

# What follows in later versions. A name that exists must leave this list: test_later_names_are_missing.
LATER = {
    "horovod": set(),
    "horovod.common.basics": set(),
    "horovod.common.exceptions": set(),
    "horovod.common.process_sets": set(),
    "horovod.common.util": {"gpu_available"},
    "horovod.torch": {"SyncBatchNorm", "elastic", "sparse_allreduce_async"},
    "horovod.torch.compression": set(),
    "horovod.torch.functions": set(),
    "horovod.torch.mpi_ops": {"gpu_available", "sparse_allreduce_async"},
    "horovod.torch.optimizer": set(),
}
PACKAGES = {"horovod", "horovod.torch", "horovod.torch.mpi_ops"}  # users take any name from these
NEVER = {("horovod.common.process_sets", "MPI"), ("horovod.common.process_sets", "HorovodBasics")}  # annotations only
LATER_MODULES = {
    "horovod._keras", "horovod._keras.callbacks", "horovod._keras.elastic", "horovod.common.elastic", "horovod.data",
    "horovod.data.data_loader_base", "horovod.keras", "horovod.keras.callbacks", "horovod.keras.elastic",
    "horovod.ray", "horovod.runner", "horovod.spark", "horovod.spark.keras", "horovod.spark.lightning",
    "horovod.spark.torch", "horovod.tensorflow", "horovod.tensorflow.compression",
    "horovod.tensorflow.data.compute_service", "horovod.tensorflow.data.compute_worker", "horovod.tensorflow.elastic",
    "horovod.tensorflow.functions", "horovod.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager", "horovod.tensorflow.keras", "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic", "horovod.tensorflow.mpi_ops", "horovod.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util", "horovod.torch.elastic", "horovod.torch.elastic.sampler", "horovod.torch.elastic.state",
    "horovod.torch.sync_batch_norm",
}


def entries():
    """(module of ours, of Horovod's, path to the name, its entry, whether it is to come), methods included.

    Leaves out what a module only imports for its own use.
    """
    for module, later in LATER.items():
        ours = importlib.import_module(module.replace("horovod", "lightcc", 1))
        for name, entry in MODULES[module]["names"].items():
            if (module, name) in NEVER or (module not in PACKAGES and entry.get("defined_in", module) != module):
                continue
            yield ours, module, name, entry, name in later
            for method, facts in entry.get("methods", {}).items():
                yield ours, module, f"{name}.{method}", facts, name in later or f"{name}.{method}" in later


def find(module, path):
    value = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def existing():
    return [(module, path, entry) for module, _, path, entry, later in entries() if not later]


def test_every_module_is_known():
    assert set(MODULES) == set(LATER) | LATER_MODULES


def test_no_name_is_missing():
    missing = []
    for module, path, _ in existing():
        try:
            find(module, path)
        except AttributeError:
            missing.append(f"{module.__name__}.{path}")
    assert missing == []


def test_later_names_are_missing():
    present = []
    for module, _, path, _, later in entries():
        try:
            find(module, path)
        except AttributeError:
            continue
        if later:
            present.append(f"{module.__name__}.{path}")
    assert present == []


def test_later_names_are_in_the_manifest():
    known = {}
    for _, module, path, _, _ in entries():
        known.setdefault(module, set()).add(path)
    assert {module: names - known[module] for module, names in LATER.items() if names - known[module]} == {}


WITH_PARAMETERS = [(module, path, entry) for module, path, entry in existing()
                   if entry.get("params") is not None and entry.get("kind") != "constant"]


@pytest.mark.parametrize("module, path, entry", WITH_PARAMETERS,
                         ids=[f"{module.__name__}.{path}" for module, path, _ in WITH_PARAMETERS])
def test_parameters_are_horovods(module, path, entry):
    """Names, order, kinds and defaults."""
    expected = []
    for parameter in entry["params"]:
        name = parameter["name"]
        if name.startswith("*"):
            expected.append((name, inspect.Parameter.empty))
        else:
            defined_in = importlib.import_module(find(module, path).__module__)
            default = inspect.Parameter.empty if parameter["required"] else \
                eval(parameter["default"], dict(vars(module)), vars(defined_in))
            expected.append((name, default))
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    actual = [(stars.get(parameter.kind, "") + parameter.name, parameter.default)
              for parameter in inspect.signature(find(module, path)).parameters.values()]
    if path == "HorovodBasics":
        assert [name for name, _ in actual] == ["pkg_path", "*args"]
    assert actual == expected


METHODS = [(module, path, entry) for module, path, entry in existing() if "." in path]


@pytest.mark.parametrize("module, path, entry", METHODS, ids=[f"{m.__name__}.{path}" for m, path, _ in METHODS])
def test_method_parameters_are_horovods(module, path, entry):
    """Methods have their signature as text only: compare the names in it."""
    text = entry["signature"][entry["signature"].index("(") + 1:].rsplit(")", 1)[0]
    expected, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            expected.append("")
        else:
            expected[-1] += character
    names = [part.split(":")[0].split("=")[0].strip().lstrip("*") for part in expected if part.strip()]
    actual = [name for name in inspect.signature(find(module, path)).parameters if name != "self"]
    assert actual == names


def test_constants_are_horovods():
    basics = importlib.import_module("lightcc.common.basics").HorovodBasics
    assert [basics.Average, basics.Sum, basics.Adasum, basics.Min, basics.Max, basics.Product] == list(range(6))
    torch = importlib.import_module("lightcc.torch")
    assert [torch.Average, torch.Sum, torch.Adasum, torch.Min, torch.Max, torch.Product] == list(range(6))

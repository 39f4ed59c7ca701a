"""Names that Horovod does not document and scripts import all the same: the manifest's list semi_public."""
import importlib
import json
import threading
from pathlib import Path

import pytest

from lightcc.core.util import _cache
from lightcc.runner.common.util.env import get_env_rank_and_size
from lightcc.runner.util.threads import in_thread

DEADLINE_S = 200


def test_every_name_is_there():
    manifest = json.loads((Path(__file__).parents[1] / "data" / "horovod_api.json").read_text())
    checked = 0
    for line in manifest["semi_public"]["names"]:
        if line.startswith(("optimizer.", "horovod.tensorflow.")):  # below; TensorFlow comes later
            continue
        module, colon, names = line.partition(": ")
        if not colon:
            module, _, names = line.rpartition(".")
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module.replace("horovod", "lightcc", 1)), name), line
            checked += 1
    assert checked == 9


@pytest.mark.parametrize("env, expected", [
    ({}, (0, 1)),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3"}, (1, 3)),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "5", "PMI_SIZE": "6"}, (1, 2)),
])
def test_rank_and_size_are_read_from_the_environment(env, expected, monkeypatch):
    assert get_env_rank_and_size(env) == expected
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                 "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert get_env_rank_and_size() == expected


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE"])
def test_half_of_rank_and_size_is_an_error(name):
    with pytest.raises(RuntimeError, match=f"Could not determine process rank and size: {name} is in the environment"):
        get_env_rank_and_size({name: "1"})


def test_a_cached_function_is_called_once_for_equal_arguments():
    calls = []

    @_cache
    def count(*args, **kwargs):
        calls.append((args, kwargs))
        return len(calls)

    assert [count(1), count(1), count(2), count(a=1), count(a=1), count(1)] == [1, 1, 2, 3, 3, 1]
    assert calls == [((1,), {}), ((2,), {}), ((), {"a": 1})] and count.__name__ == "count"


def test_in_thread_runs_beside_the_caller():
    go, found = threading.Event(), []

    def work(*args):
        assert go.wait(DEADLINE_S)
        found.append((args, threading.current_thread()))

    thread = in_thread(work, (1, 2), name="mine")
    assert thread.daemon and thread.name == "mine" and found == []
    go.set()
    thread.join(DEADLINE_S)
    assert found == [((1, 2), thread)]
    thread = in_thread(lambda: None, daemon=False)
    assert not thread.daemon
    thread.join(DEADLINE_S)


def test_in_thread_takes_a_tuple():
    with pytest.raises(ValueError, match=r"args must be a tuple, not str; for one argument write \(value,\)"):
        in_thread(print, "text")


def test_in_thread_may_be_silent(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(args.exc_type))
    in_thread(lambda: 1 / 0).join(DEADLINE_S)
    assert said == [ZeroDivisionError]
    in_thread(lambda: 1 / 0, silent=True).join(DEADLINE_S)
    assert said == [ZeroDivisionError]


def test_an_optimizer_knows_the_names_of_its_parameters():
    import torch

    import lightcc.torch as hvd
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    hvd.shutdown()

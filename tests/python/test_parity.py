"""The checks of docs/parity.md and its tables find what they are for: each test spoils tests/parity.yaml in one way."""
import copy
import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import parity  # noqa: E402
import parity_data  # noqa: E402


@pytest.fixture
def document():
    return copy.deepcopy(yaml.safe_load(parity_data.DATA.read_text()))


def problems(document):
    """Those that the file itself has not."""
    known = parity_data.load().problems
    return [problem for problem in parity_data.load(document).problems if problem not in known]


def test_nothing_is_wrong_as_it_is():
    assert parity_data.load().problems == []
    assert list(parity.old_pages(parity_data.load())) == []


def test_a_row_without_entry(document):
    del document["horovod.torch.mpi_ops"]["barrier"]
    assert problems(document) == ["horovod.torch: barrier has no entry", "horovod.torch.mpi_ops: barrier has no entry"]


def test_members_without_entry(document):
    """One entry is for all members of an object, and a member may have its own."""
    document["objects"]["horovod.tensorflow.broadcast_object_fn().__call__"] = "never Said of this member alone."
    assert problems(document) == ["objects: horovod.tensorflow.broadcast_object_fn() is not in the manifest"]
    del document["objects"]["horovod.tensorflow.broadcast_object_fn()"]
    assert problems(document) == []
    del document["objects"]["horovod.tensorflow.BroadcastGlobalVariablesHook()"]
    assert problems(document) == [
        f"objects: horovod.tensorflow.BroadcastGlobalVariablesHook().{member} has no entry"
        for member in ("root_rank", "device", "bcast_op", "begin", "after_create_session")]


def test_an_entry_without_row(document):
    document["horovod.torch.mpi_ops"]["allredoce, barriere"] = "present"
    document["horovod.torch.no_such"] = "present"
    assert problems(document) == ["horovod.torch.mpi_ops: allredoce is not in the manifest",
                                  "horovod.torch.mpi_ops: barriere is not in the manifest",
                                  "horovod.torch.no_such: * is not in the manifest"]


def test_two_entries(document):
    document["horovod.torch.mpi_ops"]["barrier, join"] = "present"
    assert problems(document) == ["horovod.torch.mpi_ops: barrier has two entries",
                                  "horovod.torch.mpi_ops: join has two entries"]


@pytest.mark.parametrize("test", ["test_collectives.py::check_nothing", "test_nowhere.py::test_on_ranks",
                                  "config_test.cc::Config.Nothing", "test_collectives.py::allreduce_in_all_forms"])
def test_a_test_that_does_not_exist(document, test):
    document["horovod.torch.mpi_ops"]["barrier"] = f"same {test}"
    assert problems(document) == [f"horovod.torch.mpi_ops: barrier: there is no test {test}"]


@pytest.mark.parametrize("text, message", [
    ("", "'' is none of"), ("good test_collectives.py::check_barrier", "'good' is none of"), ("same", "wants a test"),
    ("better test_collectives.py::check_barrier", "wants a note"), ("better so it is", "wants a test"),
    ("different", "wants a note"), ("later", "wants a note"), ("never", "wants a note")])
def test_an_entry_that_does_not_say_enough(document, text, message):
    document["horovod.torch.mpi_ops"]["barrier"] = text
    assert any(message in problem for problem in problems(document))


def test_who_inherits_from_whom(document):
    for key in [key for key in document["flags"] if "--timeline-filename" in key]:
        del document["flags"][key]
    document["later"].pop("config", None)
    entries = {(row.section, row.name): row.entry for row in parity_data.load(document).rows}
    timeline = entries["environment", "HOROVOD_TIMELINE"]
    assert entries["flags", "--timeline-filename"] == entries["config", "timeline.filename"] == timeline
    rank = entries["horovod.common.basics", "HorovodBasics.rank"]
    assert entries["horovod.torch", "rank"] == entries["horovod.torch.mpi_ops", "rank"] == rank
    assert entries["horovod.torch", "ProcessSet.size"] == entries["horovod.common.process_sets", "ProcessSet.size"]
    assert entries["semi_public", "horovod.common.util.env"] == entries["horovod.common.util", "env"]
    service = "horovod.tensorflow.data.compute_service"
    assert entries[service, "compute_worker_fn"] == entries[service, "TfDataServiceConfig.write"]
    assert entries["environment", "HOROVOD_CYCLE_TIME"].key == "kind runtime"

"""A new job goes on from the checkpoints of an earlier one, if it is told to."""
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from recovery_job import Job, math_of

import lightcc.torch as hvd
import ranks
from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")
RESUMED = {"resume": True, "full_every": 3}


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def check_a_new_job_goes_on(folder):
    first = Job("resume", folder, every=2, recovery=RESUMED)
    first.state.sync()
    assert first.state.steps == 0 and first.rows()[0] == 0, "there was nothing to go on from"
    torch.nn.init.constant_(first.model.dense.weight, 7.0)
    known = {}
    for step in range(1, 8):
        first.train(1)
        known[step] = first.rows(), math_of(first.auc)
        if step == 4:
            place = first.finish()
    first.close()
    second = Job("resume", folder, every=2, recovery=RESUMED)
    second.state.sync()
    assert second.state.steps in (4, 6), "the last one may have been left half written"
    assert second.rows() == known[second.state.steps][0]
    assert math_of(second.auc) == pytest.approx(known[second.state.steps][1])
    assert second.model.dense.weight.item() == 7.0
    second.train(7 - second.state.steps)
    assert second.rows() == known[7][0], "training goes on as it did"
    assert os.path.dirname(second.finish()) == os.path.dirname(place), "in the folder of the job before"
    second.close()


def check_a_job_that_is_not_told_to_begins_anew(folder):
    first = Job("resume.anew", folder, every=2)
    first.state.sync()
    first.train(2)
    first.finish()
    first.close()
    second = Job("resume.anew", folder, every=2)
    second.state.sync()
    assert second.state.steps == 0 and second.rows()[0] == 0
    second.close()
    third = Job("resume.anew", folder, every=2, recovery=RESUMED)
    third.state.sync()
    assert third.state.steps == 0, "the job that wrote last had begun anew"
    third.close()


def check_what_an_earlier_job_left_half_written_is_not_mixed_with_what_is_written(folder):
    """Its last checkpoint lacks a rank's file; the new job comes to the same step."""
    first = Job("resume.half", folder, every=2)
    first.state.sync()
    first.train(2)
    first.finish()
    first.train(2)
    half = first.finish()
    if hvd.rank() == 0:
        os.unlink(os.path.join(half, f"{hvd.size() - 1}.json"))
    hvd.barrier()
    first.close()
    second = Job("resume.half", folder, every=2, recovery=RESUMED)
    second.state.sync()
    assert second.state.steps == 2
    second.train(2)
    now = second.finish()
    assert now != half and now.rpartition(".")[0] == half.rpartition(".")[0], "of one step, by two jobs"
    second.close()


def check_a_job_whose_checkpoints_are_all_damaged_does_not_begin_anew(folder, caplog):
    first = Job("resume.damaged", folder, every=2)
    first.state.sync()
    place = os.path.dirname(first.finish())
    first.close()
    if hvd.rank() == 0:
        for path in Path(place).glob("*/0.rows.safetensors"):
            data = path.read_bytes()
            path.write_bytes(data.replace(b"resume.damaged.alphas", b"resume.damaged.alhpas"))
    hvd.barrier()
    second = Job("resume.damaged", folder, every=2, recovery=RESUMED)
    with caplog.at_level(logging.WARNING, "lightcc"), pytest.raises(RuntimeError, match="that can be read"):
        second.state.sync()
    assert ("0.rows.safetensors" in caplog.text) == (hvd.rank() == 0)
    second.close()


def expect_refused(name, folder, text, dim, with_sparse):
    """By a job that would go on from one whose state had steps and an optimizer, and rows of dim 3."""
    first = Job(name, folder, every=2)
    first.state.sync()
    first.train(2)
    first.finish()
    first.close()
    model = E.HashEmbedding(dim, name=name, dtype=torch.float64)
    others = {"sparse": E.SparseAdam(E.tables(model), lr=0.1)} if with_sparse else {}
    state = hvd.elastic.TorchState(model, recovery=E.Recovery(folder, resume=True), **others)
    with pytest.raises(ValueError, match=text):
        state.sync()
    model.table.close()


def check_a_state_that_lacks_something_is_refused_by_name(folder):
    expect_refused("resume.lacks", folder, "has steps, which this TorchState has not", 3, with_sparse=True)


def check_a_table_of_another_dim_is_refused_by_name(folder):
    text = "table 'resume.dim' was saved with dim 3, and has 5 here"
    expect_refused("resume.dim", folder, text, 5, with_sparse=False)


def check_what_the_state_has_beside_is_kept(folder):
    """A value, a scheduler, that the job before had not."""
    first = Job("resume.more", folder, every=2)
    first.state.sync()
    first.train(2)
    first.finish()
    first.close()
    second = Job("resume.more", folder, every=2, recovery=RESUMED, values={"more": 5})
    second.state.sync()
    assert second.state.steps == 2 and second.state.more == 5
    second.state.more = 6
    second.state.commit()
    second.state.more = 7
    second.state.restore()
    assert second.state.more == 6
    second.close()


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import lightcc.torch as hvd
hvd.init()
from recovery_job import Job
job = Job("resume.ranks", {folder!r}, every=2, recovery={{"resume": True, "full_every": 3}})
job.state.sync()
print("begins", job.state.steps, *job.rows())
job.train(4, keys=1000 if not job.state.steps else 50)
job.finish()
print("ends", job.state.steps, *job.rows())
job.close()
"""


def test_on_other_ranks(tmp_path):
    """Three ranks, then two, then four: rows are as the job before had them."""
    program = PROGRAM.format(here=os.path.dirname(__file__), folder=str(tmp_path))
    said = [re.findall("(begins|ends) (\\d+) (\\d+) (\\d+)", ranks.run_script(program, np)) for np in (3, 2, 4)]
    for before, after in zip(said, said[1:]):
        ends = {one[1:] for one in before if one[0] == "ends"}
        begins = {one[1:] for one in after if one[0] == "begins"}
        assert ends == begins and len(ends) == 1
    assert [one[1] for one in said[-1] if one[0] == "ends"] == ["12"] * 4

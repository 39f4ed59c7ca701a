"""docs/collectives.md says what is: every cell of its tables is tried on two ranks."""
import json
import re
from pathlib import Path

import pytest
import torch

import lightcc.torch as hvd
import ranks

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "collectives.md").read_text()
ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "HorovodInternalError": hvd.HorovodInternalError}
REDUCTIONS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")


def table(heading):
    """The rows of the first table under a heading, by the names of the columns."""
    lines = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    assert rows and all(len(row) == len(names) for row in rows), rows
    return [dict(zip(names, row)) for row in rows]


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_the_tables_are_complete():
    from lightcc.core import lib
    listed = [row["dtype"] for row in table("dtypes")]
    assert len(listed) == len(set(listed)) and set(lib.DTYPES) < set(listed)
    assert [row["op"] for row in table("Operations")] == sorted(REDUCTIONS, key=lambda op: getattr(hvd, op))


def test_horovods_dtypes_are_those_of_the_manifest():
    wire = json.loads((HERE.parent / "data" / "horovod_api.json").read_text())["wire_dtypes"]
    for row in table("dtypes"):
        reduces, moves = row["dtype"] in wire["torch_reduce"], row["dtype"] in wire["torch_move"]
        assert row["Horovod for PyTorch"] == ("yes" if reduces else "moves it only" if moves else "no"), row


def test_what_differs_has_a_test():
    for row in table("Where lightcc differs from Horovod 0.28 on purpose"):
        file, name = re.fullmatch(r"`(\w+\.py)::(\w+)`", row["test"]).groups()
        assert f"def {name}(" in (HERE / file).read_text(), row


def expect(wanted, call):
    if wanted in ERRORS:
        with pytest.raises(ERRORS[wanted]) as raised:
            call()
        assert raised.type is ERRORS[wanted]
        return str(raised.value)
    assert wanted == "yes", wanted
    call()


MOVES = (hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0), lambda x: hvd.broadcast_(x, 0),
         lambda x: hvd.grouped_allgather([x, x]))


@pytest.mark.parametrize("row", table("dtypes"), ids=lambda row: row["dtype"])
def check_dtype(job, row):
    x = torch.zeros(2, 3, dtype=getattr(torch, row["dtype"]))
    for column in ("Sum, Average", "Min, Max, Product", "Adasum"):
        for op in column.split(", "):
            for call in (lambda op=op: hvd.allreduce(x, op=getattr(hvd, op)),
                         lambda op=op: hvd.grouped_allreduce_([x], op=getattr(hvd, op))):
                expect(row[column], call)
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
        expect(row["reducescatter"], lambda op=op: hvd.reducescatter(x, op=op))
    for verb in MOVES:
        said = expect(row["allgather, broadcast, alltoall"], lambda verb=verb: verb(x))
        assert said is None or f"torch.{row['dtype']} is not supported" in said


@pytest.mark.parametrize("row", table("Operations"), ids=lambda row: row["op"])
def check_operation(job, row):
    op = getattr(hvd, row["op"])
    assert op == int(row["value"])
    dtypes = {"floats: of 1.0 and 4.0": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
              "integers: of 1 and 4": (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64),
              "bool: of True and False": (torch.bool,)}
    for column, those in dtypes.items():
        for dtype in those:
            x = torch.tensor([hvd.rank() == 0 if dtype is torch.bool else 1 + 3 * hvd.rank()], dtype=dtype)
            if row[column] in ERRORS:
                expect(row[column], lambda x=x: hvd.allreduce(x, op=op))
            else:
                result = hvd.allreduce(x, op=op)
                assert result.dtype == dtype and result.item() == eval(row[column]), (row["op"], dtype, result)


@pytest.fixture(scope="module")
def one(job):
    yield hvd.add_process_set([0])


@pytest.mark.parametrize("row", table("Errors"), ids=lambda row: row["call"])
def check_error(one, row):
    x = torch.ones(4, 2)
    if row["on"] == "all" or row["on"] == f"rank {hvd.rank()}":
        names = {"hvd": hvd, "torch": torch, "x": x, "one": one}
        said = expect(row["error"], lambda: eval(row["call"].strip("`"), names))
        assert row["says"] in said, said
    hvd.barrier()
    assert (hvd.allreduce(x, op=hvd.Sum) == 2).all()

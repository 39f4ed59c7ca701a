"""What is printed when ranks end, and who is named as the first: decided by script, then seen once end to end."""
import itertools
import random
import re

import pytest

from jobs import launch, program
from lightcc.launch.error_output import (
    FAR_GRACE_S,
    HELD_BYTES,
    HOLD_S,
    MAX_UNLOAD_S,
    OF_ANOTHER,
    OWN,
    SHARED,
    ErrorOutput,
    Exit,
    Traceback,
    first_failure,
)

MINE = b"Traceback (most recent call last):\n  File x\nKeyError: 'my mistake'\n"
OURS = b"Traceback (most recent call last):\nHorovodInternalError: allreduce of tensor 'w': ranks disagree on shape\n"
FORWARD = b"HorovodInternalError: allreduce of tensor 'w': rank 1 (pid 17) on host h has left (it shut down)\n"
VICTIM = b"Traceback (most recent call last):\n" + FORWARD


BY_1 = frozenset([1])


def ended(at, code=1, by_us=False):
    return Exit(code, at, by_us)


# Who was first.

@pytest.mark.parametrize("text, whose", [
    (MINE, OWN), (OURS, SHARED), (VICTIM, OF_ANOTHER), (VICTIM.replace(b"rank 1", b"rank 3"), SHARED),
    (b"UnknownError: Graph execution error:\nHorovodAllreduce on rank 3: allreduce of tensor 'w': rank 0 (pid 1) on "
     b"host h died\n", OF_ANOTHER),
    (MINE + b"[3]<stderr>:[lightcc warning rank 3] stall: rank 1 (pid 17) on host h waits\n", OWN),
])
def test_whose_fault_an_error_is(text, whose):
    assert Traceback(0, OWN).extended(3, text).blame == whose


@pytest.mark.parametrize("what, ends, words, first", [
    ("nobody failed", {0: ended(1, 0), 1: ended(2, -15, True)}, {1: Traceback(0, OWN)}, None),
    ("who raised tells the others as it unloads, and ends last", {0: ended(2), 2: ended(2), 1: ended(3)},
     {0: Traceback(1.1, OF_ANOTHER, BY_1), 1: Traceback(1, OWN), 2: Traceback(1.2, OF_ANOTHER, BY_1)}, 1),
    ("the same without a word", {0: ended(2), 1: ended(3, 5)}, {0: Traceback(1, OF_ANOTHER, BY_1)}, 1),
    ("a consequence that names nobody", {0: ended(2), 1: ended(3)}, {0: Traceback(1.3, OWN), 1: Traceback(1, OWN)}, 1),
    ("all disagree", {0: ended(2), 1: ended(3)}, {0: Traceback(1.3, SHARED), 1: Traceback(1, SHARED)}, 1),
    ("a killed rank says nothing", {0: ended(2), 1: ended(1, -9)}, {0: Traceback(1.1, OF_ANOTHER, BY_1)}, 1),
    ("the same at one look", {0: ended(2), 1: ended(2), 2: ended(2, -9)}, {}, 2),
    ("still unloading when it was told to end", {0: ended(2), 1: ended(3, -15, True)},
     {0: Traceback(1.1, OF_ANOTHER, BY_1), 1: Traceback(1, OWN)}, 1),
    ("the same, read a little later than the words of the others", {0: ended(2), 1: ended(3, -15, True)},
     {0: Traceback(1, OF_ANOTHER, BY_1), 1: Traceback(1.1, OWN)}, 1),
    ("it was told to end as another, which nobody names", {0: ended(2), 2: ended(3, -15, True)},
     {0: Traceback(1.1, OF_ANOTHER, BY_1), 2: Traceback(1, OWN)}, 0),
    ("told to end, and raised on that", {0: ended(2), 1: ended(3, 1, True)},
     {0: Traceback(1.1, OF_ANOTHER, BY_1), 1: Traceback(2.9, OWN)}, 0),
    ("an old traceback is not why it ended", {0: ended(99), 1: ended(98)},
     {0: Traceback(99 - MAX_UNLOAD_S - 1, OWN)}, 1),
    ("a rank had left with code 0", {0: ended(2), 1: ended(1, 0), 2: ended(3)},
     {0: Traceback(1.2, OF_ANOTHER, BY_1), 2: Traceback(1.1, OF_ANOTHER, BY_1)}, 2),
])
def test_who_failed_first(what, ends, words, first):
    assert first_failure(ends, words) == first, what


# What is printed when.

def test_lines_are_live_and_a_traceback_is_held_for_a_while():
    output = ErrorOutput()
    assert output.put(0, b"a\nb\n", 0) == b"a\nb\n" and output.wait_s(0) is None
    assert output.put(0, b"c\n" + MINE, 1) == b"c\n"
    assert output.put(0, b"goes on\n", 2) == b"" and output.put(1, b"live\n", 2) == b"live\n"
    assert output.wait_s(2) == HOLD_S - 1 and output.due(2) == []
    assert output.due(1 + HOLD_S) == [(0, MINE + b"goes on\n")] and output.wait_s(9) is None
    assert output.put(0, b"live again\n", 9) == b"live again\n"


def test_a_rank_that_others_name_is_at_its_end_however_long_it_takes():
    output = ErrorOutput()
    output.put(1, MINE, 1)
    output.put(0, VICTIM, 2)
    assert output.due(2 + HOLD_S) == [(0, VICTIM)]
    assert output.due(1 + MAX_UNLOAD_S - 0.1) == [] and output.due(1 + MAX_UNLOAD_S) == [(1, MINE)]


def test_a_rank_that_ends_well_has_its_traceback_printed_at_once():
    output = ErrorOutput()
    output.put(0, MINE, 1)
    output.ended(0, 0, 2, by_us=False)
    assert output.wait_s(2) == 0 and output.due(2) == [(0, MINE)]


def test_the_first_failure_is_printed_last_and_each_rank_in_one_piece():
    """However the lines of the ranks are mixed."""
    for seed in range(50):
        rng = random.Random(seed)
        output, left, live = ErrorOutput(), {0: VICTIM, 1: MINE, 2: VICTIM, 3: VICTIM}, b""
        output.put(1, left[1][:40] + b"\n", 0)
        while any(left.values()):
            rank = rng.choice([rank for rank in left if left[rank]])
            line, _, left[rank] = left[rank].partition(b"\n")
            live += output.put(rank, line + b"\n", 1)
        for rank in rng.sample(range(4), 4):
            output.ended(rank, 1, 2, by_us=False)
            output.ending(2)
        assert output.due(3) == [] and live == b"", f"seed {seed}"
        assert [(rank, text[-20:]) for rank, text in output.rest()] == [
            (rank, VICTIM[-20:]) for rank in (0, 2, 3)] + [(1, MINE[-20:])], f"seed {seed}"
        assert output.rest() == []


def test_a_job_that_hangs_at_its_end_shows_what_it_has():
    output, ending_s = ErrorOutput(term_grace_s=9), FAR_GRACE_S + 9
    output.put(1, MINE, 1)
    output.put(0, VICTIM, 1)
    output.ended(0, 1, 2, by_us=False)
    output.ending(2)
    output.ending(5)
    assert output.due(2 + ending_s - 0.1) == [] and output.wait_s(3) == ending_s - 1
    output.ended(1, -15, 4, by_us=True)
    assert output.due(2 + ending_s) == [(0, VICTIM), (1, MINE)]
    assert output.put(2, MINE, 2 + ending_s) == MINE


def test_a_rank_that_says_much_is_not_held():
    output = ErrorOutput()
    line = b"x" * 99 + b"\n"
    got = output.put(0, MINE, 1)
    for i in range(2 * HELD_BYTES // len(line)):
        got += output.put(0, line, 1)
        assert len(MINE) + (i + 1) * len(line) - len(got) <= HELD_BYTES
    assert got == MINE + line * (2 * HELD_BYTES // len(line)) and output.wait_s(1) is None


def test_the_launcher_names_who_raised_first_and_prints_it_last(tmp_path):
    """Rank 1 raises and ends long after the others, whose errors name it."""
    code, _, err = launch("-np", 4, *program(f"""
import atexit
open(f"{tmp_path}/{{rank}}", "w").close()
while len(os.listdir("{tmp_path}")) < 4:
    time.sleep(0.01)
if rank == 1:
    open("{tmp_path}/raised", "w").close()
    atexit.register(time.sleep, 0.6)
    raise KeyError("the cause")
while not os.path.exists("{tmp_path}/raised"):
    time.sleep(0.01)
class HorovodInternalError(RuntimeError): pass
print("live", file=sys.stderr)
raise HorovodInternalError("allreduce of tensor 'w': rank 1 (pid 17) on host h has left (it shut down)")
"""))
    assert code == 1
    lines = err.splitlines()
    # On a busy host rank 1 may be told to end before it has left.
    how = "(exited with code 1|raised an exception)"
    assert re.fullmatch(rf"lightccrun: rank 1 \(pid \d+, host .+\) {how}; ended the other 3 ranks", lines[-1]), err
    assert sorted(lines[:3]) == [f"[{rank}]<stderr>:live" for rank in (0, 2, 3)]
    assert [rank for rank, _ in itertools.groupby(lines[3:-1], lambda line: line[1])] == ["0", "2", "3", "1"], err
    assert lines[-2] == "[1]<stderr>:KeyError: 'the cause'"

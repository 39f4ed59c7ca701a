"""Results of run() from other hosts: their messages and the proof in each, by script; and agents that lie."""
import os
import pickle
import random
import shlex
import sys
import time

import pytest

from jobs import DEADLINE_S, launch
from lightcc._version import __version__
from lightcc.launch import result_file
from lightcc.launch.messages import Ended, Load, ResultPart, Unpacker, pack
from lightcc.launch.result_transfer import PART_BYTES, ResultReceiver, ResultSender, authenticated
from lightcc.launch.run_files import RunFiles
from lightcc.runner import run

SECRET = "5" * 64
SEED = int(os.environ.get("LIGHTCC_TEST_SEED", "0")) or random.randrange(1, 1 << 30)


class Trap:
    """Whoever unpickles it is seen."""

    path = None

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def trap(tmp_path):
    Trap.path = tmp_path / "sprung"
    yield pickle.dumps(Trap())
    assert not Trap.path.exists()


def leave(run_files, rank, body, is_error=False):
    with open(run_files.results[rank], "wb", closefd=False) as file:
        result_file.begin(file)
        file.write(body)
        result_file.commit(file, is_error, time.monotonic() - 5)


def body_of(run_files, rank):
    found = result_file.read_header(run_files.results[rank])
    return found and os.pread(run_files.results[rank], found.size, result_file.BODY_AT)


def everything(sender):
    found = []
    while sender:
        found.append(sender.take())
    return found


@pytest.mark.parametrize("size", [1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 17])
def test_a_value_comes_in_parts_and_then_the_end_of_its_rank(size):
    body = os.urandom(size)
    with RunFiles([7]) as there, RunFiles([7]) as here:
        leave(there, 7, body)
        sender, receiver = ResultSender(there, SECRET), ResultReceiver(here, SECRET)
        sender.put(Ended(7, 0))
        *parts, ended = everything(sender)
        assert ended == Ended(7, 0) and len(parts) == -(-size // PART_BYTES)
        for part in parts:
            assert result_file.read_header(here.results[7]) is None
            receiver.put(part)
        assert body_of(here, 7) == body
        found = result_file.read_header(here.results[7])
        assert not found.is_error and 5 <= time.monotonic() - found.time_s < 5 + DEADLINE_S
        assert 7 not in there.results  # its memory is free


def test_tracebacks_go_first_and_unwanted_values_nowhere():
    with RunFiles([1, 2, 3, 4]) as there:
        for rank in (1, 2, 3):
            leave(there, rank, b"x", is_error=rank == 3)
        sender = ResultSender(there, SECRET)
        for ended in (Ended(1, 0), Ended(2, 5), Ended(3, 1), Ended(4, -9)):
            sender.put(ended)
        assert list(sender.drop_value(3)) == [] and list(sender.drop_value(9)) == []
        assert sender.take().rank == 3 and sender.take() == Ended(3, 1)
        assert list(sender.drop_value(1)) == [Ended(1, 0)]
        assert everything(sender) == [Ended(2, 5), Ended(4, -9)]


def first(body, **other):
    return authenticated(ResultPart(0, False, 0, len(body), 0.0, b"", body)._replace(**other), SECRET)


@pytest.mark.parametrize("change", [
    {"rank": 1}, {"is_error": True}, {"begin": 1}, {"size": 9}, {"age_s": 1.0}, {"mac": bytes(32)}, {"chunk": b"9"},
])
def test_every_field_of_a_part_is_authenticated(change):
    with RunFiles([0, 1]) as here:
        with pytest.raises(ValueError, match="does not prove that its sender knows this job's secret"):
            ResultReceiver(here, SECRET).put(first(b"12345678")._replace(**change))
        assert [os.fstat(fd).st_size for fd in here.results.values()] == [0, 0]


@pytest.mark.parametrize("parts", [
    [first(b"12", size=4), first(b"12", size=4)],
    [first(b"12", size=4, begin=2)],
    [first(b"", size=4)],
    [first(b"123", size=2)],
    [first(b"12"), first(b"3", begin=2, size=3), first(b"3", begin=3, size=3)],
])
def test_parts_come_once_and_in_order(parts):
    with RunFiles([0]) as here, pytest.raises(ValueError, match="is not what follows"):
        receiver = ResultReceiver(here, SECRET)
        for part in parts:
            receiver.put(part)


def test_mutated_frames_neither_crash_nor_pass(trap, monkeypatch):
    """Whatever is done to the bytes: each frame is refused, or it is what was sent."""
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    source = random.Random(SEED)
    body = trap * 20
    sent = [first(body[i:i + 300], begin=i, size=len(body)) for i in range(0, len(body), 300)]
    frames = [pack(part) for part in sent] + [pack(Load(b"abc")), pack(Ended(0, 0))]
    refused = 0
    for _ in range(20_000):
        stream = bytearray(b"".join(frames))
        for _ in range(source.choice((0, 1, 1, 1, 3))):
            if not stream:
                break
            at = source.randrange(len(stream))
            how = source.randrange(4)
            if how == 0:
                stream[at] ^= 1 << source.randrange(8)
            elif how == 1:
                del stream[at:at + source.choice((1, 4, 300))]
            elif how == 2:
                stream[at:at] = source.randbytes(source.choice((1, 4, 40)))
            else:
                stream[at:] = stream[source.randrange(len(stream)):]
        unpacker, got = Unpacker(), 0
        with RunFiles([0]) as here:
            receiver = ResultReceiver(here, SECRET)
            try:
                for message in unpacker.feed(bytes(stream)):
                    if isinstance(message, ResultPart):
                        receiver.put(message)
                        assert message == sent[got], f"seed {SEED}"
                        got += 1
            except (ValueError, KeyError) as error:
                assert isinstance(error, ValueError), f"seed {SEED}"
                refused += 1
            assert (body_of(here, 0) == body) == (got == len(sent)), f"seed {SEED}"
    assert 5_000 < refused < 20_000


def test_random_bytes_are_no_messages():
    source = random.Random(SEED)
    for _ in range(20_000):
        kind = source.randrange(16)
        body = source.choice((source.randbytes(source.randrange(80)), b"[" * 5000, b'[1, "a", {}, [], null, 1e999]',
                              b"[]", b"[1, 2]", b'["a", 1]', b"null", b"{}"))
        try:
            for message in Unpacker().feed(bytes([kind]) + len(body).to_bytes(4, "big") + body):
                types = [type_ for type_ in type(message).__annotations__.values()]
                for value, type_ in zip(message, types):
                    assert type(value) is getattr(type_, "__origin__", type_), f"seed {SEED}"
        except ValueError as error:
            assert str(error).startswith("no "), f"seed {SEED}"


# An agent that does not know the secret, in the place of one that does.

IMPOSTOR = f"""
import pickle, sys
from lightcc.launch.messages import Ended, ResultPart, Started, pack
from lightcc.launch.result_transfer import authenticated
body = bytes.fromhex(sys.argv[1])
part = authenticated(ResultPart(0, False, 0, len(body), 0.0, b"", body), "the wrong one")
sys.stdout.buffer.write(b"lightcc-agent {__version__}\\n")
sys.stdout.buffer.flush()
sys.stdin.buffer.read(1)
sys.stdout.buffer.write(pack(Started(0, 1)) + pack(part) + pack(Ended(0, 0)))
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


def test_a_result_from_an_unauthenticated_agent_is_refused_and_not_unpickled(trap, monkeypatch):
    monkeypatch.setenv("LIGHTCC_LAUNCH_COMMAND", shlex.join(
        ["env", "lightcc_line={command}", sys.executable, "-c", IMPOSTOR, trap.hex()]))
    # Whether the agent counts as started by then depends on which of its pipes is read first.
    with pytest.raises(RuntimeError, match="host h1.*: its agent does not make sense: a part of rank 0's result does "
                                           "not prove that its sender knows this job's secret"):
        run(int, hosts="h1:1")


def test_results_that_nobody_asked_for_are_refused():
    code, _, err = launch("-np", 1, "-H", "h1:1", "--launch-command", shlex.join(
        ["env", "lightcc_line={command}", sys.executable, "-c", IMPOSTOR, "00"]), "true")
    assert code == 1 and "it sends results that nobody asked for" in err

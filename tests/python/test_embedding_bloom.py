"""Keys that are counted in a Bloom filter of a fixed size before they get a row: admission=E.Bloom(bytes, error)."""
import collections
import json
import logging
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
from trained_rows import batch, counted, embedding, expect_counts_go_back, keys_of, train

import lightcc.torch as hvd
import ranks
from lightcc.embedding.shard_file import ShardReader, ShardWriter
from lightcc.torch import embedding as E

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]
MIB = 1 << 20
BLOOM = E.Bloom(4 * MIB)


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture
def folder(tmp_path):
    return hvd.broadcast_object(str(tmp_path / "saved"))


def test_wrong_arguments():
    for wrong in (0, 4 * MIB - 1, 1.5, -4 * MIB, 1 << 43):
        with pytest.raises(ValueError, match="bytes must be a whole number from 4194304"):
            E.Bloom(wrong)
    for wrong in (0, 1e-7, 0.6, -1, float("nan")):
        with pytest.raises(ValueError, match="error must be from 1e-6 to 0.5"):
            E.Bloom(4 * MIB, error=wrong)
    with pytest.raises(ValueError, match="table 'wrong': .* give one above 1"):
        embedding("wrong", admission=BLOOM)
    with pytest.raises(ValueError, match="a filter counts to 65536"):
        embedding("wrong", min_count=65537, admission=BLOOM)
    with pytest.raises(TypeError, match="table 'wrong': admission=3"):
        embedding("wrong", min_count=3, admission=3)


def test_keys_that_a_filter_counts():
    """tests/unit/embedding/embedding_filter_test.cc fills filters with as many, and sees how often they err."""
    assert [BLOOM.keys(most) for most in (4, 16, 256, 65536)] == [1648520, 780609, 351984, 147298]
    assert [BLOOM.shape(most)["hashes"] for most in (4, 16, 256, 65536)] == [6, 6, 6, 5]
    assert E.Bloom(16 * MIB - 5).keys(4) == 4 * BLOOM.keys(4)
    assert BLOOM.keys(3) > 4 * (14 * MIB // 4) // 14, "exact counts take more than 14 bytes a key"


def check_a_large_filter_lets_in_what_exact_counts_do():
    user, sparse = embedding("large", min_count=4, admission=E.Bloom(16 * MIB))
    seen = collections.Counter()
    for step in range(36):
        train(user, sparse, [step])
        seen.update(batch(step)[0])
        assert step % 4 or [key for key, _, _ in keys_of(user)] == sorted(key for key, n in seen.items() if n >= 4)
    stats = user.stats()
    assert stats["admitted"] == stats["rows"]
    few = sum(n < 4 for n in seen.values())
    assert few <= sum(hvd.allgather_object(stats["candidates"])) <= len(seen) + hvd.size()


def check_it_errs_within_its_bound_in_memory_that_is_fixed():
    """Of 10^5 keys that come once, as the first after those for which the filter is made."""
    bloom = E.Bloom(4 * MIB, error=1e-5)
    user, sparse = embedding("errs", min_count=2, admission=bloom)
    sizes = []
    for part in np.split(np.arange(bloom.keys(2) + 100_000) * 7919, [bloom.keys(2)]):
        before = len(user.table)
        user(torch.tensor(part[hvd.rank()::hvd.size()])).sum().backward()
        sparse.step()
        sizes.append(hvd.allreduce(torch.tensor(float(user.stats()["candidate_bytes"])), op=hvd.Sum).item())
    wrong = hvd.allreduce(torch.tensor(float(len(user.table) - before)), op=hvd.Sum).item()
    assert wrong <= 6  # of 1 that is expected
    of_a_rank = 2.5 * MIB  # pieces of memory that are not full, and where they are
    assert sizes[0] == sizes[1] <= 1.05 * 4 * MIB + hvd.size() * of_a_rank, sizes


def check_a_filter_that_fills_says_so_once(caplog):
    bloom = E.Bloom(4 * MIB, error=1e-3)
    user, sparse = embedding("fills", min_count=2, admission=bloom)
    most, told = bloom.keys(2), []
    with caplog.at_level(logging.WARNING, "lightcc"):
        for part in np.split(np.arange(int(1.5 * most)) * 7919, [most // 2, int(0.95 * most), int(1.1 * most)]):
            user(torch.tensor(part[hvd.rank()::hvd.size()])).sum().backward()
            sparse.step()
            told.append((len(caplog.records), user.stats()["admission_error"]))
    assert [warnings for warnings, _ in told] == ([0, 0, 1, 1] if hvd.rank() == 0 else [0] * 4)
    errors = [error for _, error in told]
    assert errors == sorted(errors) and errors[1] < 1e-3 < errors[2]
    assert user.statistics()["admission_error"] == max(hvd.allgather_object(errors[3]))
    if hvd.rank() == 0:
        assert re.search(
            r"^table 'fills': its filter has counted about \d+ keys, and about 0\.00\d+ of those that come next .*"
            r"Bloom\(bytes=4194304, error=0\.001\) keeps its error up to \d+ keys\. Make the table with admission="
            r"Bloom\(bytes=12582912, error=0\.001\), which keeps it up to \d+; counting begins anew",
            caplog.records[0].getMessage()), caplog.text
    before, new = len(user.table), (np.arange(20_000) - 10**9).astype(np.int64)
    user(torch.tensor(new[hvd.rank()::hvd.size()])).sum().backward()
    sparse.step()
    early = sum(hvd.allgather_object(len(user.table) - before)) / len(new)
    assert 0.6 * errors[3] <= early <= 1.5 * errors[3], (early, errors[3])


def check_counts_go_back_with_a_restore():
    expect_counts_go_back(*embedding("restored", min_count=4, admission=BLOOM))


def check_it_is_saved(folder, caplog):
    user, sparse = embedding("saved", min_count=4, admission=BLOOM)
    train(user, sparse, range(12))
    E.save(folder, user)
    then = counted(user), keys_of(user)
    train(user, sparse, range(12, 24))
    E.save_delta(folder, user)
    later = counted(user), keys_of(user)
    train(user, sparse, range(24, 30))
    E.load(folder, user)
    assert (counted(user), keys_of(user)) == later and then[0] != later[0]
    user.table.close()
    for options in ({"min_count": 4}, {"min_count": 4, "admission": E.Bloom(8 * MIB)}, {"min_count": 9,
                                                                                      "admission": BLOOM}):
        other, sparse = embedding("saved", **options)
        with caplog.at_level(logging.WARNING, "lightcc"):
            caplog.clear()
            E.load(folder, other)
        assert ("table 'saved': keys without a row were counted in a filter of" in caplog.text) == (hvd.rank() == 0)
        assert counted(other) == {} and keys_of(other) == later[1]
        other.table.close()


PROGRAM = """
import sys
import test_embedding_bloom as test
test.program(*{arguments!r})
"""


def program(source, target):
    """Loads or trains; says what the tables hold; saves; trains on; says it again."""
    hvd.init()
    user, sparse = embedding("saved", min_count=4, admission=BLOOM)
    if source is None:
        train(user, sparse, range(20))
    else:
        E.load(source, user)
    say(user)
    E.save(target, user)
    train(user, sparse, range(20, 30))
    say(user)


def say(user):
    holds = json.dumps([sorted(counted(user).items()), keys_of(user)])
    if hvd.rank() == 0:
        print("HOLDS", holds, flush=True)


def test_three_ranks_then_two_then_three(tmp_path):
    """What a filter holds does not depend on the number of ranks."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])

    def run(np, *arguments):
        output = ranks.run_script(PROGRAM.format(arguments=arguments), np, PYTHONPATH=path)
        return [line.split("HOLDS ")[1] for line in output.splitlines() if "HOLDS" in line]

    saved, trained_on = run(3, None, str(tmp_path / "a"))
    assert run(2, str(tmp_path / "a"), str(tmp_path / "b")) == [saved, trained_on]
    assert run(3, str(tmp_path / "b"), str(tmp_path / "c")) == [saved, trained_on]


def check_a_damaged_save_is_refused_or_another_filter(folder):
    user, sparse = embedding("damaged", min_count=4, admission=BLOOM)
    train(user, sparse, range(12))
    E.save(folder, user)
    with open(os.path.join(folder, "manifest.json")) as file:
        shard = os.path.join(folder, json.load(file)["shards"][0]["file"])
    rng = random.Random(5)
    for _ in range(12):
        if hvd.rank() == 0:
            shutil.copy(shard, shard + ".whole")
            with open(shard, "r+b") as file:
                file.seek(rng.randrange(os.path.getsize(shard)))
                file.write(bytes([rng.randrange(256)]))
        hvd.barrier()
        try:
            E.load(folder, user)
        except (ValueError, hvd.HorovodInternalError):
            pass
        hvd.barrier()
        if hvd.rank() == 0:
            os.replace(shard + ".whole", shard)
    hvd.barrier()
    E.load(folder, user)
    train(user, sparse, range(12, 24))
    hvd.barrier()
    if hvd.rank() == 0:
        put(shard, "damaged.candidate.key", BLOOM.bytes // 4)
    hvd.barrier()
    with pytest.raises(ValueError, match="table 'damaged': its filter has no piece 1048576"):
        E.load(folder, user)


def put(shard, name, value):
    """Into the first place of a column."""
    reader = ShardReader(shard)
    columns = {column: reader.read(column, 0, of.shape[0]) for column, of in reader.columns.items()}
    columns[name][0] = value
    writer = ShardWriter(shard, {column: (of.dtype, of.shape) for column, of in columns.items()}, reader.metadata)
    for column, values in columns.items():
        writer.write(column, 0, values)
    writer.close()


def check_ranks_that_count_differently():
    options = {"admission": BLOOM} if hvd.rank() else {}
    user, _ = embedding("different", min_count=4, **options)
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="table 'different'"):
            user(torch.tensor([1]))

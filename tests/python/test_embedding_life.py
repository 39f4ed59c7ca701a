"""The life of a row: keys are counted before they get one, rows go, and what has changed since a save can be told. All
of it is the same on any number of ranks."""
import collections

import numpy as np
import pytest
import torch
from trained_rows import DIM, batch, counted, embedding, expect_counts_go_back, keys_of, train

import lightcc.torch as hvd
import ranks
from lightcc.embedding.rows import slices
from lightcc.torch import embedding as E

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# Admission

@pytest.mark.parametrize("optimizer", [E.SGD, E.SparseAdam])
def check_keys_get_rows_when_they_have_occurred_often_enough(optimizer):
    user, sparse = embedding(f"admitted {optimizer.__name__}", optimizer, min_count=4)
    seen = collections.Counter()
    for step in range(36):
        train(user, sparse, [step])
        seen.update(batch(step)[0])
        assert step % 4 or [key for key, _, _ in keys_of(user)] == sorted(key for key, n in seen.items() if n >= 4)
    assert counted(user) == {key: n for key, n in seen.items() if n < 4} and counted(user)
    stats = user.stats()
    assert stats["admitted"] == stats["rows"] and stats["candidate_bytes"] >= 12 * stats["candidates"]


def check_what_a_key_without_a_row_reads_and_learns():
    user, sparse = embedding("absent", lr=1.0, min_count=2 * hvd.size(), absent=0.5)
    first = user(torch.tensor([7, 7]))
    assert (first == 0.5).all()
    first[0].sum().backward()  # two occurrences on each rank, but then there is no third
    sparse.step()
    after = user(torch.tensor([7])).detach()
    assert keys_of(user) == [(7, 1, 1)]
    other, _ = embedding("absent too")
    assert not torch.equal(after, first[:1]) and (user(torch.tensor([8])) == 0.5).all()
    user(torch.tensor([9])).sum().backward()
    sparse.step()
    assert counted(user) == ({9: hvd.size()} if hvd.size() * 2 > hvd.size() else {})
    assert (user(torch.tensor([9])) == 0.5).all()


def check_dropped_gradients_are_in_no_norm():
    user, sparse = embedding("norm", min_count=100)
    user(torch.tensor([1, 2])).sum().backward()
    assert sparse.clip_grad_norm_(1.0) == 0
    sparse.zero_grad()  # forgets the step, and the counts with it
    assert counted(user) == {}


def check_a_step_that_is_refused_counts_nothing():
    user, sparse = embedding("refused", min_count=3)
    train(user, sparse, range(3))
    before = counted(user), keys_of(user)
    output = user(torch.tensor([1000 + hvd.rank()]))
    output.backward(torch.full_like(output, float("nan") if hvd.rank() == hvd.size() - 1 else 1.0))
    with pytest.raises((ValueError, hvd.HorovodInternalError), match="not finite"):
        sparse.step()
    assert (counted(user), keys_of(user)) == before


def check_several_lookups_of_a_step_are_counted_together():
    user, sparse = embedding("several", min_count=3 * hvd.size())
    (user(torch.tensor([1, 1])).sum() + user(torch.tensor([1, 2])).sum()).backward()
    sparse.step()
    assert [key for key, _, _ in keys_of(user)] == [1] and counted(user) == {2: hvd.size()}


def check_strings_are_counted():
    user, sparse = embedding("strings", min_count=2 * hvd.size(), strings=True)
    user(["a", "b", "a"]).sum().backward()
    sparse.step()
    assert len(keys_of(user)) == 1 and list(counted(user).values()) == [hvd.size()]


def check_counts_go_back_with_a_restore():
    expect_counts_go_back(*embedding("restored", min_count=4))


def check_candidates_are_saved(tmp_path):
    folder = hvd.broadcast_object(str(tmp_path / "saved"))
    user, sparse = embedding("saved", min_count=4)
    train(user, sparse, range(12))
    E.save(folder, user)
    expected = counted(user), keys_of(user)
    train(user, sparse, range(12, 24))
    later = counted(user), keys_of(user)
    E.load(folder, user)
    assert (counted(user), keys_of(user)) == expected
    train(user, sparse, range(12, 24))
    assert (counted(user), keys_of(user)) == later
    user.table.close()
    lower, sparse = embedding("saved", min_count=2)  # another one may load it: keys go in when they are seen again
    E.load(folder, lower)
    assert (counted(lower), keys_of(lower)) == expected
    key = next(key for key, n in expected[0].items() if n >= 1)
    lower(torch.tensor([key])).sum().backward()
    sparse.step()
    assert key in [one for one, _, _ in keys_of(lower)]
    lower.table.close()
    none, _ = embedding("saved")
    E.load(folder, none)
    assert counted(none) == {} and keys_of(none) == expected[1]


def check_wrong_counts():
    for wrong in (0, -1, 1 << 31):
        with pytest.raises(ValueError, match="min_count is"):
            embedding("wrong", min_count=wrong)


def check_ranks_that_count_differently():
    user, sparse = embedding("different", min_count=2 + (hvd.rank() == 0))
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="table 'different'"):
            user(torch.tensor([1]))


# Eviction

class Rows:
    """Which keys have rows, with count and last, by the words of the documentation."""

    def __init__(self, goes, admit=1):
        self.rows, self.goes, self.step, self.evicted = {}, goes, 0, 0
        self.seen, self.admit = collections.Counter(), admit

    def train(self, keys):
        self.step += 1
        for key, times in collections.Counter(keys).items():
            if key not in self.rows:
                self.seen[key] += times
                if self.seen[key] < self.admit:
                    continue
                del self.seen[key]
            self.rows[key] = self.rows.get(key, (0, 0))[0] + 1, self.step
        gone = [key for key, (count, last) in self.rows.items() if self.goes(key, count, last, self.step)]
        for key in gone:
            del self.rows[key]
        self.evicted += len(gone)

    def all(self):
        return sorted((key, count, last) for key, (count, last) in self.rows.items())


def turn(key, every):
    """Of a key, as csrc/embedding/hash.h mixes it."""
    mask = (1 << 64) - 1
    key = (key & mask) + 0x9e3779b97f4a7c15 & mask
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9 & mask
    key = (key ^ key >> 27) * 0x94d049bb133111eb & mask
    return (key ^ key >> 31) % every


ASKED = 7
POLICIES = {
    "ttl": (E.Ttl(5), lambda key, count, last, step: step - last >= 5),
    "ttl of one step": (E.Ttl(1), lambda key, count, last, step: step - last >= 1),
    "count": (E.Count(0.6, 0.8), lambda key, count, last, step: count * 0.8 ** (step - last) < 0.6),
    "function": (E.Asking(lambda key, count, last, step: (count < 3) & (step - last > 1), every=ASKED),
                 lambda key, count, last, step: step % ASKED == turn(key, ASKED) and count < 3 and step - last > 1),
}


@pytest.mark.parametrize("name", POLICIES)
def check_the_same_rows_go_on_any_number_of_ranks(name):
    policy, goes = POLICIES[name]
    user, sparse = embedding(f"evicted {name}", evict=policy, min_count=2 if name == "ttl" else 1)
    expected = Rows(goes, admit=user.table.min_count)
    for step in range(40):
        train(user, sparse, [step])
        expected.train(batch(step)[0])
        assert step % 5 or keys_of(user) == expected.all()
    assert keys_of(user) == expected.all() and expected.evicted
    assert sum(hvd.allgather_object(user.stats()["evicted"])) == expected.evicted


def check_a_bare_function_and_norms():
    user, sparse = embedding("bare", evict=lambda key, count, last, step: key % 2 == 0)
    train(user, sparse, range(1, 80))
    assert len(keys_of(user)) < len({key for step in range(1, 80) for key in batch(step)[0]})
    user, sparse = embedding("norms", init=E.Constant(1.0), lr=0.0,
                             evict=E.Asking(lambda key, count, last, step, norm: norm != DIM ** 0.5, 2, norms=True))
    train(user, sparse, range(5))
    assert len(keys_of(user)) == len({key for step in range(5) for key in batch(step)[0]})


def check_rows_of_small_norm_go():
    threshold = 2.5 / hvd.size()  # a key that occurred once has a norm of 1.73 / size
    user, sparse = embedding("small", init=E.Constant(0.0), lr=1.0, evict=E.L2(threshold, every=4))

    def norms():
        return [float(np.linalg.norm(row)) for part in slices(user.table, 64) for row in part["weight"]]
    train(user, sparse, range(3))
    assert min(sum(hvd.allgather_object(norms()), [])) < threshold
    for _ in range(4):
        sparse.step()
    left = sum(hvd.allgather_object(norms()), [])
    assert left and min(left) >= threshold


def check_an_evicted_key_that_returns_is_a_new_row():
    user, sparse = embedding("returns", E.Adagrad, evict=E.Ttl(2))
    first = user(torch.tensor([5])).detach()
    for _ in range(3):
        user(torch.tensor([5])).sum().backward()
        sparse.step()
    assert keys_of(user) == [(5, 3, 3)]
    sparse.step()
    sparse.step()
    assert keys_of(user) == [] and torch.equal(user(torch.tensor([5])).detach(), first)
    user(torch.tensor([5])).sum().backward()
    sparse.step()
    assert keys_of(user) == [(5, 1, 6)]
    slots = [part["v"] for part in slices(user.table, 9) if len(part["key"])]
    assert all((slot == 1).all() for slot in slots)  # of one gradient, averaged


def check_rows_stay_within_their_limit():
    most = 32
    user, sparse = embedding("limited", max_rows=most)
    trained = []
    for step in range(25):
        train(user, sparse, [step])
        rows, trained = keys_of(user), trained + [batch(step)[0]]
        assert len(rows) <= most and set(batch(step)[0]) <= {key for key, _, _ in rows}
        oldest = min(last for _, _, last in rows)
        assert {key for keys in trained[oldest:] for key in keys} == {key for key, _, last in rows if last > oldest}
    assert sum(hvd.allgather_object(user.stats()["evicted"])) > 0
    gathered = hvd.allgather_object(keys_of(user))
    assert all(rows == gathered[0] for rows in gathered)


@pytest.mark.parametrize("options", [{"max_rows": 12}, {"evict": E.Asking(lambda key, count, last, step: key % 2 == 0,
                                                                         every=1)}])
def check_rows_go_after_a_restore_as_before_it(options):
    """Also in the step whose number was the last one before the restore."""
    user, sparse = embedding("restored", **options)
    state = hvd.elastic.TorchState(user, sparse=sparse)
    train(user, sparse, range(3))
    state.save()
    train(user, sparse, [3])
    known, evicted = keys_of(user), sum(hvd.allgather_object(user.stats()["evicted"]))
    state.restore()
    train(user, sparse, [3])
    assert keys_of(user) == known
    assert sum(hvd.allgather_object(user.stats()["evicted"])) > evicted


def check_saved_rows_go_when_they_would_have_gone(tmp_path):
    folder = hvd.broadcast_object(str(tmp_path / "ttl"))
    user, sparse = embedding("saved ttl", evict=E.Ttl(6))
    train(user, sparse, range(12))
    E.save(folder, user)
    train(user, sparse, range(12, 20))
    expected = keys_of(user)
    E.load(folder, user)
    train(user, sparse, range(12, 20))
    assert keys_of(user) == expected


def check_rows_go_while_a_rank_serves():
    user, sparse = embedding("served", evict=lambda key, count, last, step: step - last > 2, max_rows=40)
    for step in range(6 if hvd.rank() else 10):
        user(torch.tensor([100 * step + hvd.rank()])).sum().backward()
        sparse.step()
    E.serve()
    assert len(keys_of(user)) <= 40


@pytest.mark.parametrize("answer, told", [(lambda key: [True] * 99, "ValueError: it was given .* and returned bool"),
                                          (lambda key: key, "ValueError: it was given .* and returned int64"),
                                          (lambda key: 1 / 0, "ZeroDivisionError: division by zero")])
def check_a_function_that_errs_on_one_rank(answer, told):
    """All ranks hear of it, and no row goes; the step was applied, and later ones are as ever."""
    wrong = hvd.size() - 1
    errs = True

    def function(key, count, last, step):
        return answer(key) if errs and hvd.rank() == wrong else key < 32
    user, sparse = embedding("errs", evict=E.Asking(function, every=1))
    user(torch.arange(64)).sum().backward()
    with pytest.raises(ValueError, match=f"table 'errs': the eviction's function failed on rank {wrong}: {told}"):
        sparse.step()
    assert len(keys_of(user)) == 64
    errs = False
    for _ in range(2):  # the rows wait for their turn after the next one
        user(torch.arange(64, 70)).sum().backward()
        sparse.step()
    assert [key for key, _, _ in keys_of(user)] == list(range(32, 70))


def check_a_function_that_errs_lets_no_row_of_another_table_go():
    wrong = hvd.size() - 1
    good = E.HashEmbedding(2, name="errs a", evict=E.Asking(lambda key, *_: key < 99, every=1))
    bad = E.HashEmbedding(2, name="errs b", evict=E.Asking(
        lambda key, *_: key < 99 if hvd.rank() != wrong else None, every=1))
    sparse = E.SGD(E.tables(torch.nn.ModuleList([good, bad])), lr=1.0)
    sum(one.sum() for one in E.lookup([(good, torch.arange(8)), (bad, torch.arange(8))])).backward()
    with pytest.raises(ValueError, match=f"table 'errs b': .* on rank {wrong}"):
        sparse.step()
    assert len(keys_of(good)) == len(keys_of(bad)) == 8


def check_a_rank_that_serves_hears_of_a_function_that_errs():
    user, sparse = embedding("errs served", evict=E.Asking(lambda key, *_: key < 99 if hvd.rank() else None, every=1))

    def step():
        user(torch.arange(8)).sum().backward()
        sparse.step()
    with pytest.raises(ValueError, match="table 'errs served': .* on rank 0"):
        E.serve() if hvd.rank() == 1 else step()
    assert len(keys_of(user)) == 8


@pytest.mark.parametrize("name, options", [("max_rows", {"max_rows": 5}), ("evict", {"evict": E.Ttl(3)}),
                                           ("kind", {"evict": lambda *_: None})])
def check_ranks_that_evict_differently(name, options):
    user, _ = embedding(f"differs in {name}", **(options if hvd.rank() == 0 else {}))
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=f"table 'differs in {name}' .*eviction, max_rows"):
            user(torch.tensor([1]))


def check_wrong_policies():
    for make in (lambda: E.Ttl(0), lambda: E.Ttl(1.5), lambda: E.Count(0, 0.5), lambda: E.Count(1, 1), lambda: E.L2(0),
                 lambda: E.L2(1, every=0), lambda: embedding("wrong policy", max_rows=-1)):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(TypeError, match="wrong policy.*evict=3"):
        embedding("wrong policy", evict=3)


# Where rows are

@pytest.mark.parametrize("kind", ["consecutive", "one hot key", "low bits alike"])
def check_hostile_keys_are_spread(kind):
    user, sparse = embedding(f"hostile {kind}")
    n, rng = 3000, np.random.default_rng(hvd.rank())
    for step in range(2):
        first = (step * hvd.size() + hvd.rank()) * n
        keys = np.arange(first, first + n)
        if kind == "one hot key":
            keys[rng.random(n) < 0.5] = 77
        elif kind == "low bits alike":
            keys = keys << 48 | 12345
        user(torch.from_numpy(keys)).sum().backward()
        sparse.step()
    numbers = user.statistics()
    assert numbers["rows"] == len(keys_of(user)) and numbers["steps"] == 2
    mean = numbers["rows"] / hvd.size()
    assert 1 <= numbers["rows_max_to_mean"] <= 1.1 + 4 / mean ** 0.5

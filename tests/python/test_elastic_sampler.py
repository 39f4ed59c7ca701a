"""ElasticSampler: no sample is lost and none seen twice, whatever happens to the world, but for the padding. The ranks
are samplers of one process, each told its rank and the size."""
import contextlib
import random
from collections import Counter

import pytest
import torch

from lightcc.torch.elastic import sampler as module
from lightcc.torch.elastic.sampler import ElasticSampler

SEEDS = range(60)


@contextlib.contextmanager
def being(rank, size):
    kept = module.rank, module.size
    module.rank, module.size = (lambda: rank), (lambda: size)
    try:
        yield
    finally:
        module.rank, module.size = kept


def world(size, count, state=None, **options):
    """A sampler on each rank; state: where they go on."""
    samplers = []
    for rank in range(size):
        with being(rank, size):
            samplers.append(ElasticSampler(range(count), **options))
            if state is not None:
                samplers[-1].load_state_dict(state)
    return samplers


def set_epoch(samplers, epoch):
    for rank, sampler in enumerate(samplers):
        with being(rank, len(samplers)):
            sampler.set_epoch(epoch)


def batches(sampler, batch_size):
    indices = list(sampler)
    assert len(indices) == len(sampler)
    return [indices[i:i + batch_size] for i in range(0, len(indices), batch_size)]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_sample_is_seen_once_when_each_batch_is_committed(seed):
    """Worlds change at random; some ranks have committed one batch more than rank 0 then."""
    rng = random.Random(seed)
    count, shuffle = rng.choice([0, 1, 2, 3, 7, 50, 101]), rng.random() < 0.8
    state, size = {"epoch": 0, "processed_num": 0}, rng.randint(1, 5)
    options = {"shuffle": shuffle, "seed": rng.randrange(100)}
    orders = []
    for epoch in range(3):
        seen, padding = [], 0
        over = False
        while not over:  # one world after the other
            samplers = world(size, count, state, **options)
            rest = samplers[0].total_size - len(samplers[0].remaining_indices)
            assert 0 <= rest < size and len({len(sampler) for sampler in samplers}) == 1
            batch_size = rng.randint(1, 4)
            steps = list(zip(*(batches(sampler, batch_size) for sampler in samplers)))
            stop = rng.randint(0, len(steps) + 2)
            for number, step in enumerate(steps[:stop]):
                assert len({len(batch) for batch in step}) == 1
                seen += [index for index in zip(*step) for index in index]
                for sampler, batch in zip(samplers, step):
                    sampler.record_batch(number, len(batch))
                state = samplers[0].state_dict()  # the commit
            if stop < len(steps):
                for sampler in samplers[1:]:  # these have committed one more, which goes back with rank 0
                    sampler.record_batch(stop, len(steps[stop][0]))
                size = rng.randint(1, 5)
            else:
                over, padding = True, rest
        assert sorted(seen[:len(seen) - padding]) == list(range(count))
        assert set(seen[len(seen) - padding:]) <= set(range(count)) and len(seen) == count + padding
        orders.append(seen[:count])
        set_epoch(samplers, epoch + 1)
        state = samplers[-1].state_dict()
        assert state == {"epoch": epoch + 1, "processed_num": 0}
    if not shuffle:
        assert all(order == list(range(count)) for order in orders)
    elif count > 40:
        assert len(set(map(tuple, orders))) == 3, "the epochs have the same order"


@pytest.mark.parametrize("commit_every", [2, 5])
def test_with_sparser_commits_the_batches_since_the_last_one_come_again(commit_every):
    samplers, state, seen = world(2, 60), None, []
    for number, step in enumerate(zip(*(batches(sampler, 3) for sampler in samplers))):
        if number == 7:
            break
        seen += [index for batch in step for index in batch]
        for sampler in samplers:
            sampler.record_batch(number, 3)
        if (number + 1) % commit_every == 0:
            state = samplers[0].state_dict()
    kept = 7 - 7 % commit_every
    assert state["processed_num"] == kept * 6
    again = [index for sampler in world(3, 60, state) for index in sampler]
    counts = Counter(seen) + Counter(again)
    assert Counter(counts.values()) == Counter({1: 60 - (7 - kept) * 6, 2: (7 - kept) * 6})
    assert sorted(index for index, times in counts.items() if times == 2) == sorted(seen[kept * 6:])


def test_the_last_batch_may_be_counted_as_a_full_one():
    """As Horovod's examples do."""
    (sampler,) = world(1, 10)
    for number in range(3):
        sampler.record_batch(number, 4)
    with being(0, 1):
        sampler.reset()
    assert list(sampler) == [] and len(sampler) == 0 and sampler.state_dict() == {"epoch": 0, "processed_num": 12}


def test_order_is_that_of_seed_and_epoch():
    def order(**options):
        return list(world(1, 50, **options)[0])

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(shuffle=False) == list(range(50))
    assert order(seed=1) == list(world(1, 50, {"epoch": 0, "processed_num": 0}, seed=1)[0])
    assert order(seed=1) != list(world(1, 50, {"epoch": 1, "processed_num": 0}, seed=1)[0])
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    order(seed=9)
    assert torch.equal(torch.rand(1), drawn), "the user's random numbers are others"


def test_a_sampler_says_where_it_is():
    first, second = world(2, 11, shuffle=False)
    assert (first.num_replicas, first.rank, first.epoch, first.processed_num) == (2, 0, 0, 0)
    assert (second.num_samples, second.total_size, second.remaining_indices) == (6, 12, list(range(11)))
    assert (list(first), list(second)) == ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0])
    second.record_batch(0, 2)
    with being(0, 1):
        second.reset()
    assert (second.num_replicas, second.rank, list(second)) == (1, 0, [4, 5, 6, 7, 8, 9, 10])


def test_a_loader_takes_it_whose_workers_run_ahead():
    sampler = world(2, 23)[1]
    loader = torch.utils.data.DataLoader(range(23), batch_size=4, sampler=sampler, num_workers=1)
    assert isinstance(sampler, torch.utils.data.Sampler) and len(loader) == 3
    assert [index for batch in loader for index in batch.tolist()] == list(sampler)


def test_before_init_it_says_what_is_missing():
    with pytest.raises(ValueError, match=r"init\(\)"):
        ElasticSampler(range(3))

"""DecayedAUC: against the statistic over all pairs of samples, on any number of ranks, and on a model that breaks."""
import math

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc import embedding
from lightcc.torch import embedding as E

pytestmark = pytest.mark.usefixtures("job")

SEEDS = range(5)


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def exact(scores, labels, weights):
    """The weighted share of pairs of a positive and a negative in which the positive scores higher; ties are half."""
    positive, negative = labels > 0, labels == 0
    higher = np.sign(scores[positive][:, None] - scores[negative][None, :]) / 2 + 0.5
    pairs = weights[positive][:, None] * weights[negative][None, :]
    return float((higher * pairs).sum() / pairs.sum())


def batches_of(seed, batch=64, count=20):
    rng = np.random.default_rng(seed)
    labels = (rng.random((count, batch)) < 0.3).astype(np.float64)
    return np.clip(rng.normal(0.4 + 0.1 * labels, 0.2), 0, 1), labels


@pytest.mark.parametrize("bins", [2, 16, 4096])
@pytest.mark.parametrize("half_life", [50, 700, math.inf])
def check_it_is_the_weighted_statistic_within_its_binning_bound(bins, half_life):
    for seed in SEEDS:
        scores, labels = batches_of(seed)
        auc = embedding.DecayedAUC(half_life, bins)
        ages = np.repeat(np.arange(len(scores))[::-1] * scores.shape[1], scores.shape[1])
        mine = slice(hvd.rank(), None, hvd.size())
        for some, of_them in zip(scores, labels):
            auc.update(some[mine], of_them[mine], of_all=len(some))
        expected = exact(scores.ravel(), labels.ravel(), 0.5 ** (ages / half_life))
        assert abs(auc.compute() - expected) <= auc.error + 1e-12, seed
        assert 0 < auc.error < 0.5


def check_ranks_summed_are_one():
    scores, labels = batches_of(7, batch=12 * 4)
    alone, shared = embedding.DecayedAUC(300), embedding.DecayedAUC(300)
    for some, of_them in zip(scores, labels):
        alone.update(some, of_them, of_all=len(some))
        parts = some.reshape(hvd.size(), -1), of_them.reshape(hvd.size(), -1)
        shared.update(torch.tensor(parts[0][hvd.rank()]), torch.tensor(parts[1][hvd.rank()]))
    assert shared.compute() == pytest.approx(alone.compute(), abs=1e-12)  # the sum of equal counts has the same ratio
    assert shared.error == pytest.approx(alone.error, abs=1e-12)


def check_a_rank_without_samples_fades_too():
    auc, expected = embedding.DecayedAUC(10), embedding.DecayedAUC(10)
    first = hvd.rank() == 0
    auc.update([0.9, 0.1], [1, 0])
    expected.update([0.9, 0.1] * hvd.size(), [1, 0] * hvd.size(), of_all=2 * hvd.size())
    for _ in range(3):
        auc.update([0.2, 0.6] if first else [], [1, 0] if first else [], of_all=2)
        expected.update([0.2, 0.6], [1, 0], of_all=2)
    assert auc.compute() == pytest.approx(expected.compute(), abs=1e-12)


def check_seconds_fade_by_the_clock():
    now = [1000.0]
    auc = embedding.DecayedAUC(60, unit="seconds", clock=lambda: now[0])
    auc.update([0.2, 0.9], [1, 0])       # wrong
    now[0] += 120
    auc.update([0.9, 0.2], [1, 0])       # right: four times the weight of each, sixteen times of the pair
    scores, labels = np.array([0.2, 0.9, 0.9, 0.2]), np.array([1, 0, 1, 0])
    expected = exact(scores, labels, np.array([0.25, 0.25, 1, 1]))
    assert auc.compute() == pytest.approx(expected, abs=auc.error)
    now[0] -= 500                        # a clock that is set back makes nothing heavier
    assert auc.compute() == pytest.approx(expected, abs=auc.error)


def check_state_and_share():
    scores, labels = batches_of(hvd.rank())
    auc = E.DecayedAUC(500)
    for some, of_them in zip(scores, labels):
        auc.update(some, of_them)
    other = E.DecayedAUC(500)
    other.load_state_dict(auc.state_dict())
    before = auc.compute()
    assert other.compute() == before
    other.share()
    assert other.compute() == pytest.approx(before, abs=1e-12)
    assert len({state["counts"].tobytes() for state in hvd.allgather_object(other.state_dict())}) == 1
    with pytest.raises(ValueError, match="has 4096 bins, and here are 8"):
        E.DecayedAUC(500, bins=8).load_state_dict(auc.state_dict())


def check_what_is_refused():
    auc = embedding.DecayedAUC(10)
    assert math.isnan(auc.compute())
    for scores, labels, text in (([math.nan], [1], "from 0 to 1"), ([1.5], [0], "from 0 to 1"),
                                 ([0.5], [0, 1], "labels")):
        with pytest.raises(ValueError, match=text):
            auc.update(scores, labels)
    auc.update([0.5, 1.0, 0.0], [1, 1, 1])
    assert math.isnan(auc.compute()), "there is no negative"
    for arguments in ({"half_life": 0}, {"half_life": math.nan}, {"half_life": 1, "bins": 1},
                      {"half_life": 1, "unit": "hours"}):
        with pytest.raises(ValueError, match="half life"):
            embedding.DecayedAUC(**arguments)


BATCH, BEFORE, AFTER = 256, 2000, 50


def check_a_model_that_breaks_is_seen_before_the_cumulative_value_shows_it():
    """The generator's best AUC is known: labels are drawn by a logit, and the model that knows it scores by it."""
    rng = np.random.default_rng(11)
    decayed, cumulative = embedding.DecayedAUC(10 * BATCH), embedding.DecayedAUC(math.inf)

    def train(steps, is_broken):
        for _ in range(steps):
            logits = rng.normal(0, 1.5, BATCH)
            chances = 1 / (1 + np.exp(-logits))
            labels = rng.random(BATCH) < chances
            scores = rng.permutation(chances) if is_broken else chances
            for metric in (decayed, cumulative):
                metric.update(scores[hvd.rank()::hvd.size()], labels[hvd.rank()::hvd.size()], of_all=BATCH)

    train(BEFORE, False)
    best = best_auc(1.5)
    assert cumulative.compute() == pytest.approx(best, abs=0.003)
    assert decayed.compute() == pytest.approx(best, abs=0.03)
    train(AFTER, True)
    assert decayed.compute() < best - 0.15, "a broken model has 0.5"
    assert cumulative.compute() > best - 0.02


def best_auc(deviation):
    """Of labels with the chance 1 / (1 + exp(-x)), x normal, scored by that chance; by a fine grid."""
    x = np.linspace(-8 * deviation, 8 * deviation, 20001)
    density, chance = np.exp(-(x / deviation) ** 2 / 2), 1 / (1 + np.exp(-x))
    positive, negative = density * chance, density * (1 - chance)
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / positive.sum() / negative.sum())

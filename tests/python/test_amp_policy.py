"""Policies of lightcc.amp, by tables: what they are told for each step, and what they decide. Without ranks."""
import math
import pickle

import pytest

from lightcc.amp.levels import most_precise, named
from lightcc.amp.policy import Always, AnyOf, HoldAfterLearningRateChange, OnPlateau, OnSpike, Policy, State, Warmup


def decided(policy, first=0, **told):
    """The levels of the steps as one letter each, F for float32 and l for low. told: for each step, by State's names;
    learning_rates as one rate a step."""
    steps = max(map(len, told.values()))
    letters = ""
    for step in range(steps):
        known = {name: values[step] for name, values in told.items()}
        if "learning_rates" in known:
            known["learning_rates"] = (known["learning_rates"],)
        letters += {"float32": "F", "low": "l"}[policy.decide(State(first + step, **known))]
    return letters


HOLD = HoldAfterLearningRateChange
RATES = [  # policy, the rates that steps see, what they decide on the steps after
    (HOLD(3), [1] * 4, "llll"),
    (HOLD(3), [1, 1, .1, .1, .1, .1, .1], "llFFFll"),
    (HOLD(1), [1, .1, .1], "lFl"),
    (HOLD(3), [1, .1, .1, .01, .01, .01, .01], "lFFFFFl"),             # a change during a hold begins it anew
    (HOLD(2), [.1, 1, 1, 1], "lFFl"),                                   # also one upwards
    (HOLD(2), [0, 1e-6, 1e-6, 1e-6], "lFFl"),                           # also from nothing
    (HOLD(2), [1, 0.995, 0.99, 0.985], "llll"),                         # less than min_change
    (HOLD(2, min_change=0), [1, 0.999, 0.999, 0.999], "lFFl"),
    (HOLD(2, min_change=0.5), [1, 0.6, 0.2, 0.2, 0.2], "llFFl"),
    (HOLD(5), [math.cos(step / 1000 * math.pi / 2) for step in range(900)], "l" * 900),
    (HOLD(5), [step / 1000 for step in range(1, 1001)], "l" + "F" * 104 + "l" * 895),  # a warm-up, until 1 %
]


@pytest.mark.parametrize("policy, rates, expected", RATES, ids=range(len(RATES)))
def test_hold_after_a_change_of_the_learning_rate(policy, rates, expected):
    assert decided(policy, learning_rates=rates) == expected


def test_one_group_is_enough():
    policy = HOLD(1)
    assert [policy.decide(State(i, learning_rates=rates)) for i, rates in enumerate([(1, 1), (1, .5), (1, .5)])] == [
        "low", "float32", "low"]
    assert policy.reason == "HoldAfterLearningRateChange: nothing asks for float32"


NONE, NAN = None, math.nan
LOSSES = [
    (OnPlateau(2), [NONE, 1, .5, .25, .2, .15], "llllll"),
    (OnPlateau(2), [1, .99, .98, .5, .1], "llFFF"),                     # for good
    (OnPlateau(2, cooldown=2), [1, 1, 1, 1, 1, 1, 1, 1], "llFFlFFl"),
    (OnPlateau(2, threshold=0), [1, .999, .998, .997, .997, .997, .9], "lllllFF"),
    (OnPlateau(2), [1, NAN, NONE, .99, .99], "llllF"),                   # what is no number does not count
    (OnPlateau(2), [-1, -2, -2, -2], "lllF"),
    (OnPlateau(3), [1, .2, .9, .6, .6, .6], "llllFF"),
    (OnPlateau(3, smoothing=4), [1, .2, .9, .6, .6, .6], "llllll"),      # its mean goes on falling
    (OnSpike(2, hold_step=2, memory=2), [1, 1, 3, 1, 1], "llFFl"),
    (OnSpike(2, hold_step=2, memory=2), [1, 9, 1, 1, 1], "lllll"),       # too early to know
    (OnSpike(2, hold_step=2, memory=2), [1, NAN, 1, 1, 1], "lFFll"),
    (OnSpike(2, hold_step=2, memory=2), [1, 1, -math.inf, 1, 1], "llFFl"),
    (OnSpike(2, hold_step=2, memory=2), [1, 1, 3, 9, 1, 1, 1], "llFFFll"),
]


@pytest.mark.parametrize("policy, losses, expected", LOSSES, ids=range(len(LOSSES)))
def test_policies_that_look_at_the_loss(policy, losses, expected):
    assert decided(policy, loss=losses) == expected


def test_spikes_of_the_norm_and_overflows():
    assert decided(OnSpike(2, hold_step=1, memory=1), gradient_norm=[1, 1, 5, 1]) == "llFl"
    assert decided(OnSpike(2, hold_step=1, overflows=2), overflows_in_a_row=[0, 1, 2, 2, 2, 3, 0]) == "llFllFl"


def test_warmup_counts_steps_and_not_calls():
    assert decided(Warmup(3), loss=[1] * 5) == "FFFll"
    assert decided(Warmup(3), first=2, loss=[1] * 3) == "Fll"
    assert decided(Warmup(0), loss=[1]) == "l"


def test_the_most_precise_level_wins():
    policy = AnyOf(Warmup(1), HOLD(2), Always("low"))
    assert decided(policy, learning_rates=[1, 1, .1, .1, .1]) == "FlFFl"
    assert policy.levels == ("float32", "low")
    assert most_precise(["fp8", "float16", "bfloat16", "tf32"]) == "tf32"
    assert named(["low", "fp8", "float32"], "float16") == ("float32", "float16", "fp8")


def test_reasons():
    policy = AnyOf(OnPlateau(1), HOLD(1))
    policy.decide(State(1, learning_rates=(1.0,), loss=1.0))
    assert policy.decide(State(2, learning_rates=(0.1,), loss=1.0)) == "float32"
    assert policy.reason == ("the best loss, 1, has not fallen by 0.05 of it for 1 steps; "
                             "the learning rate went from 1 to 0.1")


@pytest.mark.parametrize("cut", range(1, 12))
def test_state_goes_on_from_where_it_was(cut):
    def made():
        return AnyOf(HOLD(3), OnPlateau(3, cooldown=2), OnSpike(2, hold_step=2, memory=2), Warmup(1))

    rates = [1, 1, .1, .1, .1, .1, .1, .1, .1, .01, .01, .01]
    losses = [1, .5, .5, .5, .5, .5, .4, .3, 3, .2, .1, .1]
    whole, first, second = made(), made(), made()
    expected = decided(whole, learning_rates=rates, loss=losses)
    found = decided(first, learning_rates=rates[:cut], loss=losses[:cut])
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert found + decided(second, cut, learning_rates=rates[cut:], loss=losses[cut:]) == expected
    assert {"F", "l"} == {*expected}


class Nonsense(Policy):
    def decide(self, state):
        return "float8"


WRONG = [
    (lambda: HOLD(0), r"hold_step=0 must be a number of steps, 1 or more"),
    (lambda: HOLD(1.5), r"hold_step=1.5"),
    (lambda: HOLD(True), r"hold_step=True"),
    (lambda: HOLD(1, "float8"), r"'float8' is no level of precision. There are float32, tf32, bfloat16, float16, fp8"),
    (lambda: HOLD(1, "float32"), r"low='float32' must be less precise than full='float32'"),
    (lambda: HOLD(1, "tf32", full="bfloat16"), r"low='tf32' must be less precise than full='bfloat16'"),
    (lambda: HOLD(1, min_change=-1), r"min_change=-1 must be a number, at least 0"),
    (lambda: HOLD(1, min_change=NAN), r"min_change=nan"),
    (lambda: OnPlateau(0), r"patience=0"),
    (lambda: OnPlateau(1, threshold=1), r"threshold=1 must be a number, at least 0 and below 1"),
    (lambda: OnPlateau(1, cooldown=0), r"cooldown=0"),
    (lambda: OnSpike(1), r"factor=1 would"),
    (lambda: OnSpike(0.5), r"factor=0.5"),
    (lambda: OnSpike(2, overflows=0), r"overflows=0"),
    (lambda: Warmup(-1), r"steps=-1 must be a number of steps, 0 or more"),
    (lambda: Always("half"), r"'half' is no level"),
    (lambda: AnyOf(), r"one policy or more"),
    (lambda: AnyOf(HOLD(1), "float32"), r"one policy or more"),
    (lambda: AnyOf(Nonsense()).decide(State(0)), r"Nonsense.decide returned 'float8', and its levels are float32, low"),
    (lambda: HOLD(1).load_state_dict(OnPlateau(1).state_dict()), r"of another policy: it has \['_best'"),
    (lambda: AnyOf(HOLD(1)).load_state_dict({"policies": []}), r"of 0 policies, and not of 1"),
    (lambda: named(["float8"], "bfloat16"), r"'float8' is no level"),
]


@pytest.mark.parametrize("call, message", WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()

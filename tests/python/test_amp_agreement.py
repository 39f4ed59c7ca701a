"""The level of each step on ranks: one for all, whatever their policies say; and what ranks hear of each other."""
import math
import pickle

import numpy as np
import pytest

import lightcc.numpy as hvd
import ranks
from lightcc.amp.agreement import Agreement
from lightcc.amp.controller import Controller, History, Switch
from lightcc.amp.levels import most_precise
from lightcc.amp.policy import Always, AnyOf, HoldAfterLearningRateChange, OnPlateau, Policy, Warmup
from lightcc.core import ops
from lightcc.core.exceptions import HorovodInternalError

pytestmark = pytest.mark.sizes
LEVELS = ("float32", "bfloat16", "float16")
HAS = dict.fromkeys(LEVELS, "")
STEPS = 2000


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Random(Policy):
    """What each rank draws for itself; `said` keeps it."""

    levels = LEVELS

    def __init__(self, seed):
        self._rng, self.said = np.random.default_rng(seed), []

    def decide(self, state):
        self.said.append(str(self._rng.choice(LEVELS, p=[0.1, 0.3, 0.6])))
        return self.said[-1]


def train(controller, steps, loss=lambda step: 1.0, rate=lambda step: 0.1):
    """The levels of so many steps."""
    levels = []
    for _ in range(steps):
        levels.append(controller.begin())
        controller.loss_known(loss(controller.step), [rate(controller.step)])
        controller.end()
    return levels


@pytest.fixture(autouse=True)
def job():
    hvd.init()


def check_ranks_that_disagree_have_one_level_a_step():
    controller = Controller(Random(hvd.rank()), "bfloat16", HAS)
    levels = train(controller, STEPS)
    every = ops.allgather(np.array([[LEVELS.index(level) for level in levels]]))
    assert every.shape == (hvd.size(), STEPS) and (every == every[0]).all()
    said = ops.allgather(np.array([[LEVELS.index(level) for level in controller.policy.said[:STEPS]]]))
    assert [LEVELS[i] for i in said.min(axis=0)] == levels
    history = controller.history()
    assert history.levels() == levels and {*history.steps} == {*LEVELS}
    if hvd.size() > 1:
        assert any("ranks asked for" in switch.reason for switch in history.switches)


def check_policies_see_the_mean_loss_of_all_ranks():
    seen = []

    class Look(Policy):
        levels = ("float32", "low")

        def decide(self, state):
            seen.append((state.step, state.level, state.since, state.loss, state.loss_step, state.learning_rates))
            return "low"

    train(Controller(Look(), "bfloat16", HAS), 4, loss=lambda step: step + hvd.rank(), rate=lambda step: 10.0 ** -step)
    mean = (hvd.size() - 1) / 2
    assert seen == [(0, "", 0, None, -1, ()), (1, "bfloat16", 0, None, -1, (1.0,)),
                    (2, "bfloat16", 0, mean, 0, (0.1,)), (3, "bfloat16", 0, 1 + mean, 1, (0.01,)),
                    (4, "bfloat16", 0, 2 + mean, 2, (0.001,))]


def check_a_hold_begins_on_all_ranks_when_one_has_changed_its_rate():
    policy = HoldAfterLearningRateChange(hold_step=3)
    levels = train(Controller(policy, "float16", HAS), 8, rate=lambda step: 0.01 if step > 1 and hvd.rank() == 0 else 1)
    assert levels == ["float16"] * 3 + ["float32"] * 3 + ["float16"] * 2


def check_state_goes_on_with_the_vote_in_flight():
    def made():
        return Controller(AnyOf(Random(7 + hvd.rank()), HoldAfterLearningRateChange(2), OnPlateau(5, cooldown=3)),
                          "bfloat16", HAS)

    def rate(step):
        return 0.5 ** (step // 9)
    whole = train(made(), 40, rate=rate)
    for cut in (1, 10, 23):
        first = made()
        assert train(first, cut, rate=rate) == whole[:cut]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        train(first, 3, rate=rate)  # goes on, and is left with a vote in flight
        second = made()
        second.load_state_dict(state)
        assert train(second, 40 - cut, rate=rate) == whole[cut:]
        assert second.history().levels() == whole
        first.load_state_dict(state)  # back in time, as a restore
        assert train(first, 40 - cut, rate=rate) == whole[cut:]


def check_two_trainings_by_turns():
    one, other = Controller(Random(hvd.rank()), "bfloat16", HAS), Controller(Random(9), "bfloat16", HAS)
    levels = [(train(one, 1), train(other, 1)) for _ in range(50)]
    alone = Random(9)
    assert [second[0] for _, second in levels] == [alone.decide(None) for _ in range(50)]
    every = ops.allgather(np.array([[LEVELS.index(first[0]) for first, _ in levels]]))
    assert (every == every[0]).all()


def check_a_step_has_one_level_whatever_it_is_asked():
    controller = Controller(Random(hvd.rank()), "bfloat16", HAS)
    for _ in range(20):
        level = controller.begin()
        controller.loss_known(1.0, [0.1])
        assert {controller.begin() for _ in range(3)} == {level}
        controller.end()
    assert sum(controller.history().steps.values()) == 20


def check_a_first_loss_that_is_no_number():
    controller = Controller(Always("float32"), "bfloat16", HAS)
    controller.begin()
    controller.loss_known(math.nan if hvd.rank() == hvd.size() - 1 else 1.0, [0.1])
    controller.end()
    mine = "nan" if hvd.rank() == hvd.size() - 1 else "1.0"
    with pytest.raises(ValueError, match=f"mean of all ranks' losses in the first step is nan; that of rank "
                                         f"{hvd.rank()} is {mine}"):
        controller.begin()


def check_a_later_loss_that_is_no_number_is_the_policys_business():
    train(Controller(OnPlateau(3), "bfloat16", HAS), 5, loss=lambda step: math.nan if step else 1.0)


def check_policies_of_other_levels_are_named_on_all_ranks():
    policy = Always("float32") if hvd.rank() == 0 else OnPlateau(3)
    if hvd.size() == 1:
        return
    with pytest.raises(ValueError, match="rank 0 has a Always of float32 and rank 1 has a OnPlateau of float32, bfloa"):
        Controller(policy, "bfloat16", HAS).begin()


def check_a_policy_that_fails_is_named():
    class Wrong(Policy):
        levels = LEVELS

        def decide(self, state):
            return "float64" if state.step < 5 else state.loss[0]

    with pytest.raises(ValueError, match=f"MixedPrecision: the policy of rank {hvd.rank()}, for step 0: Wrong.decide "
                                         "returned 'float64', and its levels are float32, bfloat16, float16"):
        Controller(Wrong(), "bfloat16", HAS).begin()
    late = Controller(Wrong(), "bfloat16", HAS)
    late.step = 5
    with pytest.raises(RuntimeError, match=f"rank {hvd.rank()}, for step 5: Wrong.decide raised TypeError"):
        late.begin()


def check_a_policy_of_one_level_votes_in_the_first_step_alone():
    sent = []

    class Counted(Agreement):
        def start(self, name, *vote):
            sent.append(name)
            super().start(name, *vote)

    controller, copy = (Controller(Always("float32"), "bfloat16", HAS, make_agreement=Counted) for _ in range(2))
    assert train(controller, 5) == ["float32"] * 5 and len(sent) == 2
    copy.load_state_dict(controller.state_dict())
    assert train(copy, 2) == ["float32"] * 2 and copy.step == 7 and len(sent) == 2


def check_a_restore_drops_a_vote_that_a_lost_rank_has_ended(monkeypatch):
    controller = Controller(Warmup(9), "bfloat16", HAS)
    train(controller, 2)
    saved = controller.state_dict()
    controller.begin()
    controller.loss_known(1.0, [0.1])
    received = controller._agreement._received

    def lost(handle, mine):
        received(handle, mine)
        raise HorovodInternalError("rank 1 died")

    monkeypatch.setattr(controller._agreement, "_received", lost)
    controller.load_state_dict(saved)
    monkeypatch.undo()
    assert train(controller, 2) == ["float32"] * 2 and controller.step == 4


def check_ranks_that_join_catch_up():
    controller = Controller(AnyOf(OnPlateau(2, cooldown=3), HoldAfterLearningRateChange(2)), "bfloat16", HAS)
    steps = 5 + 3 * hvd.rank()
    train(controller, steps, loss=lambda step: 1.0)
    hvd.join()
    mine = train(controller, 9)
    assert hvd.allgather_object(mine) == [mine] * hvd.size() and {*mine} == {"float32", "bfloat16"}
    assert controller.step == 5 + 3 * (hvd.size() - 1) + 9
    history = controller.history()
    assert hvd.allgather_object(history) == [history] * hvd.size()
    hvd.join()
    other = Controller(Always("float32"), "bfloat16", HAS)  # has missed nothing
    assert train(other, 2) == ["float32"] * 2


def check_a_vote_that_a_shutdown_cuts_off():
    controller = Controller(Always("float32"), "bfloat16", HAS)
    controller.begin()
    controller.loss_known(1.0, [0.1])
    hvd.barrier()  # else a rank may have left before another one votes
    hvd.shutdown()
    controller.settle()
    hvd.init()
    controller.end()
    assert train(controller, 2) == ["float32"] * 2


def test_levels_that_are_not_there():
    with pytest.raises(ValueError, match=r"Always may choose tf32, but it is for GPUs. There are float32 here"):
        Controller(Always("tf32"), "bfloat16", {"float32": "", "tf32": "it is for GPUs"})
    with pytest.raises(ValueError, match="policy='float32' is no lightcc.amp.policy.Policy"):
        Controller("float32", "bfloat16", HAS)
    with pytest.raises(ValueError, match="this state is of a policy with the levels"):
        Controller(Always("float32"), "bfloat16", HAS).load_state_dict({"levels": ["float16"]})


def test_history():
    history = History({"float32": 3, "float16": 2}, [Switch(0, "float32", "a"), Switch(2, "float16", "b"),
                                                     Switch(4, "float32", "c")])
    assert history.levels() == ["float32", "float32", "float16", "float16", "float32"]
    assert most_precise(history.steps) == "float32"

"""Policies: what a step computes in, by what is known of the training. Pure: no framework, no ranks, no clock.

A policy is asked once for each step, in their order, and a step ahead: while step t runs it decides on step t + 1. So a
learning rate that is new in step t changes the level from step t + 1 on, and the loss that it sees is that of step
t - 1, which all ranks have added up by then.
"""
import copy
import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from lightcc.amp.levels import LEVELS, LOW, most_precise

__all__ = ["LEVELS", "Always", "AnyOf", "HoldAfterLearningRateChange", "OnPlateau", "OnSpike", "Policy", "State",
           "Warmup"]


@dataclass(frozen=True)
class State:
    """What a policy knows when it decides on a step. Numbers are equal on all ranks, but for learning rates that the
    program sets otherwise on some.

    step: the step that it decides on, from 0. level, since: that of the step before, and the first step of this run of
    it; "" and 0 for step 0. epoch: if the program has said it. learning_rates: of the optimizer's groups, as in the
    step before. loss: the mean of all ranks' losses in step loss_step, None as long as there is none; for a policy of
    one level it stays that of step 0, since such a policy has nothing more to agree on. gradient_norm:
    of the same step, if it was asked for. overflows: how many steps were left out because of float16's range;
    overflows_in_a_row: of the last steps in float16. low: which level LOW stands for.

    >>> State(step=7, loss=0.5, loss_step=5).loss_age
    2
    """

    step: int
    level: str = ""
    since: int = 0
    epoch: Optional[int] = None
    learning_rates: Tuple[float, ...] = ()
    loss: Optional[float] = None
    loss_step: int = -1
    gradient_norm: Optional[float] = None
    overflows: int = 0
    overflows_in_a_row: int = 0
    low: str = "bfloat16"

    @property
    def loss_age(self) -> int:
        """How many steps the loss is older than the step to decide on."""
        return self.step - self.loss_step


class Policy:
    """Decides on the level of each step. Abstract: a subclass defines decide().

    levels: all that decide may return, a tuple; equal on all ranks. What decide() changes are attributes whose names
    begin with "_": they are the policy's state. reason: decide may say why, for history().

    >>> class EveryTenth(Policy):
    ...     levels = ("float32", "bfloat16")
    ...     def decide(self, state): return "float32" if state.step % 10 == 0 else "bfloat16"
    >>> [EveryTenth().decide(State(step)) for step in (9, 10)]
    ['bfloat16', 'float32']
    """

    levels: Sequence[str] = ("float32", LOW)
    reason = ""

    def decide(self, state: State) -> str:
        """The level of step state.step, one of self.levels."""
        raise NotImplementedError

    def state_dict(self) -> Dict[str, Any]:
        """What decide() has changed, as values that can be pickled.

        >>> Warmup(2).state_dict()
        {}
        """
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name.startswith("_")}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from what state_dict() returned. ValueError if that is of another policy.

        >>> OnPlateau(5).load_state_dict(OnPlateau(10).state_dict())
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"{type(self).__name__}: this state is of another policy: it has {sorted(state)}, and not "
                             f"{sorted(self.state_dict())}.")
        vars(self).update(copy.deepcopy(state))


class Always(Policy):
    """One level for all steps.

    >>> Always("bfloat16").decide(State(step=0))
    'bfloat16'
    """

    def __init__(self, level: str = LOW):
        self.level = _level("Always", level)
        self.levels = (level,)

    def decide(self, state: State) -> str:
        return self.level


class _FullForAWhile(Policy):
    """What the built-in policies share: low, and full as long as _left says."""

    def __init__(self, low: str, full: str):
        name = type(self).__name__
        self.low, self.full = _level(name, low), _level(name, full)
        if low == full or (low != LOW and most_precise([low, full]) != full):
            raise ValueError(f"{name}: low={low!r} must be less precise than full={full!r}.")
        self.levels = (full, low)
        self._left: float = 0  # steps in full precision to come

    def _hold(self, steps: float, reason: str) -> None:
        self._left, self.reason = steps, reason

    def _level(self) -> str:
        if self._left > 0:
            self._left -= 1
            return self.full
        self.reason = f"{type(self).__name__}: nothing asks for {self.full}"
        return self.low


class HoldAfterLearningRateChange(_FullForAWhile):
    """Full precision for hold_step steps after a change of the learning rate.

    The step after the first one with another rate is full, and the next hold_step - 1. A change during a hold begins it
    anew. hold_step: 1 or more. low, full: the levels. min_change: a change counts from so much on, relative to the rate
    of the step before, so that a schedule that changes the rate a little in every step (a cosine, a long warm-up) holds
    only while its changes are large. Default 0.01. Of several groups of parameters one is enough.
    Errors: ValueError for hold_step < 1, min_change < 0, or levels that are none.

    >>> policy, rates = HoldAfterLearningRateChange(hold_step=2), [0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    >>> [policy.decide(State(step, learning_rates=(rate,))) for step, rate in enumerate(rates, 1)]
    ['low', 'low', 'float32', 'float32', 'low', 'low']
    """

    def __init__(self, hold_step: int, low: str = LOW, min_change: float = 0.01, full: str = "float32"):
        super().__init__(low, full)
        self.hold_step = _count("HoldAfterLearningRateChange", "hold_step", hold_step, 1)
        self.min_change = _number("HoldAfterLearningRateChange", "min_change", min_change, 0)
        self._rates: Tuple[float, ...] = ()

    def decide(self, state: State) -> str:
        for before, now in zip(self._rates, state.learning_rates):
            if now != before and abs(now - before) >= self.min_change * abs(before):
                self._hold(self.hold_step, f"the learning rate went from {before:g} to {now:g}")
                break
        self._rates = tuple(state.learning_rates)
        return self._level()


class OnPlateau(_FullForAWhile):
    """Full precision when the loss no longer falls.

    patience: so many steps may pass without the best loss falling by the share threshold. threshold: relative, default
    0.05. cooldown: after so many full steps low precision is tried again, and patience begins anew; None (default):
    never. smoothing: the loss is averaged over about so many steps first, since that of one batch jumps. Default 1:
    it is taken as it is. low, full: the levels.
    Errors: ValueError for patience, cooldown or smoothing < 1, threshold outside [0, 1), or levels that are none.

    >>> policy, losses = OnPlateau(patience=2, cooldown=1), [1.0, 0.5, 0.49, 0.48, 0.47]
    >>> [policy.decide(State(step, loss=loss, loss_step=step - 2)) for step, loss in enumerate(losses, 2)]
    ['low', 'low', 'low', 'float32', 'low']
    """

    def __init__(self, patience: int, threshold: float = 0.05, cooldown: Optional[int] = None, low: str = LOW,
                 full: str = "float32", smoothing: int = 1):
        super().__init__(low, full)
        self.patience = _count("OnPlateau", "patience", patience, 1)
        self.threshold = _number("OnPlateau", "threshold", threshold, 0, 1)
        self.cooldown = None if cooldown is None else _count("OnPlateau", "cooldown", cooldown, 1)
        self.smoothing = _count("OnPlateau", "smoothing", smoothing, 1)
        self._best, self._since = math.inf, 0  # and the steps since the best loss fell
        self._mean: Optional[float] = None

    def decide(self, state: State) -> str:
        if self._left <= 0 and state.loss is not None and math.isfinite(state.loss):
            self._mean = state.loss if self._mean is None else self._mean + (state.loss - self._mean) / self.smoothing
            # A loss below 0 falls as well; infinity is there before the first.
            if self._mean < self._best - self.threshold * abs(self._best) or math.isinf(self._best):
                self._best, self._since = self._mean, 0
            else:
                self._since += 1
            if self._since >= self.patience:
                self._hold(math.inf if self.cooldown is None else self.cooldown,
                           f"the best loss, {self._best:g}, has not fallen by {self.threshold:g} of it for "
                           f"{self.patience} steps")
                self._best, self._since = self._mean, 0
        return self._level()


class OnSpike(_FullForAWhile):
    """Full precision for hold_step steps after a loss or a gradient norm that jumps or is not finite, or after several
    overflows in a row.

    factor: what is so many times its running mean has jumped; above 1. hold_step: default 100. overflows: default 3;
    only float16 has them. memory: the mean is over about so many steps, default 50, and knows no jump before it has
    seen so many. low, full: the levels. A norm is looked at if MixedPrecision has one.
    Errors: ValueError for factor <= 1, hold_step, overflows or memory < 1, or levels that are none.

    >>> policy = OnSpike(factor=3, hold_step=2, memory=1)
    >>> [policy.decide(State(step, loss=loss)) for step, loss in enumerate([1.0, 1.1, 9.0, 1.0, 1.0])]
    ['low', 'low', 'float32', 'float32', 'low']
    """

    def __init__(self, factor: float, hold_step: int = 100, overflows: int = 3, memory: int = 50, low: str = LOW,
                 full: str = "float32"):
        super().__init__(low, full)
        self.factor = _number("OnSpike", "factor", factor, 1)
        if factor == 1:
            raise ValueError("OnSpike: factor=1 would make any loss above the mean a spike; give a larger one.")
        self.hold_step = _count("OnSpike", "hold_step", hold_step, 1)
        self.overflows = _count("OnSpike", "overflows", overflows, 1)
        self.memory = _count("OnSpike", "memory", memory, 1)
        self._means: Dict[str, Tuple[float, int]] = {}  # by what: the mean, and of how many steps
        self._overflows = 0                             # in a row, that have been acted on

    def decide(self, state: State) -> str:
        for what, value in (("loss", state.loss), ("gradient norm", state.gradient_norm)):
            if value is not None:
                self._look(what, value)
        in_a_row = state.overflows_in_a_row
        if in_a_row >= self.overflows and in_a_row > self._overflows:
            self._hold(self.hold_step, f"{in_a_row} overflows in a row")
        self._overflows = in_a_row
        return self._level()

    def _look(self, what: str, value: float) -> None:
        mean, count = self._means.get(what, (0.0, 0))
        if not math.isfinite(value):
            self._hold(self.hold_step, f"the {what} is {value:g}")
            return
        if count >= self.memory and value > mean + (self.factor - 1) * abs(mean):
            self._hold(self.hold_step, f"the {what}, {value:g}, is more than {self.factor:g} times its mean, {mean:g}")
        count = min(count + 1, self.memory + 1)
        self._means[what] = mean + (value - mean) / count, count


class Warmup(Policy):
    """Full precision for the first steps.

    steps: how many, 0 or more. low, full: the levels. Errors: ValueError for steps < 0, or levels that are none.

    >>> [Warmup(2).decide(State(step)) for step in range(3)]
    ['float32', 'float32', 'low']
    """

    def __init__(self, steps: int, low: str = LOW, full: str = "float32"):
        self.steps = _count("Warmup", "steps", steps, 0)
        self.low, self.full = _level("Warmup", low), _level("Warmup", full)
        self.levels = (full, low)

    def decide(self, state: State) -> str:
        self.reason = f"Warmup: the first {self.steps} steps are " + ("over" if state.step >= self.steps else "full")
        return self.full if state.step < self.steps else self.low


class AnyOf(Policy):
    """Asks several policies, and takes the most precise level of those that they say.

    Errors: ValueError without a policy, or for something else.

    >>> policy = AnyOf(Warmup(1, low="float16"), Always("fp8")); [policy.decide(State(step)) for step in range(2)]
    ['float32', 'float16']
    """

    def __init__(self, *policies: Policy):
        if not policies or not all(isinstance(policy, Policy) for policy in policies):
            raise ValueError(f"AnyOf: give one policy or more, not {policies!r}.")
        self.policies = policies
        self.levels = tuple(dict.fromkeys(level for policy in policies for level in policy.levels))

    def decide(self, state: State) -> str:
        said = [checked(policy, policy.decide(state)) for policy in self.policies]
        level = most_precise(said, state.low)
        self.reason = "; ".join(policy.reason for policy, its in zip(self.policies, said) if its == level)
        return level

    def state_dict(self) -> Dict[str, Any]:
        return {"policies": [policy.state_dict() for policy in self.policies]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        states = state.get("policies", ())
        if len(states) != len(self.policies):
            raise ValueError(f"AnyOf: this state is of {len(states)} policies, and not of {len(self.policies)}.")
        for policy, its in zip(self.policies, states):
            policy.load_state_dict(its)


def checked(policy: Policy, level: Any) -> str:
    """A level that a policy has returned. ValueError if it is none of its levels.

    >>> checked(Always("float32"), "float32")
    'float32'
    """
    if level not in policy.levels:
        raise ValueError(f"{type(policy).__name__}.decide returned {level!r}, and its levels are "
                         f"{', '.join(policy.levels)}.")
    return level


def _level(who: str, level: Any) -> str:
    if level not in (*LEVELS, LOW):
        raise ValueError(f"{who}: {level!r} is no level of precision. There are {', '.join(LEVELS)}, and {LOW!r} for "
                         "that of dtype=.")
    return level


def _count(who: str, what: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{who}: {what}={value!r} must be a number of steps, {least} or more.")
    return value


def _number(who: str, what: str, value: Any, least: float, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
        bound = "" if math.isinf(below) else f" and below {below:g}"
        raise ValueError(f"{who}: {what}={value!r} must be a number, at least {least:g}{bound}.")
    return float(value)

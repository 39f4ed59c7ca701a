"""The level of each step, agreed by all ranks: what is between a policy and the loop of a framework.

A step begins with begin() and ends with end(); between them loss_known() sends the vote on the next one. What holds:
1. All ranks have the same level in the same step: what begin() returns comes out of an Agreement, or out of a state
   that all have loaded.
2. decide() is called once for each step, in their order, also across a restore.
"""
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from lightcc.amp.agreement import Agreement
from lightcc.amp.levels import LOW, named
from lightcc.amp.policy import Policy, State, checked
from lightcc.core import lib
from lightcc.core.process_sets import ProcessSet, global_process_set

Loss = Any  # a float, or what the Agreement of a framework takes


class Switch(NamedTuple):
    """step: the first one of the level. reason: of the policy, or that another rank asked for it."""

    step: int
    level: str
    reason: str


class History(NamedTuple):
    """What happened. steps: by level, how many steps have begun in it. switches: each change of the level, the first
    of them at step 0."""

    steps: Dict[str, int]
    switches: List[Switch]

    def levels(self) -> List[str]:
        """The level of each step that has begun since step 0.

        >>> History({"float32": 1, "bfloat16": 2}, [Switch(0, "float32", ""), Switch(1, "bfloat16", "")]).levels()
        ['float32', 'bfloat16', 'bfloat16']
        """
        ends = [switch.step for switch in self.switches[1:]] + [sum(self.steps.values())]
        return [switch.level for switch, end in zip(self.switches, ends) for _ in range(switch.step, end)]


class Controller:
    """One training has it. Used by one thread at a time.

    low: the level that policies call "low". available: what the device can do, each level with "" or why it cannot.
    who: for errors. make_agreement: called with process_set. whole: whose state_dict() has this controller's and what
    else must be equal on all ranks; default: itself.
    Errors: ValueError for a policy that is none, has no levels, or one that the device lacks.

    >>> from lightcc.amp.policy import Warmup
    >>> controller = Controller(Warmup(1), "bfloat16", {"float32": "", "bfloat16": ""})
    >>> for step in range(3): print(controller.begin()); controller.loss_known(1.0, [0.1]); controller.end()
    float32
    bfloat16
    bfloat16
    >>> controller.history().steps
    {'float32': 1, 'bfloat16': 2}
    """

    def __init__(self, policy: Policy, low: str, available: Dict[str, str], who: str = "MixedPrecision",
                 process_set: ProcessSet = global_process_set,
                 make_agreement: Callable[[ProcessSet], Agreement] = Agreement, whole: Any = None):
        if not isinstance(policy, Policy):
            raise ValueError(f"{who}: policy={policy!r} is no lightcc.amp.policy.Policy; "
                             "HoldAfterLearningRateChange(hold_step=100) is one.")
        self.policy, self._low, self._who = policy, low, who
        self.levels = named(policy.levels, low)
        if not self.levels:
            raise ValueError(f"{who}: {type(policy).__name__}.levels is empty.")
        has = ", ".join(level for level, why in available.items() if not why)
        for level in self.levels:
            why = available.get(level, "it is not known here")
            if why:
                raise ValueError(f"{who}: {type(policy).__name__} may choose {level}, but {why}. There are {has} here.")
        self._operation = f"lightcc.amp({','.join(self.levels)})"
        self._agreement = make_agreement(process_set)
        self._whole = self if whole is None else whole
        self._era = lib.epoch, lib.joins           # in which all ranks have taken part in the same votes
        self.step, self.level, self.since = 0, "", 0
        self.running = False                       # between begin() and end()
        self.epoch: Optional[int] = None           # if the program says it
        self._next: Optional[str] = None           # the level of the next step, if it is agreed
        self._wish: Optional[str] = None           # what this rank has voted for, unless the vote is over
        self._reason = ""                          # of the last wish
        self._losses: Tuple[Optional[float], int] = None, -1  # the mean of all ranks, and of which step
        self._sent: Tuple[Optional[float], int] = None, -1    # this rank's own in flight
        self._norm: Optional[float] = None
        self._overflows = self._in_a_row = 0
        self._steps: Dict[str, int] = {}
        self._switches: List[Switch] = []

    def begin(self) -> str:
        """The level of the step that begins; of that which is running, if one is.

        Waits for the other ranks' votes. ValueError on all ranks if the loss of step 0 was no number, and in step 0 if
        their policies have other levels.
        """
        if self.running:
            return self.level
        self._catch_up()
        if self._next is None:
            if not self._agreement.in_flight():  # step 0, or a world before has taken the vote along
                self._expect_alike()
                self._vote(None, self._wish or self._ask(self.step, ()), -1)
            self._settle()
        level, self._next, self._wish, self.running = self._next, None, None, True
        assert level is not None
        if level != self.level:
            self.level, self.since = level, self.step
            self._switches.append(Switch(self.step, level, self._reason))
        self._steps[level] = self._steps.get(level, 0) + 1
        return level

    def loss_known(self, loss: Loss, learning_rates: Sequence[float]) -> None:
        """This rank's loss of the step that is running: the vote on the next step travels from now on. Of a single
        level, which step 0 has compared, there is nothing to vote on."""
        wish = self._ask(self.step + 1, learning_rates)
        if self.step and len(self.levels) == 1:
            self._next = self._wish = wish
        else:
            self._vote(loss, wish, self.step)

    def end(self, gradient_norm: Optional[float] = None, overflow: Optional[bool] = None) -> None:
        """The step is over. overflow: whether it was left out; None: it has no loss scale."""
        self.running = False
        self.step += 1
        self._norm = gradient_norm
        if overflow is not None:
            self._overflows += overflow
            self._in_a_row = self._in_a_row + 1 if overflow else 0

    def settle(self) -> None:
        """Waits for the vote in flight, so that this rank may leave the others."""
        self._agreement.settle()

    @property
    def voted(self) -> bool:
        """Whether the vote on the step behind the one that is running has been sent."""
        return self._wish is not None

    def history(self) -> History:
        """What has happened so far, also before a restore or in the worlds before."""
        return History(dict(self._steps), list(self._switches))

    def state_dict(self) -> Dict[str, Any]:
        """Between two steps; plain values. It waits for the vote in flight, which is part of it."""
        self._settle()
        return {"policy": self.policy.state_dict(), "levels": list(self.levels), "step": self.step, "level": self.level,
                "since": self.since, "epoch": self.epoch, "next": self._next, "wish": self._wish,
                "reason": self._reason, "losses": self._losses, "norm": self._norm, "overflows": self._overflows,
                "in_a_row": self._in_a_row, "steps": dict(self._steps), "switches": [*map(tuple, self._switches)]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from there. ValueError for the state of a policy with other levels."""
        if state.get("levels") != list(self.levels):
            raise ValueError(f"{self._who}: this state is of a policy with the levels {state.get('levels')}, and not "
                             f"{list(self.levels)}.")
        self.policy.load_state_dict(state["policy"])
        self._agreement.drop()
        self.running, self._era = False, (lib.epoch, lib.joins)
        self.step, self.level, self.since, self.epoch = (state[name] for name in ("step", "level", "since", "epoch"))
        self._next, self._wish, self._reason = state["next"], state["wish"], state["reason"]
        self._losses, self._norm = tuple(state["losses"]), state["norm"]
        self._overflows, self._in_a_row = state["overflows"], state["in_a_row"]
        self._steps, self._switches = dict(state["steps"]), [Switch(*switch) for switch in state["switches"]]

    def _ask(self, step: int, learning_rates: Sequence[float]) -> str:
        loss, of_step = self._losses
        state = State(step, self.level, self.since, self.epoch, tuple(learning_rates), loss, of_step, self._norm,
                      self._overflows, self._in_a_row, self._low)
        where = f"{self._who}: the policy of rank {lib.rank()}, for step {step}: "
        try:
            level = self.policy.decide(state)
        except Exception as error:
            raise RuntimeError(f"{where}{type(self.policy).__name__}.decide raised {type(error).__name__}: "
                               f"{error}") from error
        try:
            level = checked(self.policy, level)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        self._reason = self.policy.reason or f"{type(self.policy).__name__} says so"
        return self._low if level == LOW else level

    def _catch_up(self) -> None:
        """After hvd.join() a rank that had joined has missed votes: it goes on from the state of those that have not.
        All ranks begin a step then. In a new epoch there are no such ranks: all load a state, or begin together."""
        before, self._era = self._era, (lib.epoch, lib.joins)
        if self._era == before or self._era[0] != before[0]:
            return
        step, ahead = max(self._agreement.gather((self.step, self._whole.state_dict())), key=lambda its: its[0])
        if step > self.step:
            self._whole.load_state_dict(ahead)

    def _expect_alike(self) -> None:
        every = self._agreement.gather((type(self.policy).__name__, self.levels))
        other = next((rank for rank, (_, levels) in enumerate(every) if levels != every[0][1]), None)
        if other is not None:
            has = [f"rank {rank} has a {every[rank][0]} of {', '.join(every[rank][1])}" for rank in (0, other)]
            raise ValueError(f"{self._who}: the ranks' policies have different levels: {' and '.join(has)}. Give all "
                             "ranks policies of the same levels.")

    def _vote(self, loss: Loss, wish: str, of_step: int) -> None:
        self._wish, self._sent = wish, (loss, of_step)
        self._agreement.start(f"{self._operation}.{self.level or 'begin'}", self.levels.index(wish), len(self.levels),
                              loss)

    def _settle(self) -> None:
        """Reads the vote in flight, if there is one."""
        if not self._agreement.in_flight():
            return
        loss, votes = self._agreement.take()
        (own, of_step), self._sent = self._sent, (None, -1)
        if loss is not None:
            if of_step == 0 and math.isnan(loss):
                raise ValueError(f"{self._who}: the mean of all ranks' losses in the first step is {loss}; that of "
                                 f"rank {lib.rank()} is {own}. It is so before any switch: look at the data and the "
                                 "model.")
            self._losses = loss, of_step
        self._next = self.levels[next(i for i, count in enumerate(votes) if count)]
        if self._next != self._wish:
            count = votes[self.levels.index(self._next)]
            self._reason = f"{count} of {sum(votes)} ranks asked for {self._next}; here: {self._reason}"
        self._wish = None

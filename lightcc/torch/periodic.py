"""What LocalSGD and DiLoCo share: an optimizer that makes steps of its own rank, and after some of them exchanges a
part of the model, a fragment, with the other ranks. Which part after which step lightcc.core.exchange_schedule says.

Each fragment has a reducer with its memory, its requests and what compression leaves behind of it, so that fragments
can be on their way at the same time. Ranks count steps alike, also those that a GradScaler leaves out on one of them.
"""
import logging
import weakref
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from lightcc.compress.residuals import KEY as RESIDUALS
from lightcc.core import averaging, lib
from lightcc.core.agreed_settings import expect_equal
from lightcc.core.exchange_schedule import ExchangeSchedule, in_fragments
from lightcc.core.process_sets import ProcessSet
from lightcc.core.wrapper_class import is_made_with, wrapper_class
from lightcc.torch import grad_scaler
from lightcc.torch.optimizer import _DistributedOptimizer
from lightcc.torch.parameter_reducer import ParameterReducer
from lightcc.torch.residuals import SavedResiduals, load_into, together

Named = List[Tuple[str, torch.Tensor]]
KEY = "lightcc_periodic"  # in the state of an optimizer
_logger = logging.getLogger("lightcc")
_LOADED = (-1, -1)        # the era of what has not been exchanged in this process: it is good in whatever comes


class FragmentReducer(ParameterReducer):
    """Reduces what a subclass makes of the parameters of a fragment."""

    def begin(self) -> None:
        """Sends all of them."""
        self.make_ready()
        for gradient in reversed(self.gradients):
            self.send(gradient)
        self.release()

    def forget(self) -> None:
        """What was sent and what has arrived is void."""
        raise NotImplementedError


class PeriodicExchange:
    """What an optimizer exchanges and when. Abstract: a subclass makes fragments and takes in what has arrived."""

    def __init__(self, what: str, named: Callable[[], Named], schedule: ExchangeSchedule,
                 fragments: Optional[List[List[torch.Tensor]]], settings: Mapping[str, Any], process_set: ProcessSet):
        """named: returns the parameters by the names that they have on all ranks. fragments: None: as equal as they can
        be. settings: that must be equal on all ranks."""
        self.what, self._named, self._schedule, self._given = what, named, schedule, fragments
        self._settings, self._process_set = dict(settings), process_set
        self.steps = 0
        self.reducers: List[FragmentReducer] = []     # of the fragments, once the first step begins
        self._parameters: List[torch.Tensor] = []     # of all fragments, in the order in which they are named
        self._names: List[List[str]] = []             # of the parameters of each fragment
        self._begun = False                           # the reducers are of this training, and not of one before load
        self._in_flight: Dict[int, bool] = {}         # fragments on their way: whether they have arrived
        self._era = _LOADED                           # epoch and joins in which what is in flight is good
        self._agreed = _LOADED                        # those in which settings were compared

    # What a subclass defines

    def make_fragment(self, named: Named) -> FragmentReducer:
        """Its reducer."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """From the parameters as they are; the reducers have been used before."""
        raise NotImplementedError

    def take_in(self, fragment: int, wholly: bool) -> None:
        """What the ranks have made of a fragment has arrived. wholly: it is not the fragment's turn, and all ranks get
        the same parameters."""
        raise NotImplementedError

    def own_state(self) -> Dict[str, Any]:
        """What must be saved beside steps, and given to other ranks; self._in_flight has arrived."""
        return {}

    def load_own_state(self, state: Mapping[str, Any], in_flight: Sequence[int]) -> None:
        """Takes what own_state has returned; in_flight: fragments that had arrived, and were cut as they are here."""

    def settings(self) -> Dict[str, Any]:
        """What must be equal on all ranks."""
        return {**self._settings, "parameters that require a gradient": len(self._parameters)}

    def progress(self) -> Dict[str, Any]:
        """What must be equal on all ranks, too, and comes of the training."""
        return {"steps made": self.steps}

    # What the optimizer calls

    def before_step(self) -> None:
        """Must come before the parameters change in the first step."""
        if not self._begun:
            if not self._make_fragments():
                self.begin_anew()
            self._begun = True
        self._drop_what_is_void()
        if self._agreed != self._era:
            expect_equal(self.what, self.settings(), self._process_set, self.progress())
            self._agreed = self._era
        averaging.refuse_join(self)

    def after_step(self) -> None:
        """Counts a step, and does what is due after it."""
        self.steps += 1
        ending, beginning = self._schedule.at(self.steps)
        for fragment in ending:
            self._end(fragment)
        for fragment in beginning:
            self._begin(fragment)
            if not self._schedule.delay:
                self._end(fragment)

    def now(self) -> None:
        """Averages all fragments; afterwards the ranks hold the same parameters."""
        self.before_step()
        for fragment in sorted(self._in_flight):
            self._end(fragment)
        for fragment in range(len(self.reducers)):
            self._begin(fragment)
        for fragment in range(len(self.reducers)):
            self._end(fragment, wholly=True)

    def is_of_this_epoch(self) -> bool:
        """Whether it has made steps with the ranks that there are now."""
        return self._era[0] == lib.epoch and lib.initialized()

    def state(self) -> Optional[Dict[str, Any]]:
        """For a checkpoint, and other ranks; waits for what is on its way. None before the first step."""
        if not self._begun:
            return None
        self.arrive()
        return {"of": self.what, "schedule": list(self._schedule), "fragments": self._names, "steps": self.steps,
                "in_flight": sorted(self._in_flight), **self.own_state()}

    def arrive(self) -> None:
        """Waits for what is on its way."""
        self._drop_what_is_void()
        for fragment in sorted(self._in_flight):
            self._arrive(fragment)

    def load(self, state: Optional[Mapping[str, Any]]) -> None:
        """Goes on from there; None: begins anew with the next step. ValueError for what another kind has saved."""
        if state is not None and state["of"] != self.what:
            raise ValueError(f"{self.what}: this is a state of {state['of']}. Take {KEY!r} out of it: then the "
                             "schedule begins anew.")
        self._drop()
        self._begun, self.steps, self._era = False, 0, _LOADED
        if state is None:
            return
        self._make_fragments()
        in_flight = state["in_flight"]
        if in_flight and (state["schedule"], state["fragments"]) != (list(self._schedule), self._names):
            _logger.warning("%s: what is on its way in this state was sent with another sync_every, delay or fragments "
                            "than the optimizer has (%s): it is dropped.", self.what, self._schedule)
            in_flight = []
        self.load_own_state(state, in_flight)
        self._in_flight = dict.fromkeys(in_flight, True)
        self._begun, self.steps = True, state["steps"]

    # The rest

    def _make_fragments(self) -> bool:
        """Returns whether they are new: those of the same parameters stay, as ranks match them by numbered names."""
        named = [(name, p) for name, p in self._named() if p.requires_grad]
        if self.reducers and [id(p) for _, p in named] == [id(p) for p in self._parameters]:
            return False
        if len(named) < self._schedule.fragments:
            raise ValueError(f"{self.what}: {len(named)} parameters require gradients, which cannot be cut into "
                             f"{self._schedule.fragments} fragments.")
        if self._given is None:
            parts = in_fragments([p.numel() * p.element_size() for _, p in named], self._schedule.fragments)
        else:
            place = {id(p): i for i, (_, p) in enumerate(named)}
            parts = [[place[id(p)] for p in part if id(p) in place] for part in self._given]
            left = set(range(len(named))) - {i for part in parts for i in part}
            if left or not all(parts):
                which = f"{named[min(left)][0]} is in none" if left else "one has no parameter that requires a gradient"
                raise ValueError(f"{self.what}: fragments must have each parameter that requires a gradient: {which}.")
        self._parameters = [p for _, p in named]
        self.reducers = [self.make_fragment([named[i] for i in part]) for part in parts]
        self._names = [[named[i][0] for i in part] for part in parts]
        return True

    def _begin(self, fragment: int) -> None:
        known = {id(p) for p in self._parameters}
        new = [name for name, p in self._named() if p.requires_grad and id(p) not in known]
        if new:
            raise ValueError(f"{self.what}: {new[0]} has come to require a gradient, or to the optimizer, after the "
                             "first step, and would differ between the ranks. Freeze and add parameters before it, or "
                             "wrap the optimizer anew.")
        self.reducers[fragment].begin()
        self._in_flight[fragment] = False

    def _arrive(self, fragment: int) -> None:
        if not self._in_flight[fragment]:
            self.reducers[fragment].finish()
            self._in_flight[fragment] = True

    def _end(self, fragment: int, wholly: bool = False) -> None:
        if fragment in self._in_flight:  # else another epoch has begun since
            self._arrive(fragment)
            del self._in_flight[fragment]
            self.take_in(fragment, wholly)

    def _drop_what_is_void(self) -> None:
        """Other ranks do not have what was on its way in another epoch, or while a rank had joined."""
        era = lib.epoch if lib.initialized() else 0, lib.joins
        if era != self._era:
            if self._era != _LOADED:
                self._drop()
            self._era = era

    def _drop(self) -> None:
        for fragment in self._in_flight:
            self.reducers[fragment].drain()
            self.reducers[fragment].forget()
        self._in_flight.clear()


class PeriodicOptimizer(SavedResiduals):
    """What the class of what LocalSGD and DiLoCo return has."""

    _as_local: Any
    _plain: Any
    _reducer: Any = None
    _periodic: Optional[PeriodicExchange]  # None on a rank that takes no part

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """The optimizer's own step, with this rank's gradients; then the exchange that is due after it."""
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.before_step()
        result = self._as_local.step(closure)
        self._count()
        plain = self._plain()
        if plain is not None and hasattr(plain.step, "_wrapped_by_lr_sched"):
            plain._opt_called = True  # a scheduler made before the wrap looks there
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it to call step hooks, which the own step does

    def exchange_now(self) -> None:
        """All ranks get the average of their parameters, as at the end of the training. All call it, between the same
        two steps. The schedule and DiLoCo's outer parameters go on as ever."""
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.now()

    def state_dict(self, *args, **kwargs):
        """The optimizer's own; "lightcc_periodic": how many steps were made, and what this rank needs to go on; and
        "lightcc_residuals", as of DistributedOptimizer. The parameters are the model's, each rank's own: a rank that
        loads all as it was on it goes on as if the run had not ended; after a checkpoint of rank 0 alone, all ranks go
        on from its parameters."""
        state = {**self._as_local.state_dict(*args, **kwargs), KEY: self._own_state()}
        residuals = together([reducer.compressed.to_save() for reducer in self._compressing()])
        return {**state, RESIDUALS: residuals} if residuals else state

    def load_state_dict(self, state_dict, *args, **kwargs) -> None:
        """Goes on from there; without "lightcc_periodic" all but the optimizer's own begins anew. What was on its way
        with another sync_every, delay or fragments is dropped, which is logged. ValueError for a state of the other
        kind, and by DiLoCo for one of other parameters."""
        own = {key: value for key, value in state_dict.items() if key not in (KEY, RESIDUALS)}
        self._as_local.load_state_dict(own, *args, **kwargs)
        plain = self._plain()
        if plain is not None:
            plain.state, plain.param_groups = self.state, self.param_groups  # type: ignore[attr-defined]
        self._load_own_state(state_dict.get(KEY))
        load_into(self._compressing(), state_dict.get(RESIDUALS))

    def __reduce_ex__(self, protocol):
        """TypeError: a copy would have to exchange with copies on the other ranks."""
        raise TypeError(f"An optimizer of {self._periodic.what if self._periodic else 'lightcc'} cannot be copied or "
                        "pickled. Save its state_dict(), and wrap an optimizer over the other parameters.")

    # What the rest of the package calls

    @property
    def _made_steps(self) -> int:
        return self._periodic.steps if self._periodic is not None else 0

    def _left_out(self) -> None:
        """A GradScaler has left out this rank's step, which other ranks may have made."""
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.before_step()
            self._count()

    def _before_grad_scaler(self, optimizer: Any) -> None:
        """Nothing: gradients are this rank's own."""

    def _arrive(self) -> None:
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.arrive()

    def _own_state(self) -> Optional[Dict[str, Any]]:
        with torch.no_grad():
            return self._periodic.state() if self._periodic is not None else None

    def _load_own_state(self, state: Optional[Mapping[str, Any]]) -> None:
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.load(state)

    def _count(self) -> None:
        if self._periodic is not None:
            with torch.no_grad():
                self._periodic.after_step()

    def _compressing(self) -> List[Any]:
        return [reducer for reducer in self._periodic.reducers if reducer.compressed] if self._periodic else []

    def _waiting(self) -> bool:
        return False


def wrapped(optimizer: torch.optim.Optimizer, exchange: Optional[PeriodicExchange], what: str,
            members: type = PeriodicOptimizer) -> Any:
    """An optimizer of a subclass of the given one's class, which shares its state and options, with this exchange;
    None: it is a plain one. members: PeriodicOptimizer or a class made from it. ValueError for one that exchanges
    already."""
    if is_made_with(_DistributedOptimizer, optimizer) or is_made_with(PeriodicOptimizer, optimizer):
        raise ValueError(f"{what}: the optimizer exchanges with other ranks already. Give the plain optimizer; "
                         "DiLoCo's inner_set= has ranks average their gradients in each step.")
    cls = wrapper_class(optimizer.__class__, members, __name__, plain_as="_as_local")
    made = cls.__new__(cls)
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made._plain, made._periodic = weakref.ref(optimizer), exchange
    grad_scaler.reduce_first(made)
    return made

"""Updates that are applied some steps late, so that their exchange runs while the next gradients are computed.

Gradients of the last steps wait in this rank's memory, as they were when step() was called. Their exchange begins when
their turn has come: between two lookups there is none under way.
"""
import math
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy
import torch

from lightcc.core import ops
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet
from lightcc.embedding import exchange
from lightcc.embedding.table import Table
from lightcc.torch.embedding.optimizers import TableOptimizer, by_set

MOST_DEPTH = 2
_STRENGTHS = {None: 0.0, "dc": 0.04, "corr": 0.25}  # the defaults


class _Gradient(NamedTuple):
    """Of one lookup. then: its rows, if they are compared with those of now."""

    found: exchange.Found
    values: torch.Tensor
    then: Optional[torch.Tensor]


class _Sent(NamedTuple):
    """What a rank has sent of one table in one step: keys, each once and in their order, and a gradient for each."""

    keys: numpy.ndarray
    values: torch.Tensor


@dataclass
class _Delayed:
    """Of one table in one step. between: with "corr", those of this table that had not been applied when this step's
    rows were looked up, and that come before it; sent: of one whose exchange has begun; is_applied: it was not refused.
    """

    table: Table
    gradients: List[_Gradient]
    numbers: Dict[str, float]
    between: List["_Delayed"]
    sent: Optional[_Sent] = None
    is_applied: bool = False


class Pipeline(TableOptimizer):
    """Another optimizer of tables, whose updates are applied `depth` steps late: step() keeps the gradients and applies
    the update of `depth` steps ago. It takes the other one's place, also for schedulers, GradScaler and TorchState.

    The lookup of a step then sees the updates but for those of the last `depth` steps. What this buys: start(), called
    between the loss and backward(), begins the exchange of the update that is due, which runs during backward. Results
    are the same with and without start(), and on any number of ranks those of the same gradients, late.

    optimizer: of tables, say E.Adagrad; its own step() is an error from then on. depth: 0 (default: nothing is late,
    bit for bit as without Pipeline), 1 or 2. compensation: None (default), "dc" or "corr", by which each rank's
    gradient g of a row w becomes a first order guess at the gradient of now:

    - "dc": g + strength * g * g * (w as the update finds it - w as the lookup found it), element by element; the rows
      are looked up once more. strength: at least 0, default 0.04.
    - "corr": g - strength * (the sum of what this rank has sent for this row by the updates, at most `depth`, that were
      applied between the lookup and this one). Nothing is looked up, and the rank keeps `depth` more gradients.
      strength: at least 0, below 1, default 0.25. With E.SGD, and a loss whose second derivative by a weight is
      strength / lr, this is the gradient of now exactly. Larger ones are corrected too little, smaller ones too much.

    An update has the learning rate of the step that it is of. An error in an update (a gradient that is not finite)
    is raised by the step that applies it. A step that a GradScaler leaves out applies what is due. finish() applies all
    that waits; E.save, save_delta, load, load_deltas, export and a commit of TorchState call it; restore() drops what
    waits. zero_grad() drops this step's gradients alone. All ranks make as many steps; serve() is refused while
    gradients wait. clip_grad_norm_ is for depth 0.
    Errors: ValueError for other arguments, a compensation without depth, "dc" with a table of strings, and an optimizer
    that is in a Pipeline already.
    Source of "dc": Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017. "corr" is
    lightcc's own: the same Taylor expansion with a constant in place of g * g, and of the way between only what this
    rank knows. It is a negative momentum, which Mitliagkas et al., Asynchrony begets Momentum, Allerton 2016, take
    against delays.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(1, name="user", init=E.Zeros()); ids = torch.tensor([7])
    >>> sparse = E.Pipeline(E.SGD(E.tables(user), lr=1.0), depth=1)
    >>> for _ in range(2): loss = user(ids).sum(); sparse.start(); loss.backward(); sparse.step()
    >>> late = user(ids).item(); sparse.finish(); late, user(ids).item()
    (-1.0, -2.0)
    """

    def __init__(self, optimizer: TableOptimizer, depth: int = 0, compensation: Optional[str] = None,
                 strength: Optional[float] = None):
        if not isinstance(optimizer, TableOptimizer) or optimizer.taken_over or isinstance(optimizer, Pipeline):
            raise ValueError(f"Pipeline: {type(optimizer).__name__} is no optimizer of tables, or in a Pipeline.")
        if isinstance(depth, bool) or depth not in range(MOST_DEPTH + 1):
            raise ValueError(f"Pipeline: depth={depth!r}; give 0, 1 or 2.")
        if compensation not in _STRENGTHS or compensation and not depth:
            raise ValueError(f"Pipeline: compensation={compensation!r} with depth={depth}; give None, or 'dc' or "
                             "'corr' with a depth of 1 or 2.")
        strength = _STRENGTHS[compensation] if strength is None else strength
        most = 1.0 if compensation == "corr" else math.inf
        if not 0 <= strength < most:
            raise ValueError(f"Pipeline: strength={strength!r} must be at least 0 and below {most:g}.")
        tables = [parameter.table for group in optimizer.param_groups for parameter in group["params"]]
        if compensation == "dc" and any(table.strings for table in tables):
            raise ValueError("Pipeline: compensation='dc' is for tables whose keys are integers.")
        self.depth, self._compensation, self._strength = int(depth), compensation, float(strength)
        self._waiting: List[List[_Delayed]] = []  # the oldest first
        self._started: Optional[List[exchange.Step]] = None  # of the oldest that waited
        self._started_of: List[_Delayed] = []
        super().__init__(optimizer.param_groups, optimizer.defaults, optimizer._rule, optimizer._op)
        self.param_groups = optimizer.param_groups  # schedulers of either see the same
        self._plain = weakref.ref(optimizer)
        optimizer.taken_over = True
        _alive.add(self)

    def start(self) -> None:
        """Between the loss and backward(): begins the exchange of the update that the next step() applies. All ranks
        call it, or none; no lookup but a prefetch may come before that step()."""
        if self._started is None and len(self._waiting) == self.depth > 0:
            self._begin_oldest()

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Keeps this step's gradients, and applies the update of `depth` steps ago. Returns what the closure returns.
        """
        plain = self._plain()
        if plain is not None:
            plain._opt_called = True  # type: ignore[attr-defined]  # a scheduler made of it looks there
        if not self.depth:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        taken = self._taken()
        try:
            self.start()
        finally:
            self._waiting.append(taken)
        self._apply()
        return loss

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        plain = self._plain()
        if plain is not None:
            plain.param_groups = self.param_groups  # torch has made new ones

    def finish(self) -> None:
        """Applies all updates that wait, in their order. All ranks call it. Errors: those of step()."""
        while self._started is not None or self._waiting:
            if self._started is None:
                self._begin_oldest()
            self._apply()

    @property
    def waiting(self) -> int:
        """How many steps' updates wait."""
        return len(self._waiting) + (self._started is not None)

    def clip_grad_norm_(self, max_norm: float, dense: Iterable[torch.nn.Parameter] = ()) -> torch.Tensor:
        """As that of other optimizers of tables, with depth 0. ValueError with another depth: the norm is that of sums
        over ranks, which are made late."""
        if self.depth:
            raise ValueError(f"Pipeline(depth={self.depth}): clip_grad_norm_ is for depth=0; gradients are summed over "
                             "ranks when they are applied, which is late.")
        return super().clip_grad_norm_(max_norm, dense)

    def forget(self) -> None:
        """Drops all gradients. An update under way is ended first, where its world is still there: the caller takes
        back what it has done."""
        started, self._started, self._started_of, self._waiting = self._started, None, [], []
        try:
            for step in started or ():
                step.finish()
        except (HorovodInternalError, ValueError):  # its world is gone, or it was refused
            pass
        super().forget()

    def _before_grad_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that is left out has no gradients, and the update that is due with it comes as ever."""
        super()._before_grad_scaler(optimizer)
        overflowed = any(parameter.overflowed for group in self.param_groups for parameter in group["params"])
        if optimizer is self and overflowed:
            self.start()
            self._apply()

    def has_table_of(self, process_set: ProcessSet) -> bool:
        return any(table.process_set is process_set for table in self.tables())

    def tables(self) -> List[Table]:
        return [parameter.table for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            parameter.keeps_rows = self._compensation == "dc"

    def _taken(self) -> List[_Delayed]:
        """This step's gradients, which the tables have no more."""
        taken = []
        late = sum(self._waiting, self._started_of) if self._compensation == "corr" else []
        for parameter, numbers in self._numbered():
            gradients = [_Gradient(one.found, one.grad, one.then) for one in parameter.pending if one.grad is not None]
            taken.append(_Delayed(parameter.table, gradients, numbers,
                                  [one for one in late if one.table is parameter.table]))
        self.zero_grad()
        return taken

    def _begin_oldest(self) -> None:
        """Of the updates that wait."""
        oldest = self._waiting.pop(0)
        self._started = self._exchange(oldest)
        self._started_of = oldest

    def _exchange(self, delayed: List[_Delayed]) -> List[exchange.Step]:
        """Begins an update, in one exchange for each process set."""
        steps = []
        for of_set in by_set(delayed):
            rows_now = self._rows_now(of_set)
            updates = [exchange.Update(one.table, self._compensated(one, now), one.numbers)
                       for one, now in zip(of_set, rows_now)]
            steps.append(exchange.Step(updates, self._op == ops.ReduceOps.Average))
        return steps

    def _apply(self) -> None:
        """Ends the update that was started, if there is one."""
        started, self._started = self._started, None
        delayed, self._started_of = self._started_of, []
        for step in started or ():
            step.finish()
        for one in delayed:
            one.is_applied = True
            one.gradients = []  # later steps need only what was sent

    def _rows_now(self, delayed: List[_Delayed]) -> List[List[torch.Tensor]]:
        """Of each table and lookup, the rows as the update finds them; with "dc" only."""
        if self._compensation != "dc":
            return [[] for _ in delayed]
        keys = [_keys_of(one) for one in delayed]
        lookup = exchange.Lookup([(one.table, exchange.Keys(of)) for one, of in zip(delayed, keys)], False, False)
        return [list(torch.from_numpy(found.rows)[torch.from_numpy(found.inverse)].split(
                    [len(part.found.keys) for part in one.gradients]))
                for one, found in zip(delayed, lookup.finish())]

    def _compensated(self, delayed: _Delayed, rows_now: List[torch.Tensor]) -> List[Tuple[exchange.Found, Any]]:
        if self._compensation == "corr":
            _correct(delayed, self._strength)
        if self._compensation != "dc":
            return [(part.found, part.values.numpy()) for part in delayed.gradients]
        return [(part.found, (part.values + self._strength * part.values * part.values * (now - part.then)).numpy())
                for part, now in zip(delayed.gradients, rows_now)]


def _keys_of(delayed: _Delayed) -> numpy.ndarray:
    """Of its lookups, one behind the other; a key may be in several."""
    return numpy.concatenate([numpy.empty(0, numpy.int64)] + [part.found.keys for part in delayed.gradients])


def _correct(delayed: _Delayed, strength: float) -> None:
    """Makes the gradients those of "corr": what was sent in between goes off each key once. Notes what is sent now."""
    between, delayed.between = [one.sent for one in delayed.between if one.sent and one.is_applied], []
    if not delayed.gradients:
        return
    keys, first, inverse = numpy.unique(_keys_of(delayed), return_index=True, return_inverse=True)
    values = torch.cat([part.values for part in delayed.gradients])
    for sent in between:
        _, here, there = numpy.intersect1d(keys, sent.keys, assume_unique=True, return_indices=True)
        values[first[here]] -= strength * sent.values[there]
    delayed.gradients = [part._replace(values=corrected) for part, corrected in zip(
        delayed.gradients, values.split([len(part.values) for part in delayed.gradients]))]
    sums = values.new_zeros(len(keys), values.shape[1])
    delayed.sent = _Sent(keys, sums.index_add_(0, torch.from_numpy(inverse.reshape(-1)), values))


_alive: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()


def pipelines() -> List[Pipeline]:
    """Those whose updates may wait, in one order on all ranks."""
    late = [one for one in _alive if one.depth]
    return sorted(late, key=lambda one: sorted(table.name for table in one.tables()))


def finish(tables: Iterable[Table]) -> None:
    """Applies all updates of these tables that wait. All ranks call it."""
    for one in pipelines():
        if any(table in one.tables() for table in tables):
            one.finish()


def forget(tables: Iterable[Table]) -> None:
    """Drops them."""
    for one in pipelines():
        if any(table in one.tables() for table in tables):
            one.forget()


def expect_none_waiting(process_set: ProcessSet) -> None:
    """ValueError if an update waits, of which the other ranks need this rank's gradients."""
    for one in pipelines():
        if one.waiting and one.has_table_of(process_set):
            raise ValueError(f"serve: {one.waiting} updates of a Pipeline(depth={one.depth}) wait, which would be "
                             "lost. Call its finish() on all ranks before, or make steps without ids instead of "
                             "serve().")

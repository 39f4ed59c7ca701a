"""DiLoCo: each rank makes steps of its own; every so many of them the ranks average how far they have come, and an
outer optimizer makes a step of that, from which all go on.

A model's fragment has outer parameters, equal on all ranks: what it was when it was last exchanged. Its outer gradient
is outer - now, averaged over the ranks.
Sources: Douillard et al., 2023 (DiLoCo, arXiv 2311.08105); 2025 (Streaming DiLoCo: fragments, overlap, alpha; arXiv
2501.18512).
"""
import functools
import hashlib
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import torch

from lightcc.compress.choice import compression_of, text_of
from lightcc.core.agreed_settings import number
from lightcc.core.exchange_schedule import checked
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.torch.compression import Compression
from lightcc.torch.gradient import Gradient
from lightcc.torch.mpi_ops import Average
from lightcc.torch.optimizer import _DistributedOptimizer
from lightcc.torch.optimizer import wrapped as wrapped_distributed
from lightcc.torch.periodic import KEY, FragmentReducer, Named, PeriodicExchange, PeriodicOptimizer, wrapped
from lightcc.torch.weights import digests

_WHAT = "hvd.DiLoCo"
_OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)  # as the papers have it


def DiLoCo(model: torch.nn.Module, inner_optimizer: torch.optim.Optimizer,
           outer_optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = _OUTER, sync_every: int = 100,
           fragments: Union[int, Sequence[Sequence[torch.Tensor]]] = 1, delay: int = 0, alpha: Optional[float] = None,
           compression: Any = Compression.none, inner_set: Optional[ProcessSet] = None,
           process_set: ProcessSet = global_process_set) -> Any:
    """An optimizer whose ranks exchange outer gradients after every `sync_every` steps (docs/fewer_exchanges.md).

    model: all of its parameters that require a gradient at the first step are exchanged; buffers stay each rank's own.
    inner_optimizer: makes the steps of a rank; its state stays the rank's own. outer_optimizer: a function of the
    outer parameters that returns an optimizer of torch for them; default: SGD(lr=0.7, momentum=0.9, nesterov=True).
    fragments: a number of parts of about equal size, in the model's order, at most sync_every; or lists of parameters.
    They are exchanged in turn, each every sync_every steps. delay: the exchange of a fragment runs behind so many
    further steps, fewer than sync_every. alpha: what then stays of the rank's own parameters,
        parameter = alpha parameter + (1 - alpha) outer;   default: 0 without a delay, else 0.5.
    compression: of outer gradients between hosts; topk, int8 and int4 add what they leave behind to the next ones.
    inner_set: a process set with this rank, say those of its host: its ranks average their gradients in each step, as
    by DistributedOptimizer, and so hold the same parameters. process_set: all ranks that exchange outer gradients.

    Returns an optimizer of a subclass (same class name) of the inner one's, which shares its state and options; its
    attribute outer_optimizer is the outer one from the first step on. Ranks must begin with the same parameters
    (broadcast_parameters); load weights before the first step, which takes them as the outer ones. Clip gradients and
    scale losses as with the inner optimizer; a step that a GradScaler leaves out counts. exchange_now() gives all ranks
    the average of their parameters, as at the end, and leaves the outer ones as they are. state_dict() has all of it,
    and what is under way. Memory: two copies of the parameters, and the outer optimizer's state.

    Errors: ValueError for arguments out of their ranges, for an optimizer that exchanges already, and from step(): on
    all ranks if they differ in settings or begin with different parameters, and for parameters that are added or
    unfrozen after the first step; from load_state_dict for a state of other parameters; those of allreduce from step().
    join() is refused, as a rank that has joined would add zeros to the outer gradients.

    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = hvd.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=0.01), sync_every=2)
    >>> for step in range(4):
    ...     optimizer.zero_grad(); model(torch.randn(8, 2)).square().mean().backward(); optimizer.step()
    >>> hvd.check_weights(model)
    """
    lists = _lists_of(fragments, model) if isinstance(fragments, (list, tuple)) else None
    schedule = checked(_WHAT, sync_every, fragments if lists is None else len(lists), delay)
    if lists is not None and len({id(p) for part in lists for p in part}) < sum(map(len, lists)):
        raise ValueError(f"{_WHAT}: fragments has a parameter twice.")
    alpha = number(_WHAT, "alpha", (0.5 if delay else 0.0) if alpha is None else alpha, 0.0, 1.0)
    if not callable(outer_optimizer) or isinstance(outer_optimizer, torch.optim.Optimizer):
        raise ValueError(f"{_WHAT}: outer_optimizer must be a function of parameters, which are DiLoCo's own: give "
                         "lambda parameters: torch.optim.SGD(parameters, lr=0.7), say.")
    compression = compression_of(compression, Average, "SGD")
    exchange = None
    if process_set.included():
        settings = {"sync_every": sync_every, "fragments": schedule.fragments, "delay": delay, "alpha": alpha,
                    "compression": text_of(compression), "inner_set": inner_set is not None}
        exchange = _OuterExchange(_WHAT, lambda: list(model.named_parameters()), schedule, lists, settings, process_set)
        exchange.compression, exchange.alpha, exchange.make_outer = compression, alpha, outer_optimizer
    made = wrapped(inner_optimizer, exchange, _WHAT, _DiLoCoOptimizer)
    if inner_set is None:
        return made
    if inner_set.included() is False:
        raise ValueError(f"{_WHAT}: inner_set={inner_set} does not contain this rank; give the set that it is in.")
    distributed = wrapped_distributed(_DistributedOptimizer, made, _of_optimizer(model, made), Compression.none, 1,
                                      Average, 1.0, 0, None, False, inner_set, inside_periodic=True)
    distributed._plain = made._plain  # a scheduler made before the wrap looks at the given optimizer
    return distributed


def _lists_of(fragments: Sequence[Any], model: torch.nn.Module) -> List[List[torch.Tensor]]:
    known = {id(p) for p in model.parameters()}
    lists = []
    for i, part in enumerate(fragments):
        if isinstance(part, torch.Tensor) or not isinstance(part, Iterable):
            raise ValueError(f"{_WHAT}: fragments[{i}] is a {type(part).__name__}: give lists of parameters, or a "
                             "number of parts.")
        lists.append(list(part))
        for j, p in enumerate(lists[i]):
            if id(p) not in known:
                raise ValueError(f"{_WHAT}: fragments[{i}][{j}] is not a parameter of the model.")
    return lists


def _of_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in model.named_parameters() if id(p) in known]


class _DiLoCoOptimizer(PeriodicOptimizer):
    """What the class of what DiLoCo returns has."""

    @property
    def outer_optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The outer optimizer, say for a scheduler of its learning rate; None before the first step."""
        exchange: Any = self._periodic
        return exchange.outer() if exchange is not None and exchange._begun else None


class _OuterReducer(FragmentReducer):
    """Averages outer gradients: its gradients are those of outer parameters."""

    def __init__(self, compression: Any, process_set: ProcessSet):
        super().__init__(compression, Average, 1.0, 1.0, False, process_set)
        self.inner: Dict[Gradient, torch.Tensor] = {}    # the model's parameter of each
        self.arrived: Dict[Gradient, torch.Tensor] = {}  # averages that are not taken in yet

    def _put_into_slot(self, gradient: Gradient) -> None:
        self._wire.fill_difference(gradient, gradient.parameter.detach(), self.inner[gradient])

    def _deliver_one(self, gradient: Gradient) -> None:
        self.arrived[gradient] = self._wire.reduced(gradient).to(gradient.parameter.dtype)

    def forget(self) -> None:
        self.arrived.clear()


class _OuterExchange(PeriodicExchange):
    reducers: List[_OuterReducer]  # type: ignore[assignment]
    compression: Any
    alpha: float
    make_outer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    optimizer: Optional[torch.optim.Optimizer] = None

    def make_fragment(self, named: Named) -> _OuterReducer:
        self.optimizer = None
        reducer = _OuterReducer(self.compression, self._process_set)
        for name, parameter in named:
            gradient = Gradient(torch.nn.Parameter(parameter.detach().clone()), f"{name}.outer")
            reducer.inner[gradient] = parameter
            reducer.add([gradient])
        return reducer

    def begin_anew(self) -> None:
        self.optimizer = None
        for reducer in self.reducers:
            for gradient, now in reducer.inner.items():
                gradient.parameter.copy_(now)

    def take_in(self, fragment: int, wholly: bool) -> None:
        reducer = self.reducers[fragment]
        if wholly:  # the average of the ranks' parameters; it is not this fragment's turn, so the outer ones stay
            for gradient, average in reducer.arrived.items():
                reducer.inner[gradient].copy_(gradient.parameter - average)
            reducer.forget()
            return
        for gradient, average in reducer.arrived.items():
            gradient.parameter.grad = average
        self.outer().step()  # of this fragment: the others have no gradient
        reducer.forget()
        for gradient, now in reducer.inner.items():
            outer = gradient.parameter
            outer.grad = None
            if self.alpha == 0:
                now.copy_(outer)
            else:
                now.lerp_(outer.detach(), 1 - self.alpha)

    def own_state(self) -> Dict[str, Any]:
        arrived = [[reducer.arrived[g].clone() for g in reducer.gradients] if reducer.arrived else None
                   for reducer in self.reducers]
        return {"outer": {name: p.detach().clone() for name, p in self._outer_parameters().items()},
                "arrived": arrived, "outer_optimizer": self.outer().state_dict()}

    def load_own_state(self, state: Mapping[str, Any], in_flight: Sequence[int]) -> None:
        outer, saved = self._outer_parameters(), state["outer"]
        if list(outer) != list(saved):
            other = sorted(outer.keys() ^ saved.keys())
            which = f"{other[0]!r} is {'not in it' if other[0] in outer else 'in it alone'}" if other else \
                "their order is another"
            raise ValueError(f"{_WHAT}: this state has the outer parameters of other parameters than those that "
                             f"require a gradient here: {which}. Freeze the same ones before it is loaded, or take "
                             f"{KEY!r} out of it: then the parameters as they are become the outer ones.")
        for name, p in outer.items():
            p.copy_(saved[name])
        for fragment in in_flight:
            reducer = self.reducers[fragment]
            for gradient, average in zip(reducer.gradients, state["arrived"][fragment]):
                reducer.arrived[gradient] = average.to(gradient.parameter, copy=True)
        self.outer().load_state_dict(state["outer_optimizer"])

    def settings(self) -> Dict[str, Any]:
        defaults = {name: value for name, value in self.outer().defaults.items()
                    if isinstance(value, (bool, int, float, str, tuple))}
        return {**super().settings(), "outer_optimizer": (type(self.outer()).__name__, defaults)}

    def progress(self) -> Dict[str, Any]:
        of_all = repr(digests(list(self._outer_parameters().items())))
        digest = hashlib.blake2b(of_all.encode(), digest_size=4).hexdigest()
        return {**super().progress(), "digest of the outer parameters": digest}

    def outer(self) -> torch.optim.Optimizer:
        """The outer optimizer."""
        if self.optimizer is None:
            self.optimizer = self.make_outer(list(self._outer_parameters().values()))
        return self.optimizer

    def _outer_parameters(self) -> Dict[str, torch.Tensor]:
        """By the names of the model's, in its order, however it is cut."""
        outer = {id(now): gradient.parameter for reducer in self.reducers for gradient, now in reducer.inner.items()}
        names = {id(now): name for part, reducer in zip(self._names, self.reducers)
                 for name, now in zip(part, reducer.inner.values())}
        return {names[id(p)]: outer[id(p)] for p in self._parameters}

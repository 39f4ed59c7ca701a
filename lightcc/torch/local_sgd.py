"""LocalSGD: each rank makes steps of its own, and every so many of them the ranks average their parameters.

Sources: McMahan et al., AISTATS 2017 (FedAvg); Stich, ICLR 2019 (local SGD); Wang et al., SysML 2020 (overlapped).
"""
import weakref
from typing import Any, Dict, List, Mapping, Sequence

import torch

from lightcc.core.exchange_schedule import checked
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.torch.arguments import names_of
from lightcc.torch.compression import Compression
from lightcc.torch.gradient import Gradient
from lightcc.torch.mpi_ops import Average
from lightcc.torch.periodic import FragmentReducer, Named, PeriodicExchange, wrapped

_WHAT = "hvd.LocalSGD"


def LocalSGD(optimizer: torch.optim.Optimizer, sync_every: int, named_parameters: Any = None, delay: int = 0,
             process_set: ProcessSet = global_process_set) -> Any:
    """An optimizer whose ranks average their parameters after every `sync_every` steps (docs/fewer_exchanges.md).

    sync_every: in steps; 1 with plain SGD is DistributedOptimizer but for rounding. named_parameters:
    model.named_parameters(). delay: 0: step() waits for the average. Else the exchange runs behind so many further
    steps, and then each rank adds (average - what it had sent) to its parameters: no step is lost. Memory: one copy of
    the parameters, with a delay two. Ranks must begin with the same parameters (broadcast_parameters). The optimizer's
    state, buffers such as those of batch normalisation, and parameters that are frozen at the first step stay each
    rank's own.

    Returns an optimizer of a subclass (same class name) that shares the state and options of the given one. Gradients
    are this rank's own: clip them and scale losses as ever; a step that a GradScaler leaves out counts. exchange_now()
    averages at once, as at the end. state_dict() has what is under way.

    Errors: ValueError for arguments out of their ranges, for an optimizer that exchanges already, and from step(): on
    all ranks if they differ in settings, and for parameters that are added or unfrozen after the first step; those of
    allreduce from step(). join() is refused, as a rank that has joined would add zeros to the parameters.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = hvd.LocalSGD(torch.optim.SGD([weight], lr=1.0), sync_every=2)
    >>> for step in range(2):
    ...     optimizer.zero_grad(); (weight * (hvd.rank() + 1)).sum().backward(); optimizer.step()
    >>> weight.item() == -2 * (hvd.size() + 1) / 2
    True
    """
    schedule = checked(_WHAT, sync_every, delay=delay)
    names = names_of(named_parameters, optimizer.param_groups)
    exchange = None
    if process_set.included():
        exchange = _Average(_WHAT, lambda: _named(made().param_groups, names), schedule, None,
                            {"sync_every": sync_every, "delay": delay}, process_set)
    optimizer = wrapped(optimizer, exchange, _WHAT)
    made = weakref.ref(optimizer)  # whose list of groups load_state_dict replaces
    return optimizer


def _named(groups: List[Dict[str, Any]], names: Dict[torch.Tensor, str]) -> Named:
    parameters = [p for group in groups for p in group["params"]]
    return [(names.get(p, f"parameter {i}"), p) for i, p in enumerate(parameters)]


class _WeightsReducer(FragmentReducer):
    """Averages parameters."""

    def __init__(self, delayed: bool, process_set: ProcessSet):
        super().__init__(Compression.none, Average, 1.0, 1.0, False, process_set)
        self.delayed = delayed
        self.sent: Dict[Gradient, torch.Tensor] = {}   # with a delay: what this rank has sent
        self.means: Dict[Gradient, torch.Tensor] = {}  # what has arrived

    def _put_into_slot(self, gradient: Gradient) -> None:
        gradient.slot.copy_(gradient.parameter)
        if self.delayed:
            self.sent[gradient] = gradient.parameter.detach().clone()

    def _deliver_one(self, gradient: Gradient) -> None:
        self.means[gradient] = gradient.slot

    def forget(self) -> None:
        self.means.clear()
        self.sent.clear()


class _Average(PeriodicExchange):
    reducers: List[_WeightsReducer]  # type: ignore[assignment]

    def make_fragment(self, named: Named) -> _WeightsReducer:
        reducer = _WeightsReducer(self._schedule.delay > 0, self._process_set)
        reducer.add([Gradient(parameter, f"{name}.average") for name, parameter in named])
        return reducer

    def begin_anew(self) -> None:
        """Nothing is kept between two exchanges."""

    def take_in(self, fragment: int, wholly: bool) -> None:
        reducer = self.reducers[fragment]
        for gradient, mean in reducer.means.items():
            parameter, sent = gradient.parameter, reducer.sent.get(gradient)
            if sent is None or wholly:
                parameter.copy_(mean)
            else:
                parameter.add_(mean.sub(sent))
        reducer.forget()

    def own_state(self) -> Dict[str, Any]:
        return {"arrived": [{"means": [reducer.means[g].clone() for g in reducer.gradients],
                             "sent": [reducer.sent[g].clone() for g in reducer.gradients]} if reducer.means else None
                            for reducer in self.reducers]}

    def load_own_state(self, state: Mapping[str, Any], in_flight: Sequence[int]) -> None:
        for fragment in in_flight:
            reducer, saved = self.reducers[fragment], state["arrived"][fragment]
            for i, gradient in enumerate(reducer.gradients):
                reducer.means[gradient] = saved["means"][i].to(gradient.parameter, copy=True)
                reducer.sent[gradient] = saved["sent"][i].to(gradient.parameter, copy=True)

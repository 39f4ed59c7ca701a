"""TorchState: models, optimizers, samplers and plain values that an elastic job takes from world to world.

For values of some types there are handlers, by a registry of (type, handler class); the other values are pickled.
Handlers keep copies of state dicts, which themselves share memory with the live model or optimizer.
"""
import copy
import io
from typing import Any, Dict, Iterable, List, Mapping, Tuple, Type

import torch

from lightcc.core.elastic_shared import SharingState
from lightcc.core.elastic_state import ObjectState  # noqa: F401  as Horovod's module has it
from lightcc.torch.elastic.sampler import ElasticSampler
from lightcc.torch.functions import (  # noqa: F401  as Horovod's module has them
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from lightcc.torch.mpi_ops import is_initialized, rank
from lightcc.torch.residuals import share_residuals


class StateHandler:
    """Keeps one value of a TorchState. Abstract: a handler for another type defines save, restore and sync.

    >>> from lightcc.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
    >>> class History(list): pass
    >>> class HistoryHandler(StateHandler):
    ...     def save(self): self.kept = len(self.value)
    ...     def restore(self): del self.value[self.kept:]
    ...     def sync(self): self.value[:] = hvd.broadcast_object(list(self.value), 0)
    >>> before = get_handler_registry(); set_handler_registry([*before, (History, HistoryHandler)])
    >>> state = hvd.elastic.TorchState(history=History()); state.history.append(1); state.restore(); state.history
    []
    >>> set_handler_registry(before)
    """

    def __init__(self, value: Any):
        self.value = value
        self.save()

    def prepare(self) -> None:
        """Comes before any value is saved: what must arrive first is waited for here, so that a commit that fails has
        saved nothing."""

    def save(self) -> None:
        """Keeps a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Gives the value the state that was kept. Need not communicate: there may be no world."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the value equal to rank 0's. What was kept stays until TorchState.sync, when all has arrived, saves."""
        raise NotImplementedError

    def reset(self) -> None:
        """There is a new world."""

    def set_value(self, value: Any) -> None:
        """Takes another value in its place, and keeps its state."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """For what has state_dict and load_state_dict: schedulers of the learning rate.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
    >>> optimizer.step(); scheduler.step(); state.restore(); scheduler.last_epoch, optimizer.param_groups[0]["lr"]
    (0, 0.1)
    """

    _kept: Any = None

    def save(self) -> None:
        self._kept = copied(self.value.state_dict(), self._kept)

    def restore(self) -> None:
        self.value.load_state_dict(copied(self._kept))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.state_dict"))


class ModelStateHandler(StateDictHandler):
    """For modules. A model that is restored has no gradients: they belong to the parameters that it had.

    >>> model = torch.nn.Linear(2, 1, bias=False); handler = ModelStateHandler(model)
    >>> weight = model.weight.clone(); torch.nn.init.zeros_(model.weight); handler.restore()  # doctest: +ELLIPSIS
    Parameter containing:...
    >>> torch.equal(model.weight, weight)
    True
    """

    def __init__(self, model):
        super().__init__(model)

    def restore(self) -> None:
        super().restore()
        _drop_gradients(self.value.parameters())

    def sync(self) -> None:
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, 0)  # which are the module's own
        if len(tensors) < len(state):  # a module's get_extra_state
            others = {name: value for name, value in state.items() if name not in tensors}
            self.value.load_state_dict({**tensors, **broadcast_object(others, 0, "elastic.extra_state")})


class OptimizerStateHandler(StateDictHandler):
    """For torch's optimizers and DistributedOptimizer, with what compression has left behind. Restoring drops the
    gradients of the optimizer's parameters.

    >>> p = torch.ones(1, requires_grad=True)
    >>> optimizer = torch.optim.Adam([p]); handler = OptimizerStateHandler(optimizer)
    >>> p.sum().backward(); optimizer.step(); len(optimizer.state)
    1
    >>> handler.restore(); len(optimizer.state), p.grad
    (0, None)
    """

    def __init__(self, optimizer):
        super().__init__(optimizer)

    def restore(self) -> None:
        super().restore()
        _drop_gradients(p for group in self.value.param_groups for p in group["params"])

    def prepare(self) -> None:
        if hasattr(self.value, "_arrive"):  # of DelayedGradients, LocalSGD and DiLoCo
            self.value._arrive()

    def sync(self) -> None:
        if isinstance(self.value, torch.optim.LBFGS):  # not for broadcast_optimizer_state
            super().sync()
        else:
            broadcast_optimizer_state(self.value, 0)
        share_residuals(self.value)


class SamplerStateHandler(StateDictHandler):
    """For ElasticSampler. Rank 0's progress is what its parameters have seen, so it is that of all ranks.

    >>> sampler = hvd.elastic.ElasticSampler(range(100)); handler = SamplerStateHandler(sampler)
    >>> sampler.record_batch(0, 4); handler.restore(); sampler.processed_num
    0
    """

    def __init__(self, sampler):
        super().__init__(sampler)

    def restore(self) -> None:
        if is_initialized():
            super().restore()
        else:  # a world could not be formed; reset splits in the next
            self.value.epoch, self.value.processed_num = self._kept["epoch"], self._kept["processed_num"]

    def reset(self) -> None:
        self.value.reset()


_own: List[Tuple[type, Type[StateHandler]]] = []  # before those of the registry


def register_own(own: List[Tuple[type, Type[StateHandler]]]) -> None:
    """Adds lightcc's own handlers of values, which go before those of the registry."""
    _own.extend(own)


_registry: List[Tuple[type, Type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
]


def get_handler_registry() -> List[Tuple[type, Type[StateHandler]]]:
    """The handlers for values of a TorchState, (type, handler class); of those that fit the first is taken.

    >>> [kind.__name__ for kind, _ in get_handler_registry()]
    ['Module', 'Optimizer', 'ElasticSampler', 'LRScheduler']
    """
    return _registry


def set_handler_registry(registry: List[Tuple[type, Type[StateHandler]]]) -> None:
    """Replaces them, for TorchStates that are made from now on.

    >>> set_handler_registry(get_handler_registry())
    """
    global _registry
    _registry = registry


class TorchState(SharingState):
    """The state of an elastic job: a model, an optimizer and whatever else must go on from where it was.

    model, optimizer: None if there is none. kwargs: further modules, optimizers, ElasticSamplers and schedulers, which
    are kept by their state dicts and made equal in place; and values of any other kind that copy.deepcopy and pickle
    take, say epoch, batch, torch.get_rng_state(). Each becomes an attribute. Assigning one of the former takes the new
    object in place of the old one, and commits its state.

    commit() copies all of it in memory, into that of the last commit where tensors fit, so one copy is kept. Gradients
    are no part of it: commit between two steps.
    Errors: ValueError before init, of an ElasticSampler. Source: horovod.torch.elastic.state.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> state = hvd.elastic.TorchState(model, optimizer, batch=0)
    >>> state.batch = 1; state.commit(); state.batch = 2; state.restore(); state.batch
    1
    """

    def __init__(self, model=None, optimizer=None, **kwargs: Any):
        self._handlers: Dict[str, StateHandler] = {}
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self.take_parts(values)
        handlers = {name: handler for name, value in values.items() for handler in _handlers_of(value)[:1]}
        super().__init__(broadcast_object, rank, **{name: v for name, v in values.items() if name not in handlers})
        for name, handler in handlers.items():
            setattr(self, name, values[name])
            self._handlers[name] = handler(values[name])

    def own_saved(self) -> Dict[str, Any]:
        """The state dicts of what has one."""
        return {name: handler._kept for name, handler in self._handlers.items()
                if isinstance(handler, StateDictHandler)}

    def take_own(self, name: str, saved: Any) -> None:
        """Goes to a state dict. ValueError if it does not fit."""
        handler = self._handlers[name]
        assert isinstance(handler, StateDictHandler)
        handler._kept = saved
        try:
            handler.restore()
        except (RuntimeError, KeyError) as error:  # what load_state_dict raises
            raise ValueError(str(error)) from error

    @staticmethod
    def packed(value: Any) -> bytes:
        """By torch.save."""
        data = io.BytesIO()
        torch.save(value, data)
        return data.getvalue()

    @staticmethod
    def unpacked(data: bytes) -> Any:
        """Of this job, or the one before: it may have any values."""
        return torch.load(io.BytesIO(data), weights_only=False)

    def _keep_own(self) -> None:
        for handler in self._handlers.values():
            getattr(handler, "prepare", bool)()  # Horovod's handlers, which a registry may have, need not define it
        for handler in self._handlers.values():
            handler.save()

    def _give_own_back(self) -> None:
        for handler in self._handlers.values():
            handler.restore()

    def _make_own_equal(self) -> None:
        for handler in self._handlers.values():
            handler.sync()

    def reset(self) -> None:
        """Samplers split anew."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


def copied(value: Any, into: Any = None) -> Any:
    """A deep copy of a state dict. into: an earlier copy, which is used up: tensors that fit are written there, as new
    memory costs more than the copy.

    >>> a = {"x": torch.ones(2), "n": [1]}; b = copied(a); c = copied({"x": torch.zeros(2), "n": [2]}, b)
    >>> c["x"] is b["x"], c["x"] is a["x"], c
    (True, False, {'x': tensor([0., 0.]), 'n': [2]})
    """
    if type(value) is torch.Tensor and value.layout is torch.strided:
        value = value.detach()
        if type(into) is torch.Tensor and _alike(value, into):
            return into.copy_(value)
        return value.clone()
    if isinstance(value, Mapping) and type(value).__name__ in ("dict", "OrderedDict"):
        known = into if isinstance(into, Mapping) else {}
        made = type(value)((key, copied(entry, known.get(key))) for key, entry in value.items())
        if hasattr(value, "_metadata"):  # versions of modules, which load_state_dict looks at
            made._metadata = value._metadata
        return made
    if type(value) in (list, tuple):
        known = into if type(into) is type(value) and len(into) == len(value) else [None] * len(value)
        return type(value)(copied(entry, own) for entry, own in zip(value, known))
    return copy.deepcopy(value)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


def _handlers_of(value: Any) -> List[Type[StateHandler]]:
    return [handler for kind, handler in [*_own, *_registry] if isinstance(value, kind)]


def _drop_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """What a step that failed has left would be added to by the next backward."""
    for parameter in parameters:
        parameter.grad = None

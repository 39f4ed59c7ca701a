"""DistributedOptimizer: a torch optimizer whose step uses the gradients of all ranks."""
import contextlib
import functools
import os
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch

from lightcc import _core
from lightcc.common.process_sets import global_process_set
from lightcc.common.util import split_list
from lightcc.torch.compression import Compression
from lightcc.torch.functions import broadcast_object
from lightcc.torch.gradients import Exchange, Gradient, Group
from lightcc.torch.mpi_ops import Adasum, Average, size


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1,
                         op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False,
                         process_set=global_process_set):
    """Wraps a torch optimizer: backward sends each gradient when it is ready, step() waits and uses the reduced ones.

    Returns an optimizer of a subclass (same class name) that shares the state and options of the given one.

    optimizer: any torch.optim.Optimizer. named_parameters: model.named_parameters(); names must be equal on all ranks.
    compression: what travels. backward_passes_per_step: gradients of so many backward passes are added up before they
    are sent. op: as for allreduce; Adasum combines the ranks' steps instead of their gradients (lightcc.torch.adasum).
    gradient_predivide_factor: divide by it before the sum and by size / factor after.
    groups: a number of groups, or lists of parameters, that are reduced as one unit; num_groups is its old name.
    sparse_as_dense: makes sparse gradients dense. process_set: who takes part; on other ranks it is a plain optimizer.

    A parameter without gradient counts as zeros. From backward until synchronize or step is done, p.grad is being
    reduced; then it is a view of memory that the next step overwrites.
    A closure is followed by synchronize() each time that step calls it.
    More methods: synchronize(), skip_synchronize(), set_backward_passes_per_step(n).

    Errors: ValueError for wrong arguments (names, groups, factors) and for sparse gradients without sparse_as_dense;
    AssertionError for more backward passes than set, for zero_grad() between backward and step, and for
    skip_synchronize() with Adasum; HorovodInternalError from backward or step as from allreduce.
    Source: horovod.torch.optimizer.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); optimizer.step(); model.weight.grad
    tensor([[1., 1.]])
    >>> optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.synchronize()
    >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    >>> with optimizer.skip_synchronize(): optimizer.step()
    """
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        raise ImportError(f"DistributedOptimizer needs torch 2.1 or later, not {torch.__version__}.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average.")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0.")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    front = _DistributedOptimizer
    if op == Adasum:
        from lightcc.torch.adasum import _DistributedAdasumOptimizer as front  # late: it is built on this module
    cls = type(optimizer.__class__.__name__, (front, optimizer.__class__), {})
    distributed = cls.__new__(cls)
    # The same state, options and hooks, without a second __init__. An lr_scheduler may have put a `step` there that is
    # bound to the plain optimizer.
    distributed.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    distributed._setup(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
                       sparse_as_dense, process_set)
    return distributed


class _DistributedOptimizer:
    """What DistributedOptimizer puts in front of the optimizer's own class."""

    _exchange_class = Exchange

    def _setup(self, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
               sparse_as_dense, process_set) -> None:
        self._parameter_names = _names(named_parameters, self.param_groups)
        self._process_set = process_set
        self._backward_passes_per_step = backward_passes_per_step
        self._synchronized = False
        self._should_synchronize = True
        self._began_epoch = 0  # the epoch in which gradients wait to be synchronized; 0: none do
        self._gradients: Dict[torch.Tensor, Gradient] = {}
        self._tracked: Set[int] = set()  # the ids of its keys: a tensor is slow to hash
        self._exchange: Optional[Exchange] = None
        alone = size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        _check_groups(groups)
        if process_set.included() and not alone:
            self._exchange = self._exchange_class(compression, op, 1.0 / gradient_predivide_factor,
                                                  gradient_predivide_factor, sparse_as_dense, process_set)
            self._track_new_parameters()
            self._make_groups(groups)

    # What users call

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """synchronize(), then the optimizer's own step."""
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)
        if closure is not None:
            def closure_and_synchronize():
                loss = closure()
                self.synchronize()
                return loss
            result = super().step(closure_and_synchronize)
        else:
            if self._synchronized:
                warnings.warn("optimizer.step() called without optimizer.skip_synchronize() context after "
                              "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                              "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your "
                              "code.", stacklevel=2)
            if not self._synchronized or self._waiting():
                self.synchronize()
            result = super().step()
        self._synchronized = False
        return result

    step.hooked = True  # torch would wrap it to call step hooks, which the optimizer's own step already does

    def synchronize(self) -> None:
        """Waits until every gradient is reduced; sends those that are not on their way yet."""
        if self._exchange is not None:
            try:
                with torch.no_grad():
                    self._send_the_rest()
                    self._exchange.finish()
            finally:
                self._began_epoch = 0
                self._reset_passes()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside it step() does not synchronize; for use after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are sent."""
        self._backward_passes_per_step = passes
        self._reset_passes()

    def zero_grad(self, *args, **kwargs):
        """The optimizer's own zero_grad; AssertionError while gradients are on their way."""
        if self._waiting():
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() "
                                 "or optimizer.synchronize(). This is prohibited as it can cause a race condition.")
        return super().zero_grad(*args, **kwargs)

    # What backward calls

    def _accumulated(self, gradient: Gradient) -> None:
        """A backward pass has added to a parameter's gradient."""
        if self._began_epoch != _core.epoch:
            self._begin()
        if gradient.passes_left <= 0:
            raise AssertionError("Gradients were computed more than backward_passes_per_step times before call to "
                                 "step(). Increase backward_passes_per_step to accumulate gradients locally. "
                                 f"Parameter: {gradient.name}.")
        gradient.passes_left -= 1
        if gradient.passes_left == 0:
            self._ready(gradient)

    def _ready(self, gradient: Gradient) -> None:
        """A parameter's gradient is complete."""
        self._exchange.send(gradient)

    def _begin(self) -> None:
        """The first gradient since the last synchronize; what an interrupt or the end of an epoch left is void."""
        if self._began_epoch:
            self._reset_passes()
        self._exchange.drain()
        self._exchange.make_ready()
        self._began_epoch = _core.epoch

    # The rest

    def _send_the_rest(self) -> None:
        self._track_new_parameters()
        try:
            self._exchange.make_ready()
            for gradient in reversed(self._gradients.values()):
                if not gradient.sent and (gradient.parameter.requires_grad or gradient.group is not None):
                    self._exchange.send(gradient)
        except Exception:
            self._exchange.drain()
            raise

    def _waiting(self) -> bool:
        """Whether a backward pass has run since the last synchronize."""
        return self._began_epoch == _core.epoch != 0 and _core.initialized()

    def _reset_passes(self) -> None:
        for gradient in self._gradients.values():
            gradient.passes_left = self._backward_passes_per_step

    def _track_new_parameters(self) -> None:
        """Hooks each parameter that requires a gradient; also those that are added or unfrozen later."""
        new = [p for group in self.param_groups for p in group["params"]
               if id(p) not in self._tracked and p.requires_grad]
        for parameter in new:
            name = self._parameter_names.setdefault(parameter, f"allreduce.noname.late.{len(self._gradients)}")
            gradient = self._gradients[parameter] = Gradient(parameter, name)
            self._tracked.add(id(parameter))
            gradient.passes_left = self._backward_passes_per_step
            gradient.optimizer = self
            parameter.register_post_accumulate_grad_hook(functools.partial(_accumulated, weakref.ref(gradient)))
            self._exchange.add([gradient])

    def _make_groups(self, groups) -> None:
        if isinstance(groups, list):
            lists = [[p for p in group if p in self._gradients] for group in groups]
        elif groups:
            names = [self._parameter_names[p] for p in self._gradients]
            order = broadcast_object(names, self._process_set.ranks[0], "gradient_groups", self._process_set)
            position = {name: i for i, name in enumerate(order)}
            ordered = sorted(self._gradients, key=lambda p: position[self._parameter_names[p]])
            lists = split_list(ordered, min(groups, len(ordered)))
        else:
            return
        for i, members in enumerate(lists):
            if members:
                Group(f"gradient_group.{i}", [self._gradients[p] for p in members])


def _accumulated(gradient: "weakref.ref[Gradient]", _: torch.Tensor) -> None:
    """The hook of a parameter. The garbage collector does not see what a torch hook refers to, so it must keep neither
    parameter nor optimizer alive; without its optimizer a parameter has plain gradients."""
    alive = gradient()
    if alive is not None:
        alive.optimizer._accumulated(alive)


def _names(named_parameters, param_groups: List[Dict[str, Any]]) -> Dict[torch.Tensor, str]:
    """The name of each parameter."""
    parameters = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"allreduce.noname.{i}.{j}" for i, group in enumerate(param_groups)
                for j, p in enumerate(group["params"])}
    named: List[Tuple[str, torch.Tensor]] = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}.")
    result = {parameter: name for name, parameter in named}
    unnamed = sum(p not in result for p in parameters)
    if unnamed:
        raise ValueError(f"named_parameters was specified, but {unnamed} of the optimizer's parameters are not named. "
                         "Python object ids do not match: the optimizer's parameters may not be those of the model.")
    return result


def _check_groups(groups) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a positive integer or a list of lists of parameters.")
    seen = set()
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of lists of parameters (torch.Tensor), not of "
                             f"{type(parameter).__name__}.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))

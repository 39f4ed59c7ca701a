"""DistributedOptimizer: a torch optimizer whose step uses the gradients of all ranks."""
import contextlib
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch

from lightcc.compress.choice import compression_of
from lightcc.core import lib, ops
from lightcc.core.elastic_worker import is_elastic
from lightcc.core.process_sets import global_process_set, registered
from lightcc.core.util import split_list
from lightcc.core.weights import Exchanges
from lightcc.core.wrapper_arguments import check_predivide, groups_of, stays_here
from lightcc.core.wrapper_class import is_made_with, wrapper_class
from lightcc.torch import backward_hooks, changed_gradients, ddp_conflict, grad_scaler
from lightcc.torch.arguments import names_of
from lightcc.torch.compression import Compression
from lightcc.torch.compression_switch import SwitchedCompression
from lightcc.torch.functions import broadcast_object
from lightcc.torch.gradient import Gradient, Group
from lightcc.torch.gradient_reducer import GradientReducer
from lightcc.torch.mpi_ops import (  # noqa: F401  as Horovod's module has them
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    rank,
    rocm_built,
    size,
    sparse_allreduce_async,
    synchronize,
)
from lightcc.torch.optimizer_attributes import OptimizerAttributes
from lightcc.torch.residuals import SavedResiduals
from lightcc.torch.spans import spanned
from lightcc.torch.weights import check_parameters


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1,
                         op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False,
                         process_set=global_process_set):
    """Wraps a torch optimizer: backward sends each gradient when it is ready, step() waits and uses the reduced ones.

    Returns an optimizer of a subclass (same class name) that shares the state and options of the given one.

    optimizer: any torch.optim.Optimizer. named_parameters: model.named_parameters(); names must be equal on all ranks.
    compression: what travels (topk, int8: docs/compression.md). backward_passes_per_step: gradients of so many backward
    passes are added up before they are sent. op: as for allreduce; Adasum combines the ranks' steps instead of their
    gradients (lightcc.torch.adasum).
    gradient_predivide_factor: divide by it before the sum and by size / factor after.
    groups: a number of groups, or lists of parameters, that are reduced as one unit; num_groups is its old name. In an
    elastic job (HOROVOD_ELASTIC=1) a number wants parameters in the same order on all ranks.
    sparse_as_dense: sends sparse gradients as dense ones, and p.grad is sparse and coalesced again after it; else they
    travel by sparse_allreduce_async (below).
    process_set: who takes part; on other ranks it is a plain optimizer.

    A parameter without gradient counts as zeros. From backward until synchronize or step is done, p.grad is being
    reduced and must not change (so synchronize before clipping; torch's GradScaler does so by itself); then it is a
    view of memory that the next step overwrites. Optimizers whose parameters are named alike may be used side by side,
    if all ranks use them for the first time in the same order.
    A closure is followed by synchronize() each time that step calls it; for LBFGS, which compares losses, the ranks'
    losses are reduced as well.
    copy.deepcopy and pickle make a DistributedOptimizer over the copied parameters. A parameter whose data got another
    dtype or shape (model.double()) is followed.
    More methods: synchronize(), skip_synchronize(), set_backward_passes_per_step(n), register_local_var(parameter).
    Attributes: the arguments backward_passes_per_step (may be set), op, gradient_predivide_factor, sparse_as_dense and
    process_set; and those of lightcc.torch.optimizer_attributes.

    Sparse gradients, as of torch.nn.Embedding(sparse=True): p.grad becomes an uncoalesced sparse tensor with the
    entries of all ranks; a rank without gradient adds none. All ranks agree on what is sparse when they first
    synchronize with a gradient of a parameter, and anew after join(): it stays dense if any rank has a dense one then.
    As long as a parameter has had no gradient on any rank, each synchronize asks again, in one small allreduce. A
    sparse gradient leaves its group; Compression.fp16 and .bf16 cast its values, other compressors do not see it.

    Errors: ValueError for wrong arguments (names, groups, factors, an optimizer wrapped already, a parameter in a
    DistributedDataParallel), and from synchronize or step, on all ranks, for a sparse gradient with another op than
    Sum, Average or Adasum; RuntimeError from these, and the end of the job on all ranks, for a gradient that was
    changed on its way; AssertionError for more backward passes than set, for zero_grad() between backward and step, and
    for skip_synchronize() with Adasum;
    HorovodInternalError from backward or step as from allreduce.
    Source: horovod.torch.optimizer.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); optimizer.step(); model.weight.grad
    tensor([[1., 1.]])
    >>> optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.synchronize()
    >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    >>> with optimizer.skip_synchronize(): optimizer.step()
    """
    return wrapped(_DistributedOptimizer, optimizer, named_parameters, compression, backward_passes_per_step, op,
                   gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set)


def wrapped(members, optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
            num_groups, groups, sparse_as_dense, process_set, inside_periodic=False):
    """What DistributedOptimizer returns, and functions like it, which call this. members: _DistributedOptimizer or a
    class made from it. inside_periodic: the optimizer is one of DiLoCo, which has its inner_set exchange by this."""
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        raise ImportError(f"DistributedOptimizer needs torch 2.1 or later, not {torch.__version__}.")
    if is_made_with(_DistributedOptimizer, optimizer):
        raise ValueError("The optimizer is a DistributedOptimizer already; wrap the plain optimizer, once.")
    if hasattr(optimizer, "_periodic") and not inside_periodic:
        raise ValueError("The optimizer is one of LocalSGD or DiLoCo already, whose ranks make steps with gradients of "
                         "their own. Wrap the plain optimizer, once; DiLoCo's inner_set= has ranks average their "
                         "gradients in each step.")
    if op not in (Average, Sum, Adasum, Min, Max, Product):
        raise ValueError(f"op must be hvd.Average, Sum, Adasum, Min, Max or Product, not {op!r}.")
    check_predivide(gradient_predivide_factor, op)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0.")
    compression = compression_of(compression, op, type(optimizer).__name__, stacklevel=4)
    groups = groups_of(groups, num_groups, lambda parameter: isinstance(parameter, torch.Tensor), stacklevel=4)
    if op == Adasum:
        from lightcc.torch.adasum import _DistributedAdasumOptimizer as members  # here, so that others do not load it
    cls = wrapper_class(optimizer.__class__, members, __name__)
    distributed = cls.__new__(cls)
    # The same state, options and hooks, without a second __init__. An lr_scheduler may have put a `step` there that is
    # bound to the plain optimizer.
    distributed.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    distributed._plain = weakref.ref(optimizer)
    distributed._setup(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
                       sparse_as_dense, process_set)
    grad_scaler.reduce_first(distributed)
    return distributed


def _copied(cls, state, options, ranks, local, make=DistributedOptimizer):
    """What copy and pickle make of a DistributedOptimizer: see __reduce_ex__."""
    plain = cls.__new__(cls)
    plain.__setstate__(state)
    copied = make(plain, process_set=global_process_set if ranks is None else registered(ranks), **options)
    for parameter in local:
        copied.register_local_var(parameter)
    return copied


class _DistributedOptimizer(OptimizerAttributes, SwitchedCompression, SavedResiduals):
    """What the class of what DistributedOptimizer returns has. See wrapper_class."""

    _as_plain: Any
    _reducer_class = GradientReducer
    scale_local_gradients = True  # whether gradients of register_local_var are divided by the size of the process set

    def _setup(self, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, groups,
               sparse_as_dense, process_set) -> None:
        self._parameter_names = names_of(named_parameters, self.param_groups)
        self._options = {"compression": compression, "op": op, "gradient_predivide_factor": gradient_predivide_factor,
                         "groups": groups, "sparse_as_dense": sparse_as_dense}
        self._process_set = process_set
        self._backward_passes_per_step = backward_passes_per_step
        self._synchronized = False
        self._should_synchronize = True
        self._for_grad_scaler = False  # it was a GradScaler that made this optimizer synchronize
        self._began_epoch = 0  # the epoch in which gradients wait to be synchronized; 0: none do
        self._gradients: Dict[torch.Tensor, Gradient] = {}
        self._tracked: Set[int] = set()  # the ids of its keys: a tensor is slow to hash
        self._reducer: Optional[GradientReducer] = None
        self._dropped = backward_hooks.Dropped(type(self).__name__)
        self._groups = groups
        self._in_no_sync: List[Any] = []  # weak references to DistributedDataParallels around its parameters
        self._exchanges = Exchanges()
        self._local: Dict[int, Tuple[torch.Tensor, Any]] = {}  # id: (parameter, its gradient and version when scaled)
        if not stays_here(process_set):
            self._reducer = self._reducer_class(compression, op, 1.0 / gradient_predivide_factor,
                                                gradient_predivide_factor, sparse_as_dense, process_set)
            if op != Adasum:  # whose gradients are this rank's own
                self._in_no_sync = ddp_conflict.refuse_ddp(self)
            self._track_new_parameters()
            self._make_groups(groups)

    # What users call

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """synchronize(), then the optimizer's own step."""
        if not self._should_synchronize:
            result = self._as_plain.step(closure)
        elif closure is not None:
            def closure_and_synchronize():
                loss = closure()
                self.synchronize()
                return self._common_loss(loss) if isinstance(self, torch.optim.LBFGS) else loss
            result = self._as_plain.step(closure_and_synchronize)
        else:
            if self._synchronized and not self._for_grad_scaler:
                warnings.warn("optimizer.step() called without optimizer.skip_synchronize() context after "
                              "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                              "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your "
                              "code.", stacklevel=2)
            if not self._synchronized or self._waiting():
                self.synchronize()
            result = self._as_plain.step()
        self._stepped()
        return result

    step.hooked = True  # torch would wrap it to call step hooks, which the optimizer's own step already does

    @spanned("lightcc.synchronize")
    def synchronize(self) -> None:
        """Waits until every gradient is reduced; sends those that are not on their way yet."""
        if self._reducer is not None:
            try:
                with torch.no_grad():
                    self._send_the_rest()
                    self._reducer.finish(self._for_grad_scaler)
                    if self._local and self.scale_local_gradients:
                        self._scale_local_gradients()
                    self._exchanged()
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
        """Changes after how many backward passes gradients are sent, as does setting backward_passes_per_step.

        passes: counted anew for each gradient that is not on its way. ValueError if it is not positive.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0.")
        self._backward_passes_per_step = passes
        for gradient in self._gradients.values():
            if not (gradient.sent and self._waiting()):
                gradient.passes_left = passes

    def register_local_var(self, parameter: torch.Tensor) -> None:
        """Keeps a parameter's gradient on this rank: it is not exchanged, and step() uses it as it is.

        synchronize() and step() divide it by the size of the process set, once for all backward passes of the step,
        unless the attribute scale_local_gradients is False: that is the gradient of the average of the ranks' losses
        with respect to what only this rank has. None stays None.
        parameter: one of the optimizer's, also one that is frozen. Call it on all ranks that have the parameter, before
        the first backward or between two steps.

        Errors: ValueError for a parameter that is not the optimizer's or is in a group (groups=...), whose gradient
        is on its way, and with op=Adasum, which has steps to exchange and not gradients.
        Source: register_local_var of Horovod's optimizers for TensorFlow, scale_local_gradients=True.

        >>> own = torch.ones(1, requires_grad=True)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0)); optimizer.register_local_var(own)
        >>> (own * hvd.size()).backward(); optimizer.step(); own
        tensor([0.], requires_grad=True)
        """
        if not any(parameter is p for group in self.param_groups for p in group["params"]):
            raise ValueError("register_local_var: this is not a parameter of the optimizer.")
        name = self._parameter_names.get(parameter, "a parameter")
        if isinstance(self._groups, int) or any(parameter is p for group in self._groups or () for p in group):
            raise ValueError(f"register_local_var: {name} is in a group, which is reduced as a whole; leave it out of "
                             "groups.")
        if self._reducer is not None:
            self._track_new_parameters()
            gradient = self._gradients.get(parameter)
            if gradient is not None and not gradient.local:
                if gradient.sent and self._waiting():
                    raise ValueError(f"register_local_var: the gradient of {name} is on its way; call this before "
                                     "backward() or after step().")
                self._reducer.keep_local(gradient)
        self._local.setdefault(id(parameter), (parameter, None))

    def zero_grad(self, *args, **kwargs):
        """The optimizer's own zero_grad; AssertionError while gradients are on their way."""
        if self._waiting():
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() "
                                 "or optimizer.synchronize(). This is prohibited as it can cause a race condition.")
        self._synchronized = False
        return self._as_plain.zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict) -> None:
        """As SavedResiduals has it; a scheduler made before the wrap goes on to change the options in use."""
        SavedResiduals.load_state_dict(self, state_dict)
        plain = self._plain()
        if plain is not None:
            plain.state, plain.param_groups = self.state, self.param_groups

    def __reduce_ex__(self, protocol):
        """A copy has the same options over the copied parameters; as with torch's own, hooks stay behind."""
        if hasattr(self, "_periodic"):  # of DiLoCo with an inner_set, which refuses
            return self._as_plain.__reduce_ex__(protocol)
        parameters, names = [p for group in self.param_groups for p in group["params"]], self._parameter_names
        named = [(names[p], p) for p in parameters] if all(p in names for p in parameters) else None
        options = {**self._options, "named_parameters": named,
                   "backward_passes_per_step": self._backward_passes_per_step}
        ranks = None if self._process_set is global_process_set else self._process_set.ranks
        local = [parameter for parameter, _ in self._local.values()]
        return _copied, (self._as_plain.__thisclass__.__bases__[0], self.__getstate__(), options, ranks, local)

    # What backward calls

    def _accumulated(self, gradient: Gradient) -> None:
        """A backward pass has added to a parameter's gradient."""
        if self._began_epoch != lib.epoch:
            self._begin()
        if gradient.passes_left <= 0:
            changed_gradients.forget([gradient])  # it was changed on its way, but so much is said here
            raise AssertionError("Gradients were computed more than backward_passes_per_step times before call to "
                                 "step(). Increase backward_passes_per_step to accumulate gradients locally. "
                                 f"Parameter: {gradient.name}.")
        gradient.passes_left -= 1
        if gradient.passes_left == 0:
            self._ready(gradient)

    def _ready(self, gradient: Gradient) -> None:
        """A parameter's gradient is complete."""
        self._reducer.send(gradient)

    def _begin(self) -> None:
        """The first gradient since the last synchronize; what an interrupt or the end of an epoch left is void."""
        self._synchronized = self._for_grad_scaler = False
        if self._began_epoch:
            self._reset_passes()
        self._reducer.drain()
        for ddp in self._in_no_sync:
            ddp_conflict.expect_no_sync(ddp(), self)
        self._reducer.make_ready()
        self._began_epoch = lib.epoch

    # The rest

    def _before_grad_scaler(self, optimizer) -> None:
        """A GradScaler is about to look at the gradients of that optimizer's parameters, and only then calls step()."""
        if self._should_synchronize and (not self._synchronized or self._waiting()) and any(
                id(p) in self._tracked for group in optimizer.param_groups for p in group["params"]):
            self._for_grad_scaler = True
            self.synchronize()

    def _stepped(self) -> None:
        self._synchronized = self._for_grad_scaler = False
        plain = self._plain()
        if plain is not None and hasattr(plain.step, "_wrapped_by_lr_sched"):
            plain._opt_called = True  # a scheduler made before the wrap looks there

    def _exchanged(self) -> None:
        """Compares the ranks' weights, if it is time to (HOROVOD_CHECK_WEIGHTS)."""
        if exchange := self._exchanges.due():
            check_parameters(self, self._parameter_names, self._local, exchange, self._process_set)

    def _common_loss(self, loss):
        """The ranks' loss for LBFGS, which compares losses: by their own, ranks would part."""
        if self._reducer is None:
            return loss
        mine = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        value = ops.allreduce(torch.tensor(mine, dtype=torch.float64, device="cpu"), op=self._options["op"],
                              process_set=self._process_set)
        return value.to(loss.dtype) if isinstance(loss, torch.Tensor) else value.item()

    def _send_the_rest(self) -> None:
        self._track_new_parameters()
        try:
            self._reducer.make_ready()
            self._reducer.settle(1 if isinstance(self, torch.optim.SparseAdam) else 0)  # which takes no dense ones
            for gradient in reversed(self._gradients.values()):
                if not gradient.sent:  # also one frozen since: on other ranks it may not be
                    self._reducer.send(gradient)
            self._reducer.release()
        except Exception:
            self._reducer.drain()
            raise

    def _waiting(self) -> bool:
        """Whether a backward pass has run since the last synchronize."""
        return self._began_epoch == lib.epoch != 0 and lib.initialized()

    def _reset_passes(self) -> None:
        for gradient in self._gradients.values():
            gradient.passes_left = self._backward_passes_per_step

    def _track_new_parameters(self) -> None:
        """Hooks each parameter that requires a gradient; also those that are added or unfrozen later."""
        new = [p for group in self.param_groups for p in group["params"]
               if id(p) not in self._tracked and p.requires_grad]
        for parameter in new:
            name = self._parameter_names.setdefault(parameter, f"allreduce.noname.late.{len(self._gradients)}")
            self._tracked.add(id(parameter))
            self._track(parameter, name)

    def _track(self, parameter: torch.Tensor, name: str) -> None:
        gradient = self._gradients[parameter] = Gradient(parameter, name)
        gradient.passes_left = self._backward_passes_per_step
        gradient.optimizer = weakref.ref(self)  # so that an optimizer that is dropped is gone at once
        backward_hooks.register(gradient, self._dropped)
        self._reducer.add([gradient])
        if id(parameter) in self._local:
            self._reducer.keep_local(gradient)

    def _scale_local_gradients(self) -> None:
        """Divides each by the number of ranks, but not one that has been and is still the same."""
        count = self._process_set.size()
        for key, (parameter, scaled) in self._local.items():
            grad = parameter.grad
            if grad is None or (scaled is not None and scaled[0]() is grad and scaled[1] == grad._version):
                continue
            if grad.requires_grad:  # create_graph: it has a history, which must not change
                grad = parameter.grad = grad.detach() / count
            else:
                grad.div_(count)
            self._local[key] = parameter, (weakref.ref(grad), grad._version)

    def _make_groups(self, groups) -> None:
        if isinstance(groups, list):
            lists = [[p for p in group if p in self._gradients] for group in groups]
        elif groups:
            names = [self._parameter_names[p] for p in self._gradients]
            order = names if is_elastic() else broadcast_object(
                names, self._process_set.ranks[0], "gradient_groups", self._process_set)
            if sorted(names) != sorted(order):
                raise ValueError("groups: the parameters that need gradients are named otherwise on rank "
                                 f"{self._process_set.ranks[0]} and on rank {rank()}.")
            position = {name: i for i, name in enumerate(order)}
            ordered = sorted(self._gradients, key=lambda p: position[self._parameter_names[p]])
            lists = split_list(ordered, min(groups, len(ordered)))
        else:
            return
        for i, members in enumerate(lists):
            name, gradients = f"gradient_group.{i}", [self._gradients[p] for p in members]
            compressed = self._reducer.compressed
            for part, of_part in compressed.parts_of(name, gradients) if compressed else [(name, gradients)]:
                if of_part:
                    Group(part, of_part)

"""Optimizers of tables. Each is a torch.optim.Optimizer: groups, schedulers and GradScaler work as with torch's own.

step() sends the gradients of all tables to the rows' owners in one exchange, which all ranks of the tables' process set
take part in, also one that has looked up nothing; an owner adds up the ranks' gradients of a row, in rank order, and
applies one update. A row that no rank has looked up is not touched. Notation of the rules, for a row of d weights x: g
is the summed (or averaged) gradient, t counts the table's steps, tau is the row's last, slots are zero at the row's
birth, and alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t).
"""
import math
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypeVar, Union

import torch

from lightcc.core import ops
from lightcc.embedding import exchange
from lightcc.embedding.rules import Rule
from lightcc.torch.embedding import scaling
from lightcc.torch.embedding.parameter import TableParameter

_U = TypeVar("_U", bound=Any)
Tables = Union[Iterable[TableParameter], Iterable[Dict[str, Any]]]


class TableOptimizer(torch.optim.Optimizer):
    """What the optimizers of tables share.

    step() raises, on every rank and with nothing applied: HorovodInternalError that names the rank, the table and the
    key for a gradient that is not finite, the ranks for tables that differ, and the rank whose memory does not suffice
    for new rows.
    """

    def __init__(self, params: Tables, defaults: Dict[str, Any], rule: Rule, op: int):
        if op not in (ops.ReduceOps.Average, ops.ReduceOps.Sum):
            raise ValueError(f"{type(self).__name__}: op={op!r}; give hvd.Average or hvd.Sum.")
        for name, value in defaults.items():
            _expect(type(self).__name__, name, value)
        self._rule, self._op = rule, op
        self._held: List[exchange.Step] = []  # of clip_grad_norm_, and the factor of their gradients
        self._scale = 1.0
        self.taken_over = False  # by a Pipeline
        super().__init__(params, defaults)
        scaling.agree_first(self)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """A group of tables with options of its own. ValueError for anything but tables, and for a table that another
        optimizer has."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for one in params:
            if not isinstance(one, TableParameter):
                raise ValueError(f"{type(self).__name__} is for tables: give E.tables(model), not a "
                                 f"{type(one).__name__}; E.dense_parameters(model) go to an optimizer of torch.optim.")
        super().add_param_group({**param_group, "params": params})
        for one in params:
            one.table.attach(self._rule)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """One update of every row that some rank has a gradient for. Returns what the closure returns."""
        self._expect_own()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for step in self._held or self._begun(hold=False):
                step.apply(self._scale) if self._held else step.finish()
        finally:
            self._held = []
            self.zero_grad()
        return loss

    def clip_grad_norm_(self, max_norm: float, dense: Iterable[torch.nn.Parameter] = ()) -> torch.Tensor:
        """Between backward() and step(): scales gradients so that their norm is at most max_norm; returns what it was.

        The norm is that of all tables' gradients, summed (or averaged) over ranks, and of the gradients of the dense
        parameters together, which must be reduced already: call synchronize() of their DistributedOptimizer first, and
        its step() in skip_synchronize(). It is the same on all ranks, which all call this. The gradients of tables
        travel here, and are applied by step(); zero_grad() forgets them. Returns a float64 scalar.
        Errors: those of step(). Source: torch.nn.utils.clip_grad_norm_, which for tables sees only this rank's part.

        >>> from lightcc.torch import embedding as E
        >>> user = E.HashEmbedding(4, name="user", init=E.Zeros()); sparse = E.SGD(E.tables(user), lr=1.0)
        >>> user(torch.tensor([7])).sum().backward(); sparse.clip_grad_norm_(1.0)
        tensor(2., dtype=torch.float64)
        >>> sparse.step(); round(user(torch.tensor([7]))[0, 0].item(), 4)
        -0.5
        """
        self._expect_own()
        gradients = [parameter.grad for parameter in dense if parameter.grad is not None]
        if any(parameter.overflowed for group in self.param_groups for parameter in group["params"]):
            return torch.tensor(math.inf, dtype=torch.float64)  # a GradScaler leaves this step out, on all ranks
        try:
            held = self._begun(hold=True)
            for step in held:
                step.finish()
        except Exception:
            self.zero_grad()
            raise
        self._held = held
        squares = sum(step.squares() for step in held)
        squares += sum(float(gradient.double().square().sum()) for gradient in gradients)
        norm = math.sqrt(squares)
        self._scale = min(1.0, max_norm / (norm + 1e-6)) if norm > max_norm else 1.0
        for gradient in gradients:
            gradient.mul_(self._scale)
        return torch.tensor(norm, dtype=torch.float64)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that the tables have from this rank's backward passes, and those that were clipped."""
        held, self._held = self._held, []
        for step in held:
            step.apply(discard=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def forget(self) -> None:
        """Drops the gradients, and those that were clipped in a world that is gone."""
        self._held = []
        self.zero_grad()

    def _before_grad_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self:
            scaling.agree(self)

    def _begun(self, hold: bool) -> List[exchange.Step]:
        """Sends the gradients, in one exchange for each process set."""
        updates = [exchange.Update(parameter.table, [(one.found, one.grad.numpy()) for one in parameter.pending],
                                   numbers) for parameter, numbers in self._numbered()]
        return [exchange.Step(of_set, self._op == ops.ReduceOps.Average, hold) for of_set in by_set(updates)]

    def _numbered(self) -> List[Tuple[TableParameter, Dict[str, float]]]:
        """The tables, and the numbers that an update of each brings along."""
        numbered = []
        for group in self.param_groups:
            numbers = self._rule.numbers({name: value for name, value in group.items() if name != "params"})
            numbered += [(parameter, numbers) for parameter in group["params"]]
        return numbered

    def _expect_own(self) -> None:
        if self.taken_over:
            raise ValueError(f"this {type(self).__name__} is in a Pipeline: call step() and the others of that.")


def by_set(updates: List[_U]) -> List[List[_U]]:
    """Those of one process set together. Each has a table."""
    sets: Dict[int, List[_U]] = {}
    for one in updates:
        sets.setdefault(id(one.table.group), []).append(one)
    return list(sets.values())


class SGD(TableOptimizer):
    """x -= lr * g.

    params: E.tables(model), or groups of tables. lr: learning rate, at least 0. op: hvd.Average (default; divides by
    the number of ranks, as DistributedOptimizer does) or hvd.Sum. Errors: ValueError for other values.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user", init=E.Zeros()); sparse = E.SGD(E.tables(user), lr=0.5)
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); user(torch.tensor([7])).tolist()
    [[-0.5, -0.5]]
    """

    def __init__(self, params: Tables, lr: float = 1e-3, *, op: int = ops.ReduceOps.Average):
        super().__init__(params, {"lr": lr}, Rule("sgd"), op)


class Adagrad(TableOptimizer):
    """V += g^2; x -= lr * g / (sqrt(V) + eps). rowwise: V is one number a row, and V += mean(g^2).

    initial_accumulator_value: V at a row's birth. Others: those of SGD. Source: torch.optim.Adagrad.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user", init=E.Zeros()); sparse = E.Adagrad(E.tables(user), lr=0.5, rowwise=True)
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); user(torch.tensor([7])).tolist()
    [[-0.5, -0.5]]
    """

    def __init__(self, params: Tables, lr: float = 1e-2, eps: float = 1e-10, *, rowwise: bool = False,
                 initial_accumulator_value: float = 0.0, op: int = ops.ReduceOps.Average):
        _expect("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        super().__init__(params, {"lr": lr, "eps": eps},
                         Rule("rowwise_adagrad" if rowwise else "adagrad", initial=initial_accumulator_value), op)


class LazyAdam(TableOptimizer):
    """Adam that leaves a row as it is in the steps that do not touch it: m = beta1*m + (1-beta1)*g;
    v = beta2*v + (1-beta2)*g^2; x -= alpha_t * m / (sqrt(v) + eps).

    This is what torch.optim.SparseAdam does. betas: of m and v, at least 0 and below 1. Others: those of SGD.
    Source: torch.optim.SparseAdam; the name is TensorFlow Addons'.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user"); sparse = E.LazyAdam(E.tables(user), lr=1e-3, betas=(0.9, 0.99))
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); len(user) <= 1
    True
    """

    def __init__(self, params: Tables, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 *, op: int = ops.ReduceOps.Average):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps}, Rule("lazy_adam"), op)


class SparseAdam(TableOptimizer):
    """Adam as if every row were updated in every step, at the cost of the rows that are looked up.

    A row that comes back after n steps without gradient gets what they would have done: x -= S(n) * m / (sqrt(v) + eps)
    with S(n) = sum over j = 1...min(n, terms) of alpha_(tau+j) * r^j, r = beta1 / sqrt(beta2), and m *= beta1^n, v *=
    beta2^n; then it is updated as by LazyAdam. A lookup in between computes the value that it would have, and
    changes nothing. So it equals torch.optim.Adam over all rows but for where eps stands and for what `terms` cuts off.
    terms: of the sum, 192 by default (1e-9 of a step at beta1 = 0.9); 0: all of them. Others: those of LazyAdam.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user"); sparse = E.SparseAdam(E.tables(user), lr=1e-3)
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); len(user) <= 1
    True
    """

    def __init__(self, params: Tables, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 *, terms: int = 192, op: int = ops.ReduceOps.Average):
        if terms < 0:
            raise ValueError(f"SparseAdam: terms={terms!r} must be at least 0.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps}, Rule("sparse_adam", terms=terms), op)


class GroupAdagrad(TableOptimizer):
    """Adagrad with sparse group lasso: weights, and whole rows, become exactly zero.

    V' = V + g^2; z += lr*g - (sqrt(V') - sqrt(V)) * x; s = clip(z, -lr*l1, lr*l1) - z; x = 0 if |s| <= sqrt(d)*lr*l21,
    else s * (1 - sqrt(d)*lr*l21/|s|) / (sqrt(V') + 2*l2*lr). z is lr times that of the paper: for one lr the same, and
    without penalties it is Adagrad through any change of lr. A row's birth keeps its first value. l1, l2: penalties of
    each weight; l21: of a row's norm; all at least 0. initial_accumulator_value: V at a row's birth, above 0. Others:
    those of SGD. Source: "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction", ECML PKDD
    2021.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user", init=E.Zeros()); sparse = E.GroupAdagrad(E.tables(user), l21=10.0)
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); user(torch.tensor([7])).tolist()
    [[0.0, 0.0]]
    """

    def __init__(self, params: Tables, lr: float = 1e-2, *, l1: float = 0.0, l2: float = 0.0, l21: float = 0.0,
                 initial_accumulator_value: float = 0.1, op: int = ops.ReduceOps.Average):
        if not initial_accumulator_value > 0:
            raise ValueError(f"GroupAdagrad: initial_accumulator_value={initial_accumulator_value!r} must be above 0.")
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2, "l21": l21},
                         Rule("group_adagrad", initial=initial_accumulator_value), op)


class GroupAdam(TableOptimizer):
    """Adam with sparse group lasso, lazily as LazyAdam: weights, and whole rows, become exactly zero.

    m, v and v' as for LazyAdam; z += alpha_t*m - (sqrt(v') - sqrt(v) + eps*[the row's first visit]) * x; then as for
    GroupAdagrad, with the divisor sqrt(v') + eps + 2*l2*lr. Without penalties it is LazyAdam.
    Arguments: those of LazyAdam and l1, l2, l21 of GroupAdagrad. Source: that of GroupAdagrad.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(2, name="user"); sparse = E.GroupAdam(E.tables(user), lr=1e-3, l1=1e-5)
    >>> user(torch.tensor([7])).sum().backward(); sparse.step(); len(user) <= 1
    True
    """

    def __init__(self, params: Tables, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 *, l1: float = 0.0, l2: float = 0.0, l21: float = 0.0, op: int = ops.ReduceOps.Average):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "l1": l1, "l2": l2, "l21": l21},
                         Rule("group_adam"), op)


def _expect(optimizer: str, name: str, value: Any) -> None:
    if name == "betas":
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"{optimizer}: betas={value!r} must be two numbers, at least 0 and below 1.")
    elif not 0 <= value < math.inf:
        raise ValueError(f"{optimizer}: {name}={value!r} must be finite and at least 0.")

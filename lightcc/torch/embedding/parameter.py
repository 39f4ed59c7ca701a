"""What an optimizer and a GradScaler see of a table: a parameter without values, whose grad is the gradient of the rows
that this rank has looked up since the last step.

The rows themselves are in lightcc.embedding's table, spread over the ranks; nothing of them is a torch parameter. So
model.parameters(), state_dict(), DistributedDataParallel and broadcast_parameters do not meet them.
"""
import math
import weakref
from typing import Any, List, Optional

import torch

from lightcc.embedding.exchange import Found
from lightcc.embedding.table import Table


class Pending:
    """The rows of one lookup, and their gradient: (rows, dim), None until backward has come by.

    The graph of the lookup's output keeps it; its table's parameter does too while it has a gradient.
    """

    def __init__(self, found: Found, parameter: "TableParameter"):
        self.found, self._parameter = found, weakref.ref(parameter)  # which refers to this one
        if parameter.overflowed:  # the step that was left out is over
            parameter.grad = None
        self.rows = torch.from_numpy(found.rows)
        self.then = self.rows.clone() if parameter.keeps_rows else None  # the rows are the user's to write to
        self.grad: Optional[torch.Tensor] = None

    def writable_grad(self, cleared: bool = True) -> torch.Tensor:
        """The gradient for a backward pass to add to; zeros at first, or (cleared=False) not even that."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.rows) if cleared else torch.empty_like(self.rows)
            parameter = self._parameter()
            if parameter is not None:
                parameter.pending.append(self)
        return self.grad


class TableParameter(torch.nn.Parameter):
    """Stands for a table in an optimizer's groups. Attributes: table; pending, the lookups that have a gradient.

    `grad` is this rank's own gradient, not yet summed over ranks: (rows looked up, dim), no rows if there are none.
    What changes it in place changes what step() sends. Setting it to None drops it.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); sparse = E.SGD(E.tables(user), lr=0.1)
    >>> user(torch.tensor([7, 9, 7])).sum().backward()
    >>> E.tables(user)[0].grad
    tensor([[2., 2., 2., 2.],
            [1., 1., 1., 1.]])
    """

    table: Table
    pending: List[Pending]
    _joined: torch.Tensor  # the gradients of the first _joined_of pending lookups
    _joined_of: int
    overflowed: bool       # some rank's gradient was not finite
    keeps_rows: bool       # lookups keep a copy of their rows

    @staticmethod
    def __new__(cls, table: Table):
        nothing = torch.empty((0, table.dim), dtype=getattr(torch, table.dtype))
        self = torch.Tensor._make_subclass(cls, nothing, False)  # type: ignore[attr-defined]
        self.table, self.pending = table, []
        self._joined, self._joined_of, self.overflowed, self.keeps_rows = self.data, 0, False, False
        return self

    def __init__(self, table: Table):
        pass

    @property
    def grad(self) -> Any:
        if self.overflowed:
            return self._joined
        if len(self.pending) == 1:
            return self.pending[0].grad
        if len(self.pending) != self._joined_of:  # each one's gradient becomes a part of one tensor
            self._joined = torch.cat([pending.writable_grad() for pending in self.pending])
            for pending, part in zip(self.pending, self._joined.split([len(p.rows) for p in self.pending])):
                pending.grad = part
            self._joined_of = len(self.pending)
        return self._joined

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise ValueError(f"the gradient of table {self.table.name!r} can only be set to None; change it in place.")
        for pending in self.pending:
            pending.grad = None
        self.pending, self._joined, self._joined_of, self.overflowed = [], self.data, 0, False

    def overflow(self) -> None:
        """Drops the gradient; until the next lookup it is infinite, so that a GradScaler leaves out this step."""
        self.grad = None
        self._joined, self.overflowed = self.data.new_full((1, self.table.dim), math.inf), True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"table {self.table.name!r} cannot be copied: its rows are spread over the ranks. Save and "
                        "load it instead (lightcc.torch.embedding.save).")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TableParameter({self.table.name!r}, dim={self.table.dim})"
